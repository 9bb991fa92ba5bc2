#include "bagualu/schedule/dual_batch_instance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "bagualu/graph/native_moe.h"
#include "bagualu/graph/test_models.h"
#include "bagualu/schedule/communicator_order.h"
#include "bagualu/schedule/dual_batch_reference.h"
#include "bagualu/schedule/verify_schedule.h"

namespace bagualu {
namespace {

// One virtual stage with times that tell operators apart: forward of op i is 100 + i us, backward
// 200 + 2 i us, whatever the load.
class StageRig {
 public:
  explicit StageRig(const ModelSpec& spec, bool split = true)
      : graph(build_native_graph(spec, {.seq = 16, .ep_size = 4, .split_weight_grads = split})),
        loads(static_cast<size_t>(graph.layers), LayerLoad{32, 16}) {
    for (int64_t i = 0; i < static_cast<int64_t>(graph.ops.size()); ++i) {
      cost.forward.push_back({{{0, (100 + i) * 1000}}, true});
      cost.backward.push_back({{{0, (200 + 2 * i) * 1000}}, true});
    }
    cost.rebuild.assign(graph.units.size(), {{{0, 7000}}, true});
    cost.d2h_bytes_per_s = cost.h2d_bytes_per_s = 1e9;  // a byte per ns
    cost.encode_bytes_per_s = 1e9;
    state = initial_state(graph);
    plan = uniform_plan(graph, kSave);
  }

  void run_forward() {
    Timeline timeline;
    while (append_forward(graph, plan, state, timeline) >= 0) {
    }
    append_end(graph, plan, state, timeline);
  }

  SegmentBatch batch() const { return {&graph, &cost, &loads, &plan, &state}; }
  int ops() const { return static_cast<int>(graph.ops.size()); }

  Graph graph;
  CostTable cost;
  std::vector<LayerLoad> loads;
  Plan plan;
  MicrobatchState state;
};

struct Pair {
  explicit Pair(const ModelSpec& spec, ResidencyId residency = kSave)
      : forward(spec), backward(spec) {
    backward.plan = forward.plan = uniform_plan(forward.graph, residency);
    backward.run_forward();
  }

  DualBatchSegment segment(const SegmentOptions& options = {}) const {
    return make_segment({forward.batch(), forward.ops()}, {backward.batch()}, options);
  }

