#include "bagualu/schedule/replay.h"

#include <gtest/gtest.h>

#include <random>

#include "bagualu/graph/native_moe.h"
#include "bagualu/graph/test_models.h"
#include "bagualu/schedule/reference_walk.h"

namespace bagualu {
namespace {

using Random = std::mt19937;

int64_t below(Random& random, int64_t n) { return static_cast<int64_t>(random() % n); }

Plan random_plan(const Graph& graph, Random& random) {
  Plan plan = uniform_plan(graph, kSave);
  for (size_t u = 0; u < graph.units.size(); ++u) {
    const auto r = static_cast<ResidencyId>(below(random, residencies().size()));
    plan.residency[u] = uniform_plan(graph, r).residency[u];
  }
  plan.eager_drain = below(random, 2) == 0;
  plan.prefetch = below(random, 2) == 0;
  return plan;
}

std::vector<LayerLoad> random_loads(const Graph& graph, Random& random) {
  std::vector<LayerLoad> loads(graph.layers);
  for (LayerLoad& load : loads) {
    load.rows = below(random, 4) == 0 ? 0 : below(random, 500);
    load.piece_rows = std::min<int64_t>(load.rows, 1 + below(random, 32));
  }
  return loads;
}

std::vector<Graph> graphs() {
  std::vector<Graph> all;
  ModelSpec norms = small_moe_spec();
  norms.qk_norm = true;
  ModelSpec shared = small_moe_spec();
  shared.shared_ffn = 32;
  ModelSpec dropout = small_moe_spec();
  dropout.dropout = 0.2;
  ModelSpec dense = small_moe_spec();
  dense.moe_layer = {0, 0};
  dense.dense_ffn = 64;
  for (const ModelSpec& spec : {small_moe_spec(), rich_moe_spec(), norms, shared, dropout, dense}) {
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
      for (const int64_t ep : {1, 4}) {
        all.push_back(build_native_graph(
            spec, {.micro_batch_size = 1, .seq = 24, .dtype = dtype, .ep_size = ep}));
      }
    }
  }
  return all;
}

// Runs a micro-batch the way the runtime does: a decision at every gate, replayed piecewise.
class MicrobatchRun {
 public:
  MicrobatchRun(const Graph& graph, const std::vector<LayerLoad>& loads)
      : graph_(graph),
        table_(memory_table(graph, loads)),
        state_(initial_state(graph)),
        reference_(graph, loads) {}

  // `choose` makes the plan before the first operator and at every gate.
  template <class Choose>
  void all(const Choose& choose) {
    plan_ = choose();
    while (append_forward(graph_, plan_, state_, timeline_) >= 0) {
      advance();
      plan_ = choose();
      keep_past_choices(graph_, state_, plan_);
      append_demotions(graph_, plan_, state_, timeline_);
      advance();
    }
    append_backward(graph_, plan_, state_, timeline_);
    advance();
  }

  void expect_agreement() const {
    EXPECT_EQ(replay_.live_bytes, 0);
    EXPECT_EQ(replay_.host_live_bytes, 0);
    EXPECT_EQ(replay_.peak_bytes, reference_.peak());
    EXPECT_EQ(replay_.host_peak_bytes, reference_.host_peak());
    for (const auto& [storage, times] : reference_.frees()) {
      EXPECT_EQ(times, 1) << graph_.storages[storage].name;
    }
  }

  const MemoryReplay& replay() const { return replay_; }
  const Timeline& timeline() const { return timeline_; }

 private:
  void advance() {
    replay_memory(graph_, plan_, table_, timeline_, done_, replay_);
    for (; done_ < timeline_.size(); ++done_) reference_.step(plan_, timeline_[done_]);
    EXPECT_EQ(replay_.live_bytes, reference_.live());
    EXPECT_EQ(replay_.host_live_bytes, reference_.host_live());
  }

