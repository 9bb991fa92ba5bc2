// Micro-batches interleaved operator by operator: whatever the order, residencies and delays, the
// numbers are those of one micro-batch after the other.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "bagualu/runtime/overlap_rig.h"

namespace bagualu {
namespace {

TrainerOptions overlap_options(int64_t world, int64_t ep) {
  TrainerOptions options = small_options();
  options.layout.world_size = world;
  options.layout.ep_size = ep;
  options.shape.seq = 6;
  return options;
}

ModelSpec rich_with_losses() {
  ModelSpec spec = rich_moe_spec();
  spec.aux_loss_coef = 0.01;
  spec.z_loss_coef = 0.001;
  return spec;
}

// All tokens go to the experts of rank 0: the other rank's experts get none.
RoutingOverride all_to_rank_0(const ModelSpec& spec, int64_t tokens) {
  RoutingOverride routing;
  std::vector<int64_t> counts(spec.experts, 0);
  std::fill_n(counts.begin(), spec.top_k, tokens);
  routing.tokens_per_expert.assign(spec.layers, counts);
  return routing;
}

// `steps` random steps on every rank of a group; each against the plain step.
void random_steps(const ModelSpec& spec, int64_t ep, int64_t steps, uint64_t seed,
                  bool one_rank_starves = false) {
  DeviceArena& arena = DeviceArena::install(BudgetCounter::kNoBudget);
  const std::string name = "steps" + std::to_string(seed);
  LoopbackGroup group(name, ep, {.seed = seed, .max_delay_ns = 50'000});
  const int64_t base = arena.live_bytes();
  on_every_rank(ep, [&](int64_t rank_index) {
    OverlapRank rank(spec, overlap_options(ep, ep), rank_index, group.name_of(rank_index),
                     seed + static_cast<uint64_t>(rank_index), {.name = "ep", .job_ranks = {}});
    const RoutingOverride starving = all_to_rank_0(spec, rank.graph.tokens * ep);
    if (one_rank_starves) rank.routing = &starving;
    std::vector<StepNumbers> expected(5);  // by count of micro-batches
    for (int64_t m = 1; m <= 4; ++m) expected[m] = plain_step(rank, m);
    std::mt19937_64 shared(seed);
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t microbatches = 1 + static_cast<int64_t>(shared() % 4);
      RandomStep random(rank, microbatches, shared(), seed + step * 7 + rank_index);
      const auto found = differences(random.run(), expected[microbatches]);
      ASSERT_TRUE(found.empty()) << "step " << step << " rank " << rank_index << ": "
                                 << found.front() << " and " << found.size() - 1 << " more";
      ASSERT_EQ(rank.executor.open_slots(), 0);
      ASSERT_EQ(rank.host.live_bytes(), 0);
    }
  });
  EXPECT_EQ(arena.live_bytes(), base);
  EXPECT_EQ(group.unended(), 0);
  std::printf("%ld steps on each of %ld ranks, %ld transfers between them\n",
              static_cast<long>(steps), static_cast<long>(ep), static_cast<long>(group.ended()));
}

// BAGUALU_RANDOM_STEPS: that many in place of `steps`, for long runs.
int64_t or_as_told(int64_t steps) {
  const char* text = std::getenv("BAGUALU_RANDOM_STEPS");
  return text == nullptr ? steps : std::atoll(text);
}

TEST(Overlap, RandomOrdersOnOneRankKeepTheBits) { random_steps(rich_with_losses(), 1, or_as_told(60), 1); }

TEST(Overlap, RandomOrdersOnTwoRanksKeepTheBits) { random_steps(rich_with_losses(), 2, or_as_told(60), 2); }

TEST(Overlap, RandomOrdersOnFourRanksKeepTheBits) { random_steps(small_moe_spec(), 4, or_as_told(20), 3); }

TEST(Overlap, ARankWhoseExpertsGetNothingKeepsTheBits) {
  random_steps(rich_with_losses(), 2, 20, 4, /*one_rank_starves=*/true);
}

}  // namespace
}  // namespace bagualu
