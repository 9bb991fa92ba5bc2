// What must not be touched while something is under way, each with a step that touches it; and
// stages of one model that hand tensors to each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "bagualu/base/error.h"
#include "bagualu/runtime/overlap_rig.h"
#include "bagualu/runtime/step_recorder.h"

namespace bagualu {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TrainerOptions hazard_options(int64_t world = 1, int64_t ep = 1) {
  TrainerOptions options = small_options();
  options.layout.world_size = world;
  options.layout.ep_size = ep;
  options.shape.seq = 6;
  return options;
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const InternalError& error) {
    return error.what();
  }
  return "no error";
}

// The model in two virtual stages. They are on one rank, or on two of a group.
class TwoStages {
 public:
  TwoStages(const ModelSpec& model, int64_t rank, int64_t ranks, const std::string& pp_group)
      : spec(model),
        options(layout_of(ranks)),
        graphs(graphs_of(spec, options)),
        ep("", 0, 1),
        pp(pp_group, rank, ranks, {.name = "pp", .job_ranks = {}}),
        state(spec, options.layout, options.shape.dtype, rank),
        executor(stages_of(graphs, ranks), spec,
                 {options.shape.micro_batch_size,
                  options.shape.seq,
                  options.shape.dtype,
                  options.chunk_rows,
                  {.verify_checksums = true}},
                 state, {ep, &pp}, {*DeviceArena::installed(), host, transfers}) {
    state.init_parameters(options.seed, 0);
    state.zero_gradients();
  }

  // Stage 0 has as many layers as make the two as even as they can be, stage 1 the rest.
  static TrainerOptions layout_of(int64_t ranks) {
    TrainerOptions options = hazard_options(ranks);
    options.layout.pp_size = ranks;
    return options;
  }
  static std::vector<Graph> graphs_of(const ModelSpec& spec, const TrainerOptions& options) {
    ParallelLayout two = options.layout;
    two.pp_size = two.world_size = 2;
    std::vector<Graph> graphs;
    for (const StageSlice& slice : stage_slices(spec, two)) {
      NativeGraphOptions native = graph_options(options);
      native.split_weight_grads = true;
      native.stage = slice;
      graphs.push_back(build_native_graph(spec, native));
    }
    return graphs;
  }
  static std::vector<ExecutorStage> stages_of(const std::vector<Graph>& graphs, int64_t ranks) {
    std::vector<ExecutorStage> stages(2);
    for (int s = 0; s < 2; ++s) {
      stages[s] = {.graph = &graphs[s], .stage = s, .stages = 2};
      const int64_t other = ranks == 1 ? 0 : 1 - s;
      (s == 0 ? stages[s].next_rank : stages[s].previous_rank) = other;
    }
    return stages;
  }

  void open(int slot, int stage, const MicrobatchInput& input) {
    executor.open(slot, stage, input);
    executor.set_plan(slot, uniform_plan(graphs[stage], kSave));
  }
  void run(int slot, const Timeline& timeline) { executor.run(slot, timeline); }

  const ModelSpec spec;
  const TrainerOptions options;
  const std::vector<Graph> graphs;
  Communicator ep, pp;
  ModelState state;
  HostArena host;
  FakeTransferEngine transfers;
  Executor executor;
};

// Forward and backward of one stage, everything saved.
struct Halves {
  explicit Halves(const Graph& graph) {
    const Plan plan = uniform_plan(graph, kSave);
    MicrobatchState state = initial_state(graph);
    while (!state.forward_done(graph)) append_forward(graph, plan, state, forward);
    append_end(graph, plan, state, forward);
    append_backward(graph, plan, state, backward);
  }
  Timeline forward, backward;
};

// A stage's forward up to the end of its send, and from there.
std::pair<Timeline, Timeline> split_at_end(const Timeline& timeline) {
  const auto end = std::find_if(timeline.begin(), timeline.end(), [](const Action& action) {
    return action.kind == ActionKind::kForwardEnd;
  });
  return {Timeline(timeline.begin(), end), Timeline(end, timeline.end())};
}

// By name; in two stages every parameter is in one of them.
void expect_gradients(const ModelState& found, const StepNumbers& expected, size_t& seen) {
  std::map<std::string, at::Tensor> want(expected.gradients.begin(), expected.gradients.end());
  for (const auto& [name, gradient] : found.gradients()) {
    ++seen;
    EXPECT_TRUE(at::equal(gradient, want.at(name))) << name;
  }
}

class OverlapHazards : public testing::Test {
 protected:
  void SetUp() override { DeviceArena::install(BudgetCounter::kNoBudget); }
};

