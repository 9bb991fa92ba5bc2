#include "bagualu/provision/policy_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string refusal(const Json& object) {
  try {
    policy_options_from_json(object, "args");
  } catch (const InvalidInput& error) {
    return error.what();
  }
  return "no error";
}

TEST(PolicyOptions, ReadsWhatIsThereAndKeepsTheRest) {
  const PolicyOptions options = policy_options_from_json(
      {{"threshold", 1.5}, {"kwai_offload_ratio", 0.25}, {"recompute_modules", {"moe_act", "mlp"}}},
      "args");
  EXPECT_EQ(options.threshold, 1.5);
  EXPECT_EQ(options.kwai_offload_ratio, 0.25);
  EXPECT_THAT(options.recompute_modules, ElementsAre("moe_act", "mlp"));
  EXPECT_TRUE(options.plan.is_null());
  EXPECT_EQ(options.static_fit_imbalance, PolicyOptions().static_fit_imbalance);
  EXPECT_EQ(options.retry_factor, PolicyOptions().retry_factor);
}

TEST(PolicyOptions, RefusesNamingTheKey) {
  EXPECT_THAT(refusal({{"treshold", 1.5}}), AllOf(HasSubstr("args"), HasSubstr("treshold")));
  EXPECT_THAT(refusal({{"threshold", 0.5}}), HasSubstr("threshold"));
  EXPECT_THAT(refusal({{"kwai_offload_ratio", 1.5}}), HasSubstr("kwai_offload_ratio"));
  EXPECT_THAT(refusal({{"recompute_modules", "moe_act"}}),
              AllOf(HasSubstr("recompute_modules"), HasSubstr("a list of texts")));
  EXPECT_THAT(refusal({{"recompute_modules", {1}}}), HasSubstr("a list of texts"));
}

}  // namespace
}  // namespace bagualu
