#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/base/units.h"
#include "bagualu/cli/simulate_report.h"
#include "bagualu/cli/simulate_trace.h"

namespace bagualu {

/// A small job: 8 devices, two pipeline ranks of four expert-parallel ranks.
inline Scenario fake_scenario(const std::string& name = "small") {
  Scenario scenario;
  scenario.name = name;
  scenario.source = "made up for a test";
  Job& job = scenario.job;
  job.model.name = "toy";
  job.model.vocab = 1024;
  job.model.hidden = 64;
  job.model.layers = 4;
  job.model.heads = 4;
  job.model.kv_heads = 4;
  job.model.head_dim = 16;
  job.model.experts = 8;
  job.model.top_k = 2;
  job.model.expert_ffn = 128;
  job.model.moe_layer.assign(4, 1);
  job.layout.world_size = 8;
  job.layout.pp = 2;
  job.layout.ep = 4;
  job.seq = 512;
  job.microbatches = 4;
  scenario.system.name = "fast";
  scenario.system.provenance = "datasheet";
  scenario.budget_bytes = 32 * kGiB;
  scenario.iterations = 100;
  SimPolicy policy;
  for (const char* label : {"static", "adaptive"}) {
    policy.label = policy.policy = label;
    scenario.policies.push_back(policy);
  }
  return scenario;
}

/// 1,000 ms an iteration, 1,200 ms in every tenth, which has an imbalance of 2.5; "static" runs out
/// of memory there once. Stops where progress says so.
inline SimRun fake_run(const Scenario& scenario, const SimPolicy& policy,
                       const SimOptions& options) {
  SimRun run;
  run.policy = policy;
  if (policy.label == "hopeless") {
    run.short_by_bytes = 3 * kGiB;
    return run;
  }
  const bool dies = policy.label == "static";
  for (int64_t i = 0; i < options.iterations; ++i) {
    SimIteration one;
    one.iteration = i;
    one.imbalance = i % 10 == 9 ? 2.5 : 1.1;
    one.iteration_ns = i % 10 == 9 ? 1'200'000'000 : 1'000'000'000;
    one.pipeline_ns = one.iteration_ns - 50'000'000;
    one.peak_bytes = (i % 10 == 9 ? 31 : 28) * kGiB;
    one.mitigated_ranks = !dies && i % 10 == 9 ? 2 : 0;
    if (dies && i == 19) {
      one.died = true;
      run.series.push_back(one);
      one.died = false;
      ++run.ooms;
    }
    run.series.push_back(one);
    run.mitigated_iterations += one.mitigated_ranks > 0 ? 1 : 0;
    run.seconds_calm += static_cast<double>(one.iteration_ns) / 1e9;
    ++run.iterations;
    if (options.progress && !options.progress(run.iterations, options.iterations)) break;
  }
  run.restart_s = dies ? 284 : 0;
  run.lost_s = dies ? 76 : 0;
  run.seconds = run.seconds_calm + run.restart_s + run.lost_s;
  run.tokens = run.iterations * 1'000'000;
  run.tokens_per_s = static_cast<double>(run.tokens) / run.seconds;
  run.tokens_per_s_calm = static_cast<double>(run.tokens) / run.seconds_calm;
  run.mfu_calm_fraction = 0.3;
  run.mfu_fraction = 0.3 * run.seconds_calm / run.seconds;
  run.best_mfu_fraction = 0.32;
  run.peak_bytes = 31 * kGiB;
  run.events = 1000 * run.iterations;
  (void)scenario;
  return run;
}

/// Of every rank: a forward, an exchange beside it, a recompute, two messages at once, a backward,
/// copies.
inline TracedIteration fake_trace(const Scenario& scenario, const SimPolicy&, const SimOptions&,
                                  int64_t iteration, const std::vector<int64_t>& asked) {
  auto program = std::make_shared<StepProgram>();
  program->names = {"forward layer0.qkv",  "forward layer0.dispatch", "recompute layer0.qkv",
                    "forward stage_send",  "backward stage_recv",     "backward layer0.qkv",
                    "offload layer0.rows", "reload layer0.rows"};
  program->static_bytes = 10 * kGiB;
  TracedIteration traced;
  traced.iteration = iteration;
  traced.imbalance = iteration % 10 == 9 ? 2.5 : 1.1;
  traced.hottest_rank = 6;
  traced.end_ns = 1'000'000'000;
  std::vector<int64_t> ranks = asked;
  if (ranks.empty()) ranks = {1, 5, 6};
  for (const int64_t number : ranks) {
    TracedRank rank;
    rank.rank = number;
    rank.place = place_of_rank(scenario.job, 4, number);
    rank.static_bytes = program->static_bytes;
    rank.peak_bytes = 31 * kGiB;
    rank.program = program;
    const auto add = [&](SimStream stream, int32_t name, int64_t from, int64_t to, int64_t gib) {
      rank.events.push_back(
          {from * 1'000'000, to * 1'000'000, gib * kGiB, (gib + 1) * kGiB, name, 0, 0, stream});
    };
    add(SimStream::kCompute, 0, 0, 300, 20);
    add(SimStream::kComm, 1, 100, 250, 20);
    add(SimStream::kSend, 3, 300, 500, 20);
    add(SimStream::kSend, 3, 400, 550, 20);
    add(SimStream::kReceive, 4, 400, 600, 20);
    add(SimStream::kToHost, 6, 300, 350, 20);
    add(SimStream::kCompute, 2, 600, 700, 30);
    add(SimStream::kToDevice, 7, 600, 650, 30);
    add(SimStream::kCompute, 5, 700, 1000, 10);
    traced.ranks.push_back(std::move(rank));
  }
  return traced;
}

inline Simulator fake_simulator() { return {fake_run, fake_trace}; }

/// Where a number is not finite or missing (null); "" if nowhere.
inline std::string not_finite_in(const Json& json, const std::string& place = "answer") {
  if (json.is_null()) return place;
  if (json.is_number_float() && !std::isfinite(json.get<double>())) return place;
  if (json.is_object()) {
    for (const auto& [key, value] : json.items()) {
      if (const std::string found = not_finite_in(value, place + "." + key); !found.empty()) {
        return found;
      }
    }
  } else if (json.is_array()) {
    for (size_t i = 0; i < json.size(); ++i) {
      const std::string found = not_finite_in(json[i], place + "[" + std::to_string(i) + "]");
      if (!found.empty()) return found;
    }
  }
  return "";
}

}  // namespace bagualu
