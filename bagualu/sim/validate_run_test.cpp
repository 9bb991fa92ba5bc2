#include "bagualu/sim/validate_run.h"

#include <gtest/gtest.h>

#include "bagualu/base/error.h"
#include "bagualu/cost/op_flops.h"
#include "bagualu/cost/profile.h"
#include "bagualu/sim/run_replay.h"

namespace bagualu {
namespace {

ModelSpec small_model() {
  ModelSpec model;
  model.layers = 3;
  model.hidden = 32;
  model.heads = 2;
  model.kv_heads = 2;
  model.head_dim = 16;
  model.vocab = 64;
  model.experts = 4;
  model.top_k = 2;
  model.expert_ffn = 32;
  model.moe_layer.assign(static_cast<size_t>(model.layers), 1);
  return model;
}

// Token operators 1 ms, those of rows 1 us per row.
Json flat_profile(const ModelSpec& model, const TrainingSetup& setup) {
  Json ops = Json::object();
  const Json fixed = Json::parse("[[1, 1000000]]"),
             rising = Json::parse("[[0, 0], [1000, 1000000]]");
  for (const OpSpec& op : build_native_graph(model, graph_options(setup)).ops) {
    const Json& time = scales_with_rows(op.kind) ? rising : fixed;
    ops[std::string(op_kind_name(op.kind))] = {{"forward", time}, {"backward", time}};
  }
  return {{"version", 1},
          {"machine", {{"cpu", "c"}, {"threads", 1}, {"torch", "t"}, {"isa", "i"}}},
          {"model_key", profile_key(model, graph_options(setup))},
          {"ops", ops},
          {"rebuild", {{"expert_fc1", rising}, {"moe_act", rising}}},
          {"d2h_bytes_per_s", 1e9},
          {"h2d_bytes_per_s", 1e9},
          {"copy_hidden_fraction", 0.5},
          {"encode_bytes_per_s", 1e9}};
}

// Two expert ranks in each of `stages` stages; in step 2 rank 1 of every group is hot.
LoggedRun routed_run(int64_t stages, int64_t budget_bytes) {
  LoggedRun run;
  run.model = small_model();
  LoggedStart start;
  start.setup.layout.world_size = 2 * stages;
  start.setup.layout.ep_size = 2;
  start.setup.layout.pp_size = stages;
  start.setup.shape = {.micro_batch_size = 1, .seq = 64, .microbatches = 4};
  start.setup.overlap = true;
  start.setup.budget_bytes = budget_bytes;
  start.live_bytes.assign(static_cast<size_t>(2 * stages), 6400);
  start.scratch = {640, 1280};
  start.profiles.push_back(flat_profile(run.model, start.setup));
  start.profile_of.assign(static_cast<size_t>(2 * stages), 0);
  const std::vector<StageSlice> slices = stage_slices(run.model, start.setup.layout);
  for (int64_t s = 0; s < 6; ++s) {
    LoggedStep step;
    step.step = s;
    step.step_ns = 1;
    for (int64_t rank = 0; rank < 2 * stages; ++rank) {
      LoggedRank of;
      of.passes_ns = 1;
      const auto layers = static_cast<size_t>(slices[static_cast<size_t>(rank / 2)].layers);
      // 64 tokens to 2 experts each, of 2 ranks: 256 assignments.
      const int64_t hot = s == 2 ? 200 : 128;
      const int64_t rows = rank % 2 == 1 ? hot : 256 - hot;
      of.loads.assign(4, std::vector<LayerLoad>(layers, {rows, rows / 2}));
      of.plans.assign(4, "");
      step.ranks.push_back(of);
    }
    start.steps.push_back(step);
  }
  run.starts.push_back(start);
  return run;
}

// What the replay says becomes the measurement.
void measure(LoggedRun& run) {
  RunReplay replay(run.model, run.starts[0], "test");
  for (LoggedStep& step : run.starts[0].steps) {
    const ReplayedStep done = replay.step(step);
    for (size_t r = 0; r < step.ranks.size(); ++r) {
      LoggedRank& rank = step.ranks[r];
      rank.peak_bytes = done.ranks[r].peak_bytes;
      rank.host_peak_bytes = done.ranks[r].host_peak_bytes;
      rank.end_bytes = done.ranks[r].end_bytes;
      rank.plans = done.ranks[r].plans;
      rank.passes = done.ranks[r].passes;
      rank.cache_hits = done.ranks[r].cache_hits;
    }
  }
}

TEST(ValidateRun, FindsNothingInARunThatIsItsOwnReplay) {
  for (const int64_t stages : {1, 3}) {
    LoggedRun run = routed_run(stages, 0);
    measure(run);
    const RunValidation all = validate_run(run, "test", {.times = false, .progress = {}});
    EXPECT_GT(all.total.residencies.compared, 0);
    EXPECT_EQ(all.total.residencies.different, 0);
    EXPECT_EQ(all.total.passes.different, 0) << all.total.passes.first;
    EXPECT_EQ(all.total.cache_hits.different, 0);
    EXPECT_EQ(all.total.peaks.compared, 6 * 2 * stages);
  }
}

TEST(ValidateRun, FindsAByteOfAPeakAndALetterOfAPlan) {
  LoggedRun run = routed_run(1, 0);
  measure(run);
  LoggedStep& step = run.starts[0].steps[3];
  step.ranks[1].peak_bytes += 1;
  ASSERT_EQ(step.ranks[0].passes.size(), 5U);  // F0 [F1|B0] [F2|B1] [F3|B2] B3
  step.ranks[0].passes[4].live_bytes -= 64;
  step.ranks[0].plans[2][4] = 'r';
  const RunValidation all = validate_run(run, "test", {.times = false, .progress = {}});
  EXPECT_EQ(all.total.peaks.different, 1);
  EXPECT_EQ(all.total.peaks.first.rfind("rank 1: ", 0), 0U) << all.total.peaks.first;
  EXPECT_EQ(all.total.passes.different, 1);
  EXPECT_EQ(all.total.residencies.different, 1);
  EXPECT_EQ(all.total.residencies.first, "rank 0, micro-batch 2, unit 4: s for r");
  EXPECT_EQ(all.steps[3].residencies.different, 1);
  EXPECT_EQ(all.steps[2].residencies.different, 0);
}

// A budget between what a calm and the hot step take if all is kept.
TEST(ValidateRun, DecidesInAHotStepAsARankUnderABudgetDoes) {
  LoggedRun free = routed_run(1, 0);
  measure(free);
  const auto& steps = free.starts[0].steps;
  ASSERT_GT(steps[2].ranks[1].peak_bytes, steps[1].ranks[1].peak_bytes);
  LoggedRun tight =
      routed_run(1, (steps[2].ranks[1].peak_bytes + steps[1].ranks[1].peak_bytes) / 2);
  measure(tight);
  const auto& after = tight.starts[0].steps;
  EXPECT_NE(after[2].ranks[1].plans, steps[2].ranks[1].plans);
  EXPECT_LE(after[2].ranks[1].peak_bytes, tight.starts[0].setup.budget_bytes);
}

TEST(ValidateRun, TakesWhatIsOutsideOperatorsFromTheFirstSteps) {
  LoggedRun run = routed_run(1, 0);
  measure(run);
  for (LoggedStep& step : run.starts[0].steps) {
    step.step_ns = 9'000'000'000 + 5'000'000;
    for (LoggedRank& rank : step.ranks) rank.passes_ns = 9'000'000'000;
  }
  const RunValidation all = validate_run(run, "test", {.calibrating_steps = 2, .progress = {}});
  EXPECT_EQ(all.outside.after_ns, 5'000'000);
  EXPECT_FALSE(all.steps[0].calibrates);
  EXPECT_TRUE(all.steps[2].calibrates);
  EXPECT_EQ(all.timed_steps, 3);
  // The calm steps are alike, and so are their predictions.
  EXPECT_EQ(all.steps[4].predicted_ns, all.steps[5].predicted_ns);
  EXPECT_GT(all.steps[4].predicted_ns, 5'000'000);
  EXPECT_EQ(all.steps[2].predicted_ns, 0);
  const RunValidation sooner = validate_run(run, "test", {.calibrating_steps = 1, .progress = {}});
  EXPECT_GT(sooner.steps[2].predicted_ns, sooner.steps[4].predicted_ns);  // the hot rank
  EXPECT_EQ(sooner.steps[4].predicted_ns, all.steps[4].predicted_ns);
}

// Where they are made: what a rank decides before its first operator delays all that follows.
TEST(ValidateRun, DecisionsTakeTheTimeThatTheyTookInTheFirstSteps) {
  LoggedRun run = routed_run(1, 0);
  measure(run);
  const ValidateOptions options{.calibrating_steps = 2, .progress = {}};
  const RunValidation without = validate_run(run, "test", options);
  // 4 micro-batches, before the first operator and at a gate in each layer.
  const size_t count = 4 * (1 + run.starts[0].steps[0].ranks[0].loads[0].size());
  for (LoggedStep& step : run.starts[0].steps) {
    for (LoggedRank& rank : step.ranks) {
      rank.decision_ns.assign(count, 0);
      rank.decision_ns[0] = step.step == 1 ? 2'000'000 : 4'000'000;
    }
  }
  const RunValidation with = validate_run(run, "test", options);
  EXPECT_EQ(with.outside.decisions_ns, 3'000'000);
  EXPECT_EQ(with.steps[4].predicted_ns, without.steps[4].predicted_ns + 3'000'000);
}

TEST(ValidateRun, RefusesLoadsOfOtherLayersThanTheStages) {
  LoggedRun run = routed_run(1, 0);
  run.starts[0].steps[3].ranks[1].loads[2].pop_back();
  try {
    validate_run(run, "run.jsonl", {.times = false, .progress = {}});
    FAIL() << "a load is missing";
  } catch (const InvalidInput& error) {
    EXPECT_EQ(std::string(error.what()).rfind("run.jsonl: step 3, ranks[1].loads[2]: found", 0), 0U)
        << error.what();
  }
}

}  // namespace
}  // namespace bagualu
