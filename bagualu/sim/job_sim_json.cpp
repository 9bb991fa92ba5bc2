#include "bagualu/sim/job_sim.h"

namespace bagualu {
namespace {

Json to_json(const SimIteration& one) {
  Json json;
  json["iteration"] = one.iteration;
  json["imbalance"] = one.imbalance;
  json["iteration_ns"] = one.iteration_ns;
  json["pipeline_ns"] = one.pipeline_ns;
  json["peak_bytes"] = one.peak_bytes;
  json["mitigated_ranks"] = one.mitigated_ranks;
  if (one.repeated) json["repeated"] = true;
  if (one.died) json["died"] = true;
  return json;
}

}  // namespace

Json to_json(const SimRun& run) {
  Json json;
  json["label"] = run.policy.label;
  json["policy"] = run.policy.policy;
  json["overlap"] = run.policy.overlap;
  json["kind"] = "simulated";
  json["iterations"] = run.iterations;
  json["tokens"] = run.tokens;
  json["seconds"] = run.seconds;
  json["seconds_calm"] = run.seconds_calm;
  json["tokens_per_s"] = run.tokens_per_s;
  json["tokens_per_s_calm"] = run.tokens_per_s_calm;
  json["mfu_fraction"] = run.mfu_fraction;
  json["mfu_calm_fraction"] = run.mfu_calm_fraction;
  json["best_mfu_fraction"] = run.best_mfu_fraction;
  json["flops_per_s"] = run.flops_per_s;
  json["oom_count"] = run.ooms;
  json["failures"] = run.failures;
  json["lost_iterations"] = run.lost_iterations;
  json["repeated_steps"] = run.repeated_steps;
  json["mitigated_iterations"] = run.mitigated_iterations;
  json["restart_s"] = run.restart_s;
  json["lost_s"] = run.lost_s;
  json["checkpoint_s"] = run.checkpoint_s;
  json["peak_bytes"] = run.peak_bytes;
  json["short_by_bytes"] = run.short_by_bytes;
  json["unable_iteration"] = run.unable_iteration < 0 ? Json() : Json(run.unable_iteration);
  json["events"] = run.events;
  json["series"] = Json::array();
  for (const SimIteration& one : run.series) json["series"].push_back(to_json(one));
  return json;
}

}  // namespace bagualu
