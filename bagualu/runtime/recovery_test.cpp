// After a step that ran out of memory, wherever that was, the trainer is as if it had not been
// tried.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "bagualu/runtime/runner_rig.h"

namespace bagualu {
namespace {

// Actions that take more bytes than any before them: one byte less, and they fail.
std::vector<size_t> records(const std::vector<MemoryPoint>& points) {
  std::vector<size_t> found;
  int64_t highest = 0;
  for (size_t i = 0; i < points.size(); ++i) {
    if (points[i].peak_bytes <= highest) continue;
    highest = points[i].peak_bytes;
    found.push_back(i);
  }
  return found;
}

TEST(Recovery, EveryFailedMicrobatchGivesAllBytesBackAndTheNextHasTheSameBits) {
  RunnerRig rig(rich_moe_spec(), small_options());
  PlanSource save_all(uniform_plan(rig.graph, kSave));
  const Numbers expected = rig.numbers(rig.run(save_all));
  const MemoryTable table = memory_table(rig.graph, rig.loads);
  const int64_t base = rig.arena.live_bytes();
  Random random(23);
  std::map<std::string, int> failed_in;
  for (int i = 0; i < 200; ++i) {
    const Plan plan =
        i % 4 == 0 ? uniform_plan(rig.graph, kRecompute) : random_plan(rig.graph, random, 4);
    const Timeline timeline = build_timeline(rig.graph, plan);
    const auto points = memory_profile(rig.graph, plan, table, timeline);
    const auto candidates = records(points);
    // Half of them late, where copies are under way and other storages have been given up.
    const auto n = static_cast<int64_t>(candidates.size());
    const int64_t late = i % 2 == 0 ? std::max<int64_t>(n - 5, 0) : 0;
    const size_t victim = candidates[late + below(random, n - late)];
    rig.arena.set_budget(base + points[victim].peak_bytes - 1);
    PlanSource source(plan);
    try {
      rig.run(source);
      ADD_FAILURE() << i;
    } catch (const OutOfBudget& error) {
      EXPECT_EQ(error.op, action_text(rig.graph, timeline[victim])) << i;
      EXPECT_GT(error.wanted_bytes, error.left_bytes);
      ++failed_in[error.op.substr(0, error.op.find(' '))];
    }
    rig.arena.set_budget(BudgetCounter::kNoBudget);
    ASSERT_EQ(rig.arena.live_bytes(), base) << i;
    ASSERT_EQ(rig.host.live_bytes(), 0) << i;
    const auto found = differences(rig.numbers(rig.run(save_all)), expected);
    ASSERT_TRUE(found.empty()) << i << ": " << found.front();
  }
  for (const char* where : {"forward", "backward", "recompute", "reload", "encode"}) {
    EXPECT_GT(failed_in[where], 0) << where;
  }
  for (const auto& [where, times] : failed_in) std::printf("%s %d, ", where.c_str(), times);
  std::printf("of 200 budgets\n");
}

TrainerOptions trainer_options() {
  TrainerOptions options = small_options();
  options.shape.microbatches = 2;
  options.policy = "save-all";
  return options;
}

StepInput step_input(const Trainer& trainer, int64_t step) {
  const TrainShape& shape = trainer.options().shape;
  StepInput input;
  at::manual_seed(step);
  input.tokens =
      at::randint(64, {shape.microbatches, shape.micro_batch_size, shape.seq + 1}, at::kLong);
  input.step = step;
  input.lr = 1e-3;
  return input;
}

Numbers step_numbers(Trainer& trainer, const StepReport& report) {
  Numbers numbers;
  numbers.losses.cross_entropy_sum = report.loss;
  for (const auto& [name, gradient] : trainer.model().gradients()) {
    numbers.gradients.emplace_back("gradient " + name, gradient.clone());
  }
  for (const auto& [name, parameter] : trainer.model().parameters()) {
    numbers.gradients.emplace_back("parameter " + name, parameter.clone());
  }
  return numbers;
}

TEST(Recovery, ATrainerGoesOnAsIfTheFailedStepsHadNotBeen) {
  DeviceArena& arena = DeviceArena::install(BudgetCounter::kNoBudget);
  ModelSpec spec = rich_moe_spec();
  spec.aux_loss_coef = 0.01;
  spec.router_bias_rate = 0.001;
  Trainer undisturbed(spec, trainer_options(), TrainerGroups{});
  Trainer disturbed(spec, trainer_options(), TrainerGroups{});
  Random random(29);
  int failures = 0;
  for (int64_t step = 0; step < 12; ++step) {
    const StepReport calm = undisturbed.step(step_input(undisturbed, step));
    const Numbers expected = step_numbers(undisturbed, calm);
    for (int i = 0; i < 5; ++i) {
      StepInput input = step_input(disturbed, step);
      input.want_memory = i % 2 == 0;
      const int64_t base = arena.live_bytes();
      const int64_t needed = calm.measured_peak_bytes - calm.end_bytes;
      disturbed.set_policy(i % 3 == 0 ? "full-recompute" : "save-all", {},
                           base + 1 + below(random, needed / 3));
      EXPECT_THROW(disturbed.step(input), OutOfBudget);
      EXPECT_EQ(arena.live_bytes(), base);
      ++failures;
    }
    disturbed.set_policy("save-all", {}, 0);
    const StepReport report = disturbed.step(step_input(disturbed, step));
    const auto found = differences(step_numbers(disturbed, report), expected);
    ASSERT_TRUE(found.empty()) << step << ": " << found.front();
    EXPECT_EQ(report.host_end_bytes, 0);
    EXPECT_TRUE(report.memory.empty());
  }
  EXPECT_EQ(failures, 60);
}

TEST(Recovery, EvaluationBetweenStepsChangesNothing) {
  DeviceArena& arena = DeviceArena::install(BudgetCounter::kNoBudget);
  Trainer quiet(rich_moe_spec(), trainer_options(), TrainerGroups{});
  Trainer watched(rich_moe_spec(), trainer_options(), TrainerGroups{});
  for (int64_t step = 0; step < 6; ++step) {
    const Numbers expected = step_numbers(quiet, quiet.step(step_input(quiet, step)));
    const at::Tensor held_out = step_input(watched, 100 + step).tokens;
    const int64_t base = arena.live_bytes();
    const double first = watched.evaluate(held_out);
    EXPECT_EQ(arena.live_bytes(), base);
    EXPECT_EQ(watched.evaluate(held_out), first);
    if (step % 2 == 1) {  // one that fails, with captured log-probabilities under way
      arena.set_budget(base + 4096);
      EXPECT_THROW(watched.log_probs(held_out[0].narrow(1, 0, 12)), OutOfBudget);
      arena.set_budget(BudgetCounter::kNoBudget);
      EXPECT_EQ(arena.live_bytes(), base);
    }
    const Numbers found = step_numbers(watched, watched.step(step_input(watched, step)));
    ASSERT_TRUE(differences(found, expected).empty()) << step;
  }
}

}  // namespace
}  // namespace bagualu