  StageRig forward, backward;
};

std::vector<int> joined(const std::vector<std::vector<int>>& lists) {
  std::vector<int> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

int64_t sum_ns(const auto& items) {
  return std::accumulate(items.begin(), items.end(), int64_t{0},
                         [](int64_t sum, const auto& item) { return sum + item.ns; });
}

TEST(DualBatchInstance, HoldsEveryOperatorOnce) {
  for (const bool fuse : {true, false}) {
    const Pair pair(rich_moe_spec());
    const DualBatchSegment segment = pair.segment({.fuse = fuse});
    std::vector<int> forward(pair.forward.graph.ops.size());
    std::iota(forward.begin(), forward.end(), 0);
    EXPECT_EQ(joined(segment.forward_ops), forward);
    std::vector<int> backward, weight_grads;
    int64_t backward_ns = 0;
    for (int i = pair.backward.ops() - 1; i >= 0; --i) {
      const OpSpec& op = pair.backward.graph.ops[i];
      if (!op.has_backward) continue;
      backward.push_back(i);
      backward_ns += (200 + 2 * i) * 1000;
      if (op.has_wgrad) weight_grads.push_back(i);
    }
    EXPECT_EQ(joined(segment.backward_ops), backward);
    EXPECT_EQ(joined(segment.weight_grad_ops), weight_grads);
    EXPECT_GT(weight_grads.size(), 8u);
    const DualBatchInstance& in = segment.instance;
    // Forward: 100 us each and 0 + 1 + ... + (n - 1) us.
    const int64_t n = pair.forward.ops();
    EXPECT_EQ(sum_ns(in.forward), (100 * n + n * (n - 1) / 2) * 1000);
    EXPECT_EQ(sum_ns(in.backward) + sum_ns(in.weight_grads), backward_ns);
    EXPECT_EQ(in.forward.size() < forward.size(), fuse);
    EXPECT_TRUE(in.rebuilds.empty() && in.copies_out.empty() && in.copies_in.empty());
  }
}

TEST(DualBatchInstance, ARunOfComputeIsOneItem) {
  const Pair pair(small_moe_spec());
  const DualBatchInstance in = pair.segment().instance;
  // Forward: attention with the router (up to which the host waits), the packing of rows, dispatch,
  // experts, combine; twice, then the head behind the last combine.
  std::vector<Resource> on;
  for (const ChainOp& op : in.forward) on.push_back(op.resource);
  const Resource compute = Resource::kCompute, comm = Resource::kComm;
  EXPECT_EQ(on, (std::vector<Resource>{compute, compute, comm, compute, comm, compute, compute,
                                       comm, compute, comm, compute}));
  EXPECT_TRUE(in.forward[0].host_sync && in.forward[5].host_sync);
  EXPECT_EQ(std::count_if(in.forward.begin(), in.forward.end(),
                          [](const ChainOp& op) { return op.host_sync; }),
            2);
  // Backward: head and unpacking, combine, experts, dispatch, attention and unpacking, ...
  on.clear();
  for (const ChainOp& op : in.backward) on.push_back(op.resource);
  EXPECT_EQ(on, (std::vector<Resource>{compute, comm, compute, comm, compute, comm, compute, comm,
                                       compute}));
}

TEST(DualBatchInstance, CommunicationIsPinnedPairByPair) {
  const Pair pair(small_moe_spec());
  const DualBatchSegment segment = pair.segment();
  std::vector<std::string> names;
  for (const ScheduleItem& item : segment.instance.comm_order) {
    const bool forward = item.kind == ItemKind::kForward;
    const auto& ops = (forward ? segment.forward_ops : segment.backward_ops)[item.index];
    names.push_back((forward ? "F " : "B ") + pair.forward.graph.ops[ops.front()].name);
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"B layer1.combine", "F layer0.dispatch", "B layer1.dispatch",
                                      "F layer0.combine", "B layer0.combine", "F layer1.dispatch",
                                      "B layer0.dispatch", "F layer1.combine"}));
}

TEST(DualBatchInstance, StagesReceiveFirstAndSendLast) {
  const ModelSpec spec = small_moe_spec();
  NativeGraphOptions options{.seq = 16, .ep_size = 4};
  options.stage = StageSlice{0, 1, false, false};
  Pair pair(spec);
  for (StageRig* rig : {&pair.forward, &pair.backward}) {
    rig->graph = build_native_graph(spec, options);
    rig->plan = uniform_plan(rig->graph, kSave);
    rig->state = initial_state(rig->graph);
  }
  pair.backward.run_forward();
  const DualBatchSegment segment = pair.segment();
  std::vector<OpKind> kinds;
  for (const ScheduleItem& item : segment.instance.comm_order) {
    const bool forward = item.kind == ItemKind::kForward;
    const auto& ops = (forward ? segment.forward_ops : segment.backward_ops)[item.index];
    kinds.push_back(pair.forward.graph.ops[ops.front()].kind);
  }
  EXPECT_EQ(kinds, (std::vector<OpKind>{OpKind::kStageRecv, OpKind::kStageSend, OpKind::kCombine,
                                        OpKind::kDispatch, OpKind::kDispatch, OpKind::kCombine,
                                        OpKind::kStageSend, OpKind::kStageRecv}));
}

TEST(DualBatchInstance, RebuildsAreFillersBeforeTheirItem) {
  const Pair pair(small_moe_spec(), kRecompute);
  const DualBatchSegment segment = pair.segment();
  const DualBatchInstance& in = segment.instance;
  ASSERT_FALSE(in.rebuilds.empty());
  int64_t again_ns = 0;
  Timeline timeline;
  MicrobatchState state = pair.backward.state;
  append_backward(pair.backward.graph, pair.backward.plan, state, timeline);
  for (const Action& action : timeline) {
    if (action.kind == ActionKind::kRecompute) again_ns += (100 + action.id) * 1000;
  }
  EXPECT_EQ(sum_ns(in.rebuilds), again_ns);
  for (size_t r = 0; r < in.rebuilds.size(); ++r) {
    const auto& served = segment.backward_ops[static_cast<size_t>(in.rebuilds[r].before_backward)];
    for (int storage : segment.rebuild_storages[r]) {
      EXPECT_TRUE(std::any_of(served.begin(), served.end(), [&](int op) {
        const auto& saved = pair.backward.graph.ops[op].bwd_saved;
        return std::find(saved.begin(), saved.end(), storage) != saved.end();
      })) << pair.backward.graph.storages[storage].name;
    }
  }
  // Both expert intermediates of both layers are rebuilt in pieces inside the experts' backward,
  // 7 us each; their weight gradient is not put off then.
  const Pair kept(small_moe_spec());
  const DualBatchInstance base = kept.segment().instance;
  EXPECT_EQ(sum_ns(in.backward) + sum_ns(in.weight_grads),
            sum_ns(base.backward) + sum_ns(base.weight_grads) + 4 * 7000);
  EXPECT_LT(sum_ns(in.weight_grads), sum_ns(base.weight_grads));
}

TEST(DualBatchInstance, OffloadsAndReloadsAreCopiesWithTheirEdges) {
  const Pair pair(small_moe_spec(), kOffload);
  const DualBatchSegment segment = pair.segment();
  const DualBatchInstance& in = segment.instance;
  int64_t bytes = 0;
  for (const StorageSpec& s : pair.forward.graph.storages) {
    const UnitSpec* unit = s.unit < 0 ? nullptr : &pair.forward.graph.units[s.unit];
    if (unit != nullptr && !unit->pinned) bytes += s.bytes.eval(16, {32, 16});
  }
  EXPECT_EQ(sum_ns(in.copies_out), bytes);  // a byte per ns
  EXPECT_EQ(sum_ns(in.copies_in), bytes);
  EXPECT_GT(std::count_if(in.copies_out.begin(), in.copies_out.end(),
                          [](const CopyOut& copy) { return copy.releases_for_forward > 0; }),
            4);
  EXPECT_EQ(in.copies_in.front().not_before_backward, -1);
  // The reloads of layer 0 are issued when the backward enters layer 1: in the item that begins with
  // the head.
  EXPECT_EQ(in.copies_in.back().not_before_backward, 0);
  EXPECT_EQ(verify_schedule(in, solve(in)), std::vector<std::string>());
}

// Runs the steps of a solved segment through the appenders that a driver uses.
void run_steps(const Pair& pair, const DualBatchSegment& segment, bool fill) {
  const auto order = communication_first(segment.instance, solve(segment.instance).order);
  MicrobatchState forward = pair.forward.state, backward = pair.backward.state;
  Timeline timeline;
  for (const SegmentStep& step : segment_steps(segment, order)) {
    switch (step.kind) {
      case ItemKind::kForward:
        ASSERT_EQ(forward.next_op, step.id);
        append_forward_op(pair.forward.graph, pair.forward.plan, forward, timeline);
        break;
      case ItemKind::kBackward:
        append_backward_op(pair.backward.graph, pair.backward.plan, true, backward, timeline);
        ASSERT_TRUE(timeline.back().id == step.id || backward.next_backward < step.id);
        break;
      case ItemKind::kWeightGrad:
        ASSERT_EQ(backward.weight_grads.front(), step.id);
        append_weight_grad(pair.backward.graph, backward, timeline);
        break;
      case ItemKind::kRebuild:
        append_rebuild(pair.backward.graph, pair.backward.plan, step.id, backward, timeline);
        break;
    }
  }
  EXPECT_TRUE(forward.forward_done(pair.forward.graph));
  EXPECT_TRUE(backward.backward_done());
  EXPECT_EQ(backward.weight_grads.empty(), fill);
}

TEST(DualBatchInstance, StepsDriveTheTimelinesOfRandomPlans) {
  std::mt19937_64 random(3);
  const auto randomise = [&random](StageRig& rig) {
    for (size_t u = 0; u < rig.graph.units.size(); ++u) {
      const auto residency = static_cast<ResidencyId>(random() % residencies().size());
      rig.plan.residency[u] = uniform_plan(rig.graph, residency).residency[u];
    }
    rig.plan.prefetch = random() % 2;
    rig.plan.eager_drain = random() % 2;
    rig.state = initial_state(rig.graph);
  };
  for (const ModelSpec& spec : {small_moe_spec(), rich_moe_spec()}) {
    Pair pair(spec);
    for (int round = 0; round < 60; ++round) {
      SCOPED_TRACE(round);
      randomise(pair.forward);
      randomise(pair.backward);
      pair.backward.run_forward();
      const DualBatchSegment segment = pair.segment({.fuse = random() % 2 == 0});
      const DualBatchSchedule schedule = solve(segment.instance);
      EXPECT_EQ(verify_schedule(segment.instance, schedule), std::vector<std::string>());
      run_steps(pair, segment, true);
    }
  }
}

TEST(DualBatchInstance, SegmentsFollowEachOtherInOneOrderOfCommunication) {
  const Pair whole(small_moe_spec());
  Pair pair(small_moe_spec());
  const Graph& graph = pair.forward.graph;
  std::vector<std::string> names;
  Timeline timeline;
  // Up to each gate, the backward beside it down to the experts of the layer pair; then the rest.
  for (int gate = 0; gate <= 2; ++gate) {
    const int end = gate < 2 ? graph.gates[gate].op + 1 : pair.forward.ops();
    const int last = gate < 2 ? graph.find_op(gate == 0 ? "layer1.experts" : "layer0.experts") : 0;
    const DualBatchSegment segment =
        make_segment({pair.forward.batch(), end}, {pair.backward.batch(), last});
    EXPECT_FALSE(std::any_of(segment.instance.forward.begin(), segment.instance.forward.end(),
                             [](const ChainOp& op) { return op.host_sync; }));
    for (const ScheduleItem& item : segment.instance.comm_order) {
      const bool forward = item.kind == ItemKind::kForward;
      const auto& ops = (forward ? segment.forward_ops : segment.backward_ops)[item.index];
      names.push_back((forward ? "F " : "B ") + graph.ops[ops.front()].name);
    }
    while (pair.forward.state.next_op < end) {
      append_forward_op(graph, pair.forward.plan, pair.forward.state, timeline);
    }
    for (size_t i = 0; i < joined(segment.backward_ops).size(); ++i) {
      append_backward_op(graph, pair.backward.plan, false, pair.backward.state, timeline);
    }
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"B layer1.combine", "F layer0.dispatch", "B layer1.dispatch",
                                      "F layer0.combine", "B layer0.combine", "F layer1.dispatch",
                                      "B layer0.dispatch", "F layer1.combine"}));
}

