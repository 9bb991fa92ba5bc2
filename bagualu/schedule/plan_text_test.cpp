#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "bagualu/base/error.h"
#include "bagualu/graph/native_moe.h"
#include "bagualu/graph/test_models.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {
namespace {

using ::testing::HasSubstr;

Graph rich_graph() { return build_native_graph(rich_moe_spec(), {.seq = 16, .ep_size = 4}); }

TEST(PlanText, RoundTripsEveryResidency) {
  const Graph graph = rich_graph();
  for (ResidencyId r = 0; r < residencies().size(); ++r) {
    Plan plan = uniform_plan(graph, r);
    plan.eager_drain = r % 2 == 1;
    plan.prefetch = r % 2 == 0;
    const Json json = plan_to_json(graph, plan);
    EXPECT_EQ(plan_from_json(graph, json, "plan.json"), plan);
    EXPECT_EQ(plan_from_json(graph, parse_json_object(json.dump(), "plan.json"), "p"), plan);
  }
}

TEST(PlanText, LeavesSavedUnitsOut) {
  const Graph graph = rich_graph();
  Plan plan = uniform_plan(graph, kSave);
  plan.residency[graph.find_unit("layer1.expert_fc1")] = kRecompute;
  EXPECT_EQ(plan_to_json(graph, plan).dump(), R"({"version":1,"eager_drain":false,"prefetch":true,)"
                                              R"("units":{"layer1.expert_fc1":"recompute"}})");
}

TEST(PlanText, RefusesBadPlans) {
  const Graph graph = rich_graph();
  const auto message = [&](const std::string& text) -> std::string {
    try {
      plan_from_json(graph, Json::parse(text), "plan.json");
    } catch (const InvalidInput& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto with_unit = [&](const std::string& unit) {
    return message(R"({"version":1,"units":{)" + unit + "}}");
  };
  EXPECT_THAT(with_unit(R"("layer9.qkv":"save")"), HasSubstr("found layer9.qkv"));
  EXPECT_THAT(with_unit(R"("layer1.qkv":"swap")"), HasSubstr("save, recompute, offload, quantise"));
  EXPECT_THAT(with_unit(R"("layer1.qkv":3)"), HasSubstr("units.layer1.qkv: found 3"));
  EXPECT_THAT(with_unit(R"("layer1.dispatch":"recompute")"), HasSubstr("never recomputed"));
  EXPECT_THAT(with_unit(R"("layer1.router":"offload")"), HasSubstr("pinned"));
  EXPECT_THAT(message(R"({"version":2,"units":{}})"), HasSubstr("version"));
  EXPECT_THAT(message(R"({"version":1,"unit":{},"units":{}})"), HasSubstr("unit"));
  EXPECT_THAT(message(R"({"version":1})"), HasSubstr("units"));
  EXPECT_THAT(message(R"({"version":1,"units":{},"prefetch":1})"), HasSubstr("prefetch"));
  EXPECT_EQ(message(R"({"version":1,"units":{"layer1.dispatch":"offload"}})"), "accepted");
}

}  // namespace
}  // namespace bagualu