TEST_F(OverlapHazards, WhatIsBeingSentIsNeitherReadNorMovedNorFreed) {
  const OverlapRank whole(rich_moe_spec(), hazard_options(), 0, "", 1);
  TwoStages rank(rich_moe_spec(), 0, 1, "");
  const Halves halves(rank.graphs[0]);
  const OpSpec& send = rank.graphs[0].ops.back();
  const int hidden = send.reads[0];
  rank.open(0, 0, whole.input(0));
  rank.run(0, split_at_end(halves.forward).first);
  for (const ActionKind kind :
       {ActionKind::kFree, ActionKind::kDrop, ActionKind::kOffload, ActionKind::kEncode}) {
    EXPECT_THAT(error_of([&] {
                  rank.run(0, {{kind, hidden}});
                }),
                AllOf(HasSubstr(rank.graphs[0].storages[hidden].name), HasSubstr("LENT")));
  }
  EXPECT_THAT(error_of([&] { rank.executor.store(0).get(hidden); }), HasSubstr("not live"));
  EXPECT_THAT(error_of([&] { rank.executor.close(0); }), HasSubstr("was not awaited"));
  rank.executor.abort_all();
}

TEST_F(OverlapHazards, WhatIsBeingReceivedIsNotReadBeforeItsEnd) {
  const OverlapRank whole(rich_moe_spec(), hazard_options(), 0, "", 1);
  TwoStages rank(rich_moe_spec(), 0, 1, "");
  const Graph& graph = rank.graphs[1];
  ASSERT_EQ(graph.ops[0].kind, OpKind::kStageRecv);
  rank.open(1, 1, whole.input(0));
  rank.run(1, {{ActionKind::kForward, 0}});
  EXPECT_THAT(error_of([&] {
                rank.run(1, {{ActionKind::kForward, 1}});
              }),
              AllOf(HasSubstr("stage_recv.out"), HasSubstr("EMPTY > LIVE > LENT")));
  EXPECT_THAT(error_of([&] {
                rank.run(1, {{ActionKind::kForwardEnd, 2}});
              }),
              HasSubstr("was not issued"));
  rank.executor.abort_all();
}

TEST_F(OverlapHazards, AWeightGradientThatLagsExtendsTheLifeOfItsInputs) {
  OverlapRank rank(rich_moe_spec(), hazard_options(), 0, "", 1);
  const StepNumbers expected = plain_step(rank, 1);
  const Plan plan = uniform_plan(rank.graph, kSave);
  Timeline timeline;
  MicrobatchState state = initial_state(rank.graph);
  while (!state.forward_done(rank.graph)) append_forward(rank.graph, plan, state, timeline);
  while (!state.backward_done()) append_backward_op(rank.graph, plan, true, state, timeline);
  append_end(rank.graph, plan, state, timeline);
  EXPECT_GE(state.weight_grads.size(), 10u);
  while (!state.weight_grads.empty()) append_weight_grad(rank.graph, state, timeline);

  const auto run = [&](const Timeline& actions) {
    rank.state.zero_gradients();
    rank.executor.open(0, 0, rank.input(0));
    rank.executor.set_plan(0, plan);
    rank.executor.run(0, actions);
    return step_numbers(rank, {rank.executor.close(0)});
  };
  EXPECT_TRUE(differences(run(timeline), expected).empty());

  // Every free behind a weight gradient, moved before it, is found.
  int moved = 0;
  for (size_t i = 1; i < timeline.size(); ++i) {
    if (timeline[i].kind != ActionKind::kFree || timeline[i - 1].kind != ActionKind::kWeightGrad) {
      continue;
    }
    Timeline wrong = timeline;
    std::swap(wrong[i], wrong[i - 1]);
    EXPECT_THAT(error_of([&] { run(wrong); }), AllOf(HasSubstr("not live"), HasSubstr("RELEASED")));
    rank.executor.abort_all();
    ++moved;
  }
  EXPECT_GE(moved, 10);
  EXPECT_TRUE(differences(run(timeline), expected).empty());
}

TEST_F(OverlapHazards, TwoStagesOfOneRankGiveTheGradientsOfTheWholeModel) {
  OverlapRank whole(rich_moe_spec(), hazard_options(), 0, "", 1);
  const StepNumbers expected = plain_step(whole, 2);
  TwoStages rank(rich_moe_spec(), 0, 1, "");
  const Halves first(rank.graphs[0]), second(rank.graphs[1]);
  const auto [forward_0, sent_0] = split_at_end(first.forward);
  for (int m = 0; m < 2; ++m) {
    rank.open(0, 0, whole.input(m));
    rank.open(1, 1, whole.input(m));
    rank.run(0, forward_0);
    rank.run(1, second.forward);  // its receive delivers
    rank.run(0, sent_0);
    // The receive of the gradient is posted first, then stage 1 sends it.
    const Action post = first.backward.front();
    EXPECT_EQ(post.kind, ActionKind::kBackward);
    rank.run(0, {post});
    rank.run(1, second.backward);
    rank.run(0, Timeline(first.backward.begin() + 1, first.backward.end()));
    EXPECT_EQ(rank.executor.close(0).losses.cross_entropy_sum, 0.0);
    EXPECT_EQ(rank.executor.close(1).losses.cross_entropy_sum,
              expected.losses[m].cross_entropy_sum);
  }
  size_t seen = 0;
  expect_gradients(rank.state, expected, seen);
  EXPECT_EQ(seen, expected.gradients.size());
}

