// Virtual stages of one model on one rank, whose messages go to the rank itself: the numbers are
// those of the model in one piece, and every byte is as predicted, action by action.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/graph/native_moe.h"
#include "bagualu/runtime/attention_scratch.h"
#include "bagualu/runtime/executor.h"
#include "bagualu/runtime/runner_rig.h"
#include "bagualu/schedule/replay.h"

namespace bagualu {
namespace {

constexpr int64_t kQuantiseToo = 4;  // residencies of random plans

ModelSpec four_layers(ModelSpec spec, bool tied) {
  spec.layers = 4;
  spec.moe_layer = {static_cast<uint8_t>(spec.dense_ffn == 0), 1, 1, 1};
  spec.aux_loss_coef = 0.01;
  spec.z_loss_coef = 0.001;
  spec.tied_embeddings = tied;
  return spec;
}

// What differs from run to run.
struct Choices {
  bool random_plans = false;
  bool split = false;  ///< weight gradients after the backwards of all stages
  uint64_t seed = 1;
};

class StageRig {
  struct Flight {
    int slot = 0;
    int64_t microbatch = 0;
    const Graph* graph = nullptr;
    Plan plan;
    MicrobatchState state;
    Timeline timeline;
    std::vector<LayerLoad> loads;
  };

  struct Watch final : ExecutorObserver {
    explicit Watch(StageRig& rig) : rig(rig) {}
    void on_action(const StageAction& action, int64_t, int64_t) override {
      rig.order_.push_back(action);
      rig.measured_.push_back(
          {rig.arena_.live_bytes() - rig.base_bytes_, rig.arena_.peak_bytes() - rig.base_bytes_});
      rig.arena_.mark_peak();
    }
    StageRig& rig;
  };

 public:
  StageRig(const ModelSpec& spec, Dtype dtype, std::vector<int64_t> layers)
      : spec_(spec),
        shape_{.micro_batch_size = 2, .seq = 12, .microbatches = 1, .dtype = dtype},
        layout_(layout_of(std::move(layers))),
        arena_(DeviceArena::install(BudgetCounter::kNoBudget)),
        alone_("", 0, 1),
        graphs_(build_graphs()),
        state_(spec_, layout_, dtype),
        executor_(executor_stages(), spec_,
                  {shape_.micro_batch_size, shape_.seq, dtype, 5, {.verify_checksums = true}},
                  state_, {alone_, &alone_}, {arena_, host_, transfers_}),
        watch_(*this) {
    state_.init_parameters(5, 0);
    executor_.add_observer(&watch_);
  }

  // All micro-batches forward through all stages, then all backward, oldest first.
  Numbers run(int64_t microbatches, const Choices& choices) {
    Random random(static_cast<Random::result_type>(choices.seed));
    begin(microbatches, choices, random);
    for (int64_t m = 0; m < microbatches; ++m) forward(m);
    Numbers numbers;
    for (int64_t m = 0; m < microbatches; ++m) {
      backward(m, choices.split);
      flush_weight_grads(m, random);
      close(m, numbers.losses);
    }
    EXPECT_EQ(arena_.live_bytes() - base_bytes_, 0);
    EXPECT_EQ(host_.live_bytes(), 0);
    for (const auto& [name, gradient] : state_.gradients()) {
      numbers.gradients.emplace_back(name, gradient.clone());
    }
    return numbers;
  }

  // Actions of the last run after or inside which bytes were not as predicted, as text.
  std::vector<std::string> mistakes() const {
    std::vector<std::vector<MemoryPoint>> predicted;
    for (const Flight& f : flights_) {
      predicted.push_back(
          memory_profile(*f.graph, f.plan, memory_table(*f.graph, f.loads), f.timeline));
    }
    std::vector<size_t> done(flights_.size(), 0);
    std::vector<int64_t> live(flights_.size(), 0);
    std::vector<std::string> found;
    int64_t all = 0;
    for (size_t i = 0; i < order_.size(); ++i) {
      const auto slot = static_cast<size_t>(order_[i].slot);
      const MemoryPoint& point = predicted[slot][done[slot]++];
      // An action that gives bytes back began with them.
      const int64_t peak = std::max(all - live[slot] + point.peak_bytes, all);
      all += point.live_bytes - live[slot];
      live[slot] = point.live_bytes;
      if (measured_[i].live_bytes != all || measured_[i].peak_bytes > peak) {
        found.push_back(action_text(*flights_[slot].graph, order_[i].action));
      }
    }
    return found;
  }
  bool deferred_anything() const {
    return std::any_of(order_.begin(), order_.end(), [](const StageAction& each) {
      return each.action.kind == ActionKind::kWeightGrad;
    });
  }
  size_t actions() const { return order_.size(); }

