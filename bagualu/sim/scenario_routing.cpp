// Where a scenario's rows come from.
#include <utility>

#include "bagualu/graph/megatron_moe.h"
#include "bagualu/model/routing_log.h"
#include "bagualu/provision/job_survival.h"
#include "bagualu/sim/scenario.h"

namespace bagualu {

RoutingGroup routing_group(const Job& job) {
  RoutingGroup group;
  group.layers = job.model.moe_layers() + (job.model.has_moe() ? job.model.mtp_layers : 0);
  group.microbatches = job.microbatches;
  group.ranks = job.model.has_moe() ? job.layout.ep : 1;
  group.balanced_rows = job.balanced_rows();
  group.replicas = job.layout.expert_dp();
  group.largest_rows = expert_rows(job, worst_imbalance(job));
  return group;
}

void check_trace(Scenario* scenario) {
  RoutingTrace trace = read_routing_logs({scenario->trace});
  scenario->trace_left_out = 0;
  for (const LeftOut& left : trace.left_out) scenario->trace_left_out += left.count;
  recorded_source(std::move(trace), routing_group(scenario->job), scenario->trace.string());
}

std::unique_ptr<RoutingSource> routing_of(const Scenario& scenario) {
  if (scenario.trace.empty()) return make_routing_source(scenario.routing);
  return recorded_source(read_routing_logs({scenario.trace}), routing_group(scenario.job),
                         scenario.trace.string());
}

}  // namespace bagualu