TEST(DualBatchInstance, WeightGradientsPutOffBeforeComeFirst) {
  Pair pair(small_moe_spec());
  Timeline timeline;
  const Graph& graph = pair.backward.graph;
  const int experts = graph.find_op("layer1.experts");
  while (!pair.backward.state.in_backward || pair.backward.state.next_backward >= experts) {
    append_backward_op(graph, pair.backward.plan, true, pair.backward.state, timeline);
  }
  ASSERT_EQ(pair.backward.state.weight_grads, std::vector<int>{experts});
  const DualBatchSegment segment = pair.segment();
  EXPECT_EQ(segment.weight_grad_ops.front(), std::vector<int>{experts});
  EXPECT_EQ(segment.instance.weight_grads.front(),
            (WeightGradFiller{(200 + 2 * experts) * 1000 / 2, 0}));
  run_steps(pair, segment, true);
  const DualBatchSegment left =
      make_segment({pair.forward.batch(), pair.forward.ops()},
                   {pair.backward.batch(), 0, /*split=*/true, /*fill=*/false});
  EXPECT_TRUE(left.instance.weight_grads.empty());
  run_steps(pair, left, false);
}

TEST(DualBatchInstance, EitherSideMayBeMissing) {
  const Pair pair(small_moe_spec());
  const DualBatchSegment only_forward =
      make_segment({pair.forward.batch(), pair.forward.ops()}, {});
  EXPECT_EQ(only_forward.instance.comm_order.size(), 4u);
  EXPECT_TRUE(only_forward.instance.backward.empty());
  const DualBatchSegment only_backward = make_segment({}, {pair.backward.batch()});
  EXPECT_EQ(only_backward.instance.comm_order.size(), 4u);
  EXPECT_TRUE(only_backward.instance.forward.empty());
  EXPECT_TRUE(make_segment({}, {}).instance == DualBatchInstance{});
}

TEST(DualBatchInstance, CommunicationFirstStaysLegalAndEndsNoLater) {
  int moved = 0;
  for (int kind = 0; kind < kSmallKinds; ++kind) {
    SmallInstances instances(static_cast<uint64_t>(kind) + 50);
    for (int i = 0; i < 400; ++i) {
      const DualBatchInstance in = instances.next(static_cast<SmallKind>(kind), i % 2 == 0);
      const DualBatchSchedule schedule = solve(in);
      const auto order = communication_first(in, schedule.order);
      moved += order != schedule.order;
      const DualBatchReplay times = replay(in, order);
      EXPECT_LE(times.makespan_ns, schedule.makespan_ns);
      EXPECT_EQ(verify_replay(in, order, times), std::vector<std::string>());
      EXPECT_EQ(communications(in, order), communications(in, schedule.order));
      EXPECT_EQ(communication_first(in, order), order);
    }
  }
  EXPECT_GT(moved, 100);
}

}  // namespace
}  // namespace bagualu
