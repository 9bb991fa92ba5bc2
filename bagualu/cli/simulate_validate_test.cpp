#include "bagualu/cli/simulate_validate.h"

#include <gtest/gtest.h>

#include <sstream>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

TEST(SimulateValidate, IsAskedForByItsFlag) {
  EXPECT_TRUE(asks_for_validation({"--json", "-", "--validate", "run.jsonl"}));
  EXPECT_TRUE(asks_for_validation({"--validate=run.jsonl"}));
  EXPECT_FALSE(asks_for_validation({"scenario.json"}));
}

TEST(SimulateValidate, NamesALogThatIsNotThere) {
  std::ostringstream out, err;
  try {
    run_simulate_validate({"--validate", "/no/such/run.jsonl"}, {out, err});
    FAIL() << "a missing log was read";
  } catch (const InvalidInput& error) {
    EXPECT_NE(std::string(error.what()).find("/no/such/run.jsonl"), std::string::npos);
  }
  EXPECT_EQ(out.str(), "");
}

TEST(SimulateValidate, PrintsItsHelpWithoutALog) {
  for (const std::string help : {"--help", "-h"}) {
    std::ostringstream out, err;
    EXPECT_EQ(run_simulate_validate({"--validate", help}, {out, err}), kExitDone);
    EXPECT_NE(out.str().find("--validate LOG"), std::string::npos);
    EXPECT_EQ(err.str(), "");
  }
}

}  // namespace
}  // namespace bagualu
