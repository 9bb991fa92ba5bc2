#include "bagualu/provision/training_rank.h"

#include <gtest/gtest.h>

#include <set>

#include "bagualu/base/error.h"
#include "bagualu/cost/residency.h"

namespace bagualu {
namespace {

TEST(PlanLetters, OfResidenciesDiffer) {
  std::set<char> letters;
  for (const ResidencySpec& one : residencies()) letters.insert(one.name.front());
  EXPECT_EQ(letters.size(), residencies().size());
}

TEST(PlanLetters, SayWhatAPlanHolds) {
  Plan plan;
  plan.residency = {kSave, kRecompute, kOffload};
  EXPECT_EQ(plan_letters(plan), "sro");
  plan.eager_drain = true;
  plan.prefetch = false;
  EXPECT_EQ(plan_letters(plan), "sro/eager/late");
}

TEST(TrainingSetup, IsReadByTheTrainersNames) {
  const Json json = Json::parse(R"({"rank": 1, "world_size": 4, "ep_size": 2, "pp_size": 2,
    "pipeline": "zb-h1", "stage_layers": [1, 3], "overlap": true, "micro_batch_size": 2, "seq": 16,
    "microbatches": 3, "dtype": "bf16", "policy": "threshold", "policy_args": {"threshold": 1.5},
    "budget_bytes": 1000, "chunk_rows": 32})");
  JsonReader reader(json, "options");
  const TrainingSetup setup = read_training_setup(reader);
  reader.finish();
  EXPECT_EQ(setup.rank, 1);
  EXPECT_EQ(setup.layout.dp_size(), 2);
  EXPECT_EQ(setup.layout.stage_layers, (std::vector<int64_t>{1, 3}));
  EXPECT_TRUE(setup.overlap);
  EXPECT_EQ(setup.shape.tokens(), 32);
  EXPECT_EQ(setup.shape.dtype, Dtype::kBf16);
  EXPECT_EQ(setup.policy_options.threshold, 1.5);
  EXPECT_EQ(setup.budget_bytes, 1000);
  EXPECT_EQ(setup.host_budget_bytes, 0);
  EXPECT_EQ(setup.chunk_rows, 32);
}

TEST(TrainingSetup, RefusesARankThatTheLayoutDoesNotHave) {
  const Json json = Json::parse(R"({"rank": 4, "world_size": 4, "ep_size": 2, "micro_batch_size": 2,
    "seq": 16, "microbatches": 3, "dtype": "fp32"})");
  JsonReader reader(json, "options");
  EXPECT_THROW(read_training_setup(reader), InvalidInput);
}

}  // namespace
}  // namespace bagualu
