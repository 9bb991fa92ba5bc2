#include "bagualu/provision/stage_driver.h"

#include "bagualu/base/error.h"
#include "bagualu/provision/rank_program.h"

namespace bagualu {

RankRun drive_stage(const ProvisionContext& context, Policy& policy, const PipelineOrder& order,
                    int rank, const std::vector<std::vector<LayerLoad>>& loads,
                    const StageOptions& options) {
  BGL_CHECK(rank >= 0 && rank < static_cast<int>(order.ranks.size()), rank, order.ranks.size());
  BGL_CHECK(static_cast<int>(loads.size()) == order.microbatches, loads.size(), order.microbatches);
  for (const auto& layers : loads) {
    BGL_CHECK(static_cast<int>(layers.size()) == context.graph->layers, layers.size());
  }
  const std::vector<PipelinePass>& passes = order.ranks[static_cast<size_t>(rank)];
  BGL_CHECK(!passes.empty(), rank);
  const LoadOf load_of = [&](int, int microbatch, int layer) {
    return loads[static_cast<size_t>(microbatch)][static_cast<size_t>(layer)];
  };
  return replay_rank({{passes.front().stage, &context, &policy}},
                     {.activation_budget_bytes = context.activation_budget_bytes,
                      .host_budget_bytes = context.host_budget_bytes,
                      .stop_at_death = options.stop_at_death,
                      .reload_ahead = false},
                     {.passes = passes}, load_of);
}

}  // namespace bagualu