TEST_F(OverlapHazards, TwoStagesOnTwoRanksGiveTheGradientsOfTheWholeModel) {
  OverlapRank whole(rich_moe_spec(), hazard_options(), 0, "", 1);
  const StepNumbers expected = plain_step(whole, 4);
  LoopbackGroup group("stages", 2);
  size_t seen = 0;
  std::mutex mutex;
  on_every_rank(2, [&](int64_t index) {
    TwoStages rank(rich_moe_spec(), index, 2, group.name_of(index));
    const Halves halves(rank.graphs[index]);
    const int stage = static_cast<int>(index);
    // 1F1B: stage 0 holds two micro-batches.
    const std::vector<std::pair<char, int>> passes =
        index == 0 ? std::vector<std::pair<char, int>>{{'F', 0}, {'F', 1}, {'B', 0}, {'F', 2},
                                                       {'B', 1}, {'F', 3}, {'B', 2}, {'B', 3}}
                   : std::vector<std::pair<char, int>>{{'F', 0}, {'B', 0}, {'F', 1}, {'B', 1},
                                                       {'F', 2}, {'B', 2}, {'F', 3}, {'B', 3}};
    for (const auto& [kind, m] : passes) {
      const int slot = m % 2;
      if (kind == 'F') rank.open(slot, stage, whole.input(m));
      if (index == 1) {
        rank.run(slot, kind == 'F' ? halves.forward : halves.backward);
      } else if (kind == 'F') {
        rank.run(slot, split_at_end(halves.forward).first);
      } else {
        // A send ends once its receive is posted. Rank 1 posts that of the next micro-batch when
        // its own send of this one's gradient is over, so its receive here comes first.
        rank.run(slot, {halves.backward.front()});
        rank.run(slot, split_at_end(halves.forward).second);
        rank.run(slot, Timeline(halves.backward.begin() + 1, halves.backward.end()));
      }
      if (kind == 'B') rank.executor.close(slot);
    }
    const std::lock_guard lock(mutex);
    expect_gradients(rank.state, expected, seen);
  });
  EXPECT_EQ(seen, expected.gradients.size());
}

TEST_F(OverlapHazards, ARecordedStepIsWhatWasRunAndItsTransfersMeetOnBothRanks) {
  LoopbackGroup group("recorded", 2);
  std::vector<RankStep> steps(2);
  on_every_rank(2, [&](int64_t index) {
    OverlapRank rank(rich_moe_spec(), hazard_options(2, 2), index, group.name_of(index), 1,
                     {.name = "ep", .job_ranks = {}});
    StepRecorder recorder(rank.executor, rank.transfers, static_cast<int>(index), 0);
    recorder.begin(7);
    std::vector<StageAction> run;
    RandomStep step(rank, 3, 5, 11 + index);
    step.before_action = [&](const StageAction& action) {
      const ActionKind kind = action.action.kind;
      if (kind != ActionKind::kFree && kind != ActionKind::kDrop && kind != ActionKind::kGate) {
        run.push_back(action);
      }
    };
    step.run();
    steps[index] = recorder.take();
    EXPECT_EQ(step_fault(steps[index]), "");
    ASSERT_EQ(steps[index].events.size(), run.size());
    for (size_t i = 0; i < run.size(); ++i) {
      EXPECT_EQ(steps[index].events[i].slot, run[i].slot);
      const bool op = names_op(run[i].action.kind);
      EXPECT_EQ(steps[index].events[i].name, op ? rank.graph.ops[run[i].action.id].name
                                                : rank.graph.storages[run[i].action.id].name);
    }
  });
  std::map<std::string, int> keys;
  for (const RankStep& step : steps) {
    EXPECT_EQ(step.step, 7);
    for (const StepTransfer& transfer : step.transfers) {
      if (transfer.stream == TransferStream::kComm) ++keys[transfer.key];
    }
  }
  // Two MoE layers of three micro-batches: counts, and dispatch and combine both ways.
  EXPECT_EQ(keys.size(), 2u * 3u * 5u);
  for (const auto& [key, members] : keys) EXPECT_EQ(members, 2) << key;
}

}  // namespace
}  // namespace bagualu
