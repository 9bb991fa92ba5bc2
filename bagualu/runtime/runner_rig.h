// A runner of one rank with everything under it, for tests, and policies that do as a test says.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/graph/test_models.h"
#include "bagualu/runtime/attention_scratch.h"
#include "bagualu/runtime/pipeline_runner.h"
#include "bagualu/runtime/trainer.h"
#include "bagualu/runtime/transfer_cpu.h"

namespace bagualu {

using Random = std::mt19937;

inline int64_t below(Random& random, int64_t n) { return static_cast<int64_t>(random() % n); }

/// Every unit gets one of the first `kinds` registered residencies (3: save, recompute, offload).
inline Plan random_plan(const Graph& graph, Random& random, int64_t kinds = 3) {
  Plan plan = uniform_plan(graph, kSave);
  for (size_t u = 0; u < graph.units.size(); ++u) {
    const auto residency = static_cast<ResidencyId>(below(random, kinds));
    plan.residency[u] = uniform_plan(graph, residency).residency[u];
  }
  plan.eager_drain = below(random, 2) == 0;
  plan.prefetch = below(random, 2) == 0;
  return plan;
}

/// Calls a function for the plan of every decision.
class PlanSource final : public Policy {
 public:
  explicit PlanSource(std::function<Plan()> next) : next_(std::move(next)) {}
  explicit PlanSource(Plan plan) : next_([plan = std::move(plan)] { return plan; }) {}
  std::string_view name() const override { return "test"; }
  Decision decide(const GateInput&) override {
    Decision decision;
    decision.plan = next_();
    return decision;
  }

 private:
  std::function<Plan()> next_;
};

/// What a micro-batch computed.
struct Numbers {
  MicrobatchLosses losses;
  std::vector<std::pair<std::string, at::Tensor>> gradients;
};

/// Names of what differs in any bit; empty if nothing does.
inline std::vector<std::string> differences(const Numbers& a, const Numbers& b) {
  std::vector<std::string> found;
  if (a.losses.cross_entropy_sum != b.losses.cross_entropy_sum) found.push_back("loss");
  if (a.losses.aux != b.losses.aux) found.push_back("aux loss");
  if (a.losses.z != b.losses.z) found.push_back("z loss");
  for (size_t i = 0; i < a.gradients.size(); ++i) {
    // Bytes, so that -0 and 0 differ and equal NaNs do not.
    const at::Tensor x = a.gradients[i].second.view({-1}).view(at::kByte);
    const at::Tensor y = b.gradients[i].second.view({-1}).view(at::kByte);
    if (!at::equal(x, y)) found.push_back(a.gradients[i].first);
  }
  return found;
}

class RunnerRig {
  struct Watch final : ExecutorObserver {
    explicit Watch(const std::function<void(const Action&)>& call) : call(call) {}
    void on_action(const StageAction& of, int64_t, int64_t) override { call(of.action); }
    const std::function<void(const Action&)>& call;
  };

 public:
  RunnerRig(const ModelSpec& model, const TrainerOptions& settings)
      : arena(DeviceArena::install(BudgetCounter::kNoBudget)),
        spec(model),
        options(settings),
        graph(training_graph(spec, options, measure_attention_scratch(spec, options.shape))),
        alone("", 0, 1),
        state(spec, options.layout, options.shape.dtype),
        executor({ExecutorStage{.graph = &graph}}, spec,
                 {options.shape.micro_batch_size, options.shape.seq, options.shape.dtype,
                  options.chunk_rows, {.verify_checksums = true}},
                 state, {alone}, {arena, host, transfers}),
        runner(executor, arena, host, alone) {
    state.init_parameters(options.seed, 0);
    loads.resize(graph.layers);
    at::manual_seed(static_cast<int64_t>(options.seed) + 1);
    const at::Tensor tokens = at::randint(spec.vocab, {graph.tokens + 1}, at::kLong);
    ids = tokens.narrow(0, 0, graph.tokens).clone();
    targets = tokens.narrow(0, 1, graph.tokens).clone();
  }

  MicrobatchReport run(Policy& policy, const RoutingOverride* routing = nullptr) {
    state.zero_gradients();
    MicrobatchInput input;
    input.ids = ids;
    input.targets = targets;
    input.routing = routing;
    input.dropout_seed = 99;
    input.loss_scale = 1.0 / static_cast<double>(graph.tokens);
    context = {.graph = &graph,
               .cost = &cost,
               .balanced = balanced_load(spec, options),
               .worst_case = bounding_load(spec, options)};
    runner.set_stages({{0, &context, &policy}}, {});
    if (on_action) executor.add_observer(&watch);
    const RankProgram program{{{0, PassKind::kForward, 0}, {0, PassKind::kBackward, 0}}, {}, {}};
    PassesReport passes;
    try {
      passes = runner.train(program, [&](int, int, int64_t) { return input; });
    } catch (...) {
      executor.remove_observer(&watch);
      throw;
    }
    executor.remove_observer(&watch);
    MicrobatchReport& report = passes.microbatches.front();
    for (int layer = 0; layer < graph.layers; ++layer) {
      if (report.routing[layer]) loads[layer] = report.routing[layer]->load;
    }
    return std::move(report);
  }

  Numbers numbers(const MicrobatchReport& report) const {
    Numbers result{report.losses, {}};
    for (const auto& [name, gradient] : state.gradients()) {
      result.gradients.emplace_back(name, gradient.clone());
    }
    return result;
  }

  DeviceArena& arena;
  const ModelSpec spec;
  const TrainerOptions options;
  const Graph graph;
  Communicator alone;
  ModelState state;
  HostArena host;
  CpuTransferEngine transfers;
  Executor executor;
  PipelineRunner runner;
  CostTable cost = [this] {
    CostTable none;
    none.forward.resize(graph.ops.size());
    none.backward.resize(graph.ops.size());
    none.rebuild.resize(graph.units.size());
    return none;
  }();
  ProvisionContext context;
  at::Tensor ids, targets;
  std::function<void(const Action&)> on_action;  ///< called after every action of run()
  Watch watch{on_action};
  std::vector<LayerLoad> loads;  ///< of the last run
};

/// Pieces of 5 rows, so that experts have several and most end in the middle of a vector.
inline TrainerOptions small_options(Dtype dtype = Dtype::kFp32) {
  TrainerOptions options;
  options.shape = {.micro_batch_size = 2, .seq = 12, .microbatches = 1, .dtype = dtype};
  options.chunk_rows = 5;
  options.seed = 5;
  return options;
}

}  // namespace bagualu