 private:
  static ParallelLayout layout_of(std::vector<int64_t> layers) {
    ParallelLayout layout;
    layout.pipeline = PipelineKind::kInterleaved;
    layout.virtual_per_rank = static_cast<int64_t>(layers.size());
    layout.stage_layers = std::move(layers);
    return layout;
  }

  std::deque<Graph> build_graphs() const {
    at::set_num_threads(1);  // the tensors are small; the scratch of attention grows with threads
    std::deque<Graph> graphs;
    for (const StageSlice& slice : stage_slices(spec_, layout_)) {
      graphs.push_back(build_native_graph(spec_, {.micro_batch_size = shape_.micro_batch_size,
                                                  .seq = shape_.seq,
                                                  .dtype = shape_.dtype,
                                                  .stage = slice,
                                                  .split_weight_grads = true}));
      set_attention_scratch(measure_attention_scratch(spec_, shape_), graphs.back());
    }
    return graphs;
  }

  std::vector<ExecutorStage> executor_stages() const {
    const auto count = static_cast<int64_t>(graphs_.size());
    std::vector<ExecutorStage> stages;
    for (int64_t s = 0; s < count; ++s) {
      stages.push_back(
          {&graphs_[static_cast<size_t>(s)], s, count, s > 0 ? 0 : -1, s + 1 < count ? 0 : -1});
    }
    return stages;
  }

  int stages() const { return static_cast<int>(graphs_.size()); }
  Flight& flight(int64_t microbatch, int stage) {
    return flights_[static_cast<size_t>(microbatch * stages() + stage)];
  }

  void begin(int64_t microbatches, const Choices& choices, Random& random) {
    at::manual_seed(6);
    state_.zero_gradients();
    order_.clear();
    measured_.clear();
    flights_.clear();
    inputs_.clear();
    for (int64_t m = 0; m < microbatches; ++m) {
      const at::Tensor tokens = at::randint(spec_.vocab, {shape_.tokens() + 1}, at::kLong);
      MicrobatchInput input;
      input.microbatch = m;
      input.ids = tokens.narrow(0, 0, shape_.tokens()).clone();
      input.targets = tokens.narrow(0, 1, shape_.tokens()).clone();
      input.dropout_seed = 99 + static_cast<uint64_t>(m);
      input.loss_scale = 1.0 / static_cast<double>(shape_.tokens());
      inputs_.push_back(input);
      for (int s = 0; s < stages(); ++s) {
        const Graph& graph = graphs_[static_cast<size_t>(s)];
        flights_.push_back({static_cast<int>(flights_.size()),
                            m,
                            &graph,
                            choices.random_plans ? random_plan(graph, random, kQuantiseToo - 1)
                                                 : uniform_plan(graph, kSave),
                            initial_state(graph),
                            {},
                            std::vector<LayerLoad>(static_cast<size_t>(graph.layers))});
      }
    }
    base_bytes_ = arena_.live_bytes();
    arena_.mark_peak();
    for (const Flight& f : flights_) {
      executor_.open(f.slot, f.slot % stages(), inputs_[static_cast<size_t>(f.microbatch)]);
    }
    arena_.mark_peak();
  }

  template <class Append>
  void extend(Flight& f, Append&& append) {
    const size_t begin = f.timeline.size();
    append(*f.graph, f.plan, f.state, f.timeline);
    executor_.set_plan(f.slot, f.plan);
    executor_.run(f.slot, f.timeline, begin);
  }

  // A message of a rank to itself ends when both halves were issued: so a stage's last operator is
  // awaited after the next stage's first.
  void forward(int64_t microbatch) {
    for (int s = 0; s < stages(); ++s) {
      Flight& f = flight(microbatch, s);
      while (!f.state.forward_done(*f.graph)) {
        extend(f, append_forward_op);
        if (s > 0) extend(flight(microbatch, s - 1), append_end);
      }
    }
  }

  void backward(int64_t microbatch, bool split) {
    for (int s = stages() - 1; s >= 0; --s) {
      Flight& f = flight(microbatch, s);
      do {
        extend(f, [&](const Graph& graph, const Plan& plan, MicrobatchState& state,
                      Timeline& timeline) {
          append_backward_op(graph, plan, split, state, timeline);
        });
        if (s + 1 < stages()) extend(flight(microbatch, s + 1), append_end);
      } while (!f.state.backward_done());
    }
  }