  const Graph& graph_;
  const MemoryTable table_;
  MicrobatchState state_;
  ReferenceWalk reference_;
  Plan plan_;
  Timeline timeline_;
  size_t done_ = 0;
  MemoryReplay replay_;
};

TEST(Replay, AgreesWithTheReferenceUnderRandomPlans) {
  const std::vector<Graph> all = graphs();
  Random random(7);
  for (int round = 0; round < 300 && !::testing::Test::HasFailure(); ++round) {
    const Graph& graph = all[round % all.size()];
    SCOPED_TRACE(round);
    const auto loads = random_loads(graph, random);
    const Plan plan = random_plan(graph, random);
    MicrobatchRun run(graph, loads);
    run.all([&] { return plan; });
    run.expect_agreement();
    EXPECT_EQ(run.timeline(), build_timeline(graph, plan));
  }
}

TEST(Replay, AgreesWithTheReferenceWhenThePlanChangesAtEveryGate) {
  const std::vector<Graph> all = graphs();
  Random random(11);
  for (int round = 0; round < 600 && !::testing::Test::HasFailure(); ++round) {
    const Graph& graph = all[round % all.size()];
    SCOPED_TRACE(round);
    const auto loads = random_loads(graph, random);
    MicrobatchRun run(graph, loads);
    run.all([&] { return random_plan(graph, random); });
    run.expect_agreement();
  }
}

TEST(Replay, SaveAllHoldsEverySavedStorageAtTheEndOfForward) {
  const Graph graph = build_native_graph(small_moe_spec(), {.seq = 16, .ep_size = 4});
  const std::vector<LayerLoad> loads(2, {.rows = 40, .piece_rows = 16});
  const MemoryTable table = memory_table(graph, loads);
  const Plan plan = uniform_plan(graph, kSave);
  MicrobatchState state = initial_state(graph);
  Timeline timeline;
  while (append_forward(graph, plan, state, timeline) >= 0) {
  }
  MemoryReplay replay;
  replay_memory(graph, plan, table, timeline, 0, replay);
  int64_t saved = 0;
  for (const UnitSpec& unit : graph.units) {
    for (int s : unit.storages) saved += table.storage_bytes[s];
  }
  EXPECT_EQ(replay.live_bytes, saved);
}

TEST(Replay, GivingUpMoreNeverRaisesTheBytesAtTheEndOfForward) {
  for (const Graph& graph : graphs()) {
    const std::vector<LayerLoad> loads(graph.layers, {.rows = 96, .piece_rows = 16});
    const auto peak_under = [&](ResidencyId r, bool eager) {
      MicrobatchRun run(graph, loads);
      Plan plan = uniform_plan(graph, r);
      plan.eager_drain = eager;
      plan.prefetch = false;
      run.all([&] { return plan; });
      return run.replay().peak_bytes;
    };
    EXPECT_LE(peak_under(kRecompute, false), peak_under(kSave, false));
    EXPECT_LE(peak_under(kOffload, true), peak_under(kOffload, false));
    EXPECT_LE(peak_under(kOffload, true), peak_under(kSave, false));
  }
}

TEST(Replay, ProfileEndsAtZeroAndHoldsThePeak) {
  const Graph graph = build_native_graph(rich_moe_spec(), {.seq = 16, .ep_size = 4});
  const std::vector<LayerLoad> loads(3, {.rows = 40, .piece_rows = 16});
  const MemoryTable table = memory_table(graph, loads);
  Random random(3);
  const Plan plan = random_plan(graph, random);
  const Timeline timeline = build_timeline(graph, plan);
  MemoryReplay replay;
  replay_memory(graph, plan, table, timeline, 0, replay);
  const auto points = memory_profile(graph, plan, table, timeline);
  ASSERT_EQ(points.size(), timeline.size());
  int64_t peak = 0;
  for (const MemoryPoint& point : points) peak = std::max(peak, point.peak_bytes);
  EXPECT_EQ(peak, replay.peak_bytes);
  EXPECT_EQ(points[replay.peak_action].peak_bytes, peak);
  EXPECT_EQ(points.back().live_bytes, 0);
}

TEST(Replay, UpdatingALayerEqualsABuiltTable) {
  const Graph graph = build_native_graph(rich_moe_spec(), {.seq = 16, .ep_size = 4});
  std::vector<LayerLoad> loads(3, {.rows = 40, .piece_rows = 16});
  MemoryTable table = memory_table(graph, loads);
  loads[1] = {.rows = 999, .piece_rows = 30};
  update_layer(graph, LoadDependence(graph), 1, loads[1], table);
  const MemoryTable built = memory_table(graph, loads);
  EXPECT_EQ(table.storage_bytes, built.storage_bytes);
  EXPECT_EQ(table.piece_bytes, built.piece_bytes);
  EXPECT_EQ(table.encoded_bytes, built.encoded_bytes);
  EXPECT_EQ(table.fwd_workspace, built.fwd_workspace);
  EXPECT_EQ(table.bwd_workspace, built.bwd_workspace);
}

}  // namespace
}  // namespace bagualu