  // Stage after stage, some of each.
  void flush_weight_grads(int64_t microbatch, Random& random) {
    for (bool left = true; left;) {
      left = false;
      for (int s = 0; s < stages(); ++s) {
        Flight& f = flight(microbatch, s);
        for (int64_t n = below(random, 4); n > 0 && !f.state.weight_grads.empty(); --n) {
          extend(f, [](const Graph& graph, const Plan&, MicrobatchState& state,
                       Timeline& timeline) { append_weight_grad(graph, state, timeline); });
        }
        left = left || !f.state.weight_grads.empty();
      }
    }
  }

  void close(int64_t microbatch, MicrobatchLosses& losses) {
    for (int s = 0; s < stages(); ++s) {
      Flight& f = flight(microbatch, s);
      const MicrobatchResult result = executor_.close(f.slot);
      losses.cross_entropy_sum += result.losses.cross_entropy_sum;
      losses.aux += result.losses.aux;
      losses.z += result.losses.z;
      for (size_t layer = 0; layer < result.routing.size(); ++layer) {
        if (result.routing[layer]) f.loads[layer] = result.routing[layer]->load;
      }
    }
  }

  const ModelSpec spec_;
  const TrainShape shape_;
  const ParallelLayout layout_;
  DeviceArena& arena_;
  Communicator alone_;
  const std::deque<Graph> graphs_;
  ModelState state_;
  HostArena host_;
  CpuTransferEngine transfers_;
  Executor executor_;
  Watch watch_;
  std::vector<MicrobatchInput> inputs_;
  std::vector<Flight> flights_;  ///< by slot: micro-batch by micro-batch, stage by stage
  std::vector<StageAction> order_;
  std::vector<MemoryPoint> measured_;
  int64_t base_bytes_ = 0;
};

const std::vector<std::vector<int64_t>> kSplits = {{3, 1}, {1, 1, 1, 1}, {0, 1, 3, 0}};

std::vector<ModelSpec> models() {
  ModelSpec without_dropout = four_layers(rich_moe_spec(), /*tied=*/false);
  without_dropout.dropout = 0;
  return {four_layers(rich_moe_spec(), /*tied=*/false), without_dropout,
          four_layers(small_moe_spec(), /*tied=*/true)};
}

// The auxiliary losses are sums over layers, added up stage by stage: equal but for rounding. All
// else is the same operators on the same values in the same order.
void expect_same(const Numbers& found, const Numbers& whole) {
  Numbers a = found;
  EXPECT_NEAR(a.losses.aux, whole.losses.aux, 1e-12 * whole.losses.aux);
  EXPECT_NEAR(a.losses.z, whole.losses.z, 1e-12 * whole.losses.z);
  a.losses.aux = whole.losses.aux;
  a.losses.z = whole.losses.z;
  EXPECT_THAT(differences(a, whole), testing::IsEmpty());
}

class Stages : public ::testing::TestWithParam<Dtype> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, Stages, ::testing::Values(Dtype::kFp32, Dtype::kBf16),
                         [](const auto& info) {
                           return info.param == Dtype::kFp32 ? "Fp32" : "Bf16";
                         });

TEST_P(Stages, ComputeWhatTheModelInOnePieceDoes) {
  for (const ModelSpec& spec : models()) {
    for (const int64_t microbatches : {1, 3}) {
      StageRig one(spec, GetParam(), {4});
      const Numbers whole = one.run(microbatches, {});
      for (const std::vector<int64_t>& layers : kSplits) {
        StageRig rig(spec, GetParam(), layers);
        expect_same(rig.run(microbatches, {}), whole);
      }
    }
  }
}

TEST_P(Stages, KeepTheBitsUnderRandomPlansAndDeferredWeightGradients) {
  for (const ModelSpec& spec : models()) {
    StageRig one(spec, GetParam(), {4});
    const Numbers whole = one.run(2, {});
    for (const std::vector<int64_t>& layers : kSplits) {
      StageRig rig(spec, GetParam(), layers);
      for (uint64_t seed = 1; seed <= 4; ++seed) {
        expect_same(rig.run(2, {.random_plans = true, .split = seed % 2 == 0, .seed = seed}),
                    whole);
        EXPECT_EQ(rig.deferred_anything(), seed % 2 == 0);
      }
    }
  }
}

TEST_P(Stages, TakeThePredictedBytesInEveryAction) {
  size_t actions = 0;
  for (const ModelSpec& spec : models()) {
    for (const std::vector<int64_t>& layers : kSplits) {
      StageRig rig(spec, GetParam(), layers);
      for (uint64_t seed = 1; seed <= 4; ++seed) {
        rig.run(2, {.random_plans = seed > 1, .split = seed % 2 == 0, .seed = seed});
        EXPECT_THAT(rig.mistakes(), testing::IsEmpty());
        actions += rig.actions();
      }
    }
  }
  EXPECT_GT(actions, 10'000u);
}

}  // namespace
}  // namespace bagualu
