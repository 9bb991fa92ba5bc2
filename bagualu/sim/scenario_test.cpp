#include "bagualu/sim/scenario.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>

#include "bagualu/base/error.h"
#include "bagualu/sim/job_sim.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const fs::path kConfigs = fs::path(BAGUALU_SOURCE_DIR) / "configs";

/// Two pipeline ranks, each an expert group of four; 8 experts of which a token uses 2.
Json small_scenario() {
  return {{"format", "bagualu.scenario"},
          {"version", 1},
          {"model",
           {{"version", 1},
            {"name", "small"},
            {"layers", 4},
            {"hidden", 64},
            {"heads", 4},
            {"kv_heads", 2},
            {"head_dim", 16},
            {"vocab", 256},
            {"experts", 8},
            {"top_k", 2},
            {"expert_ffn", 96}}},
          {"strategy",
           {{"format", "bagualu.strategy"},
            {"version", 1},
            {"world_size", 8},
            {"pp", 2},
            {"ep", 4},
            {"seq", 512},
            {"microbatches", 4}}},
          {"system", "h100"},
          {"policies", {"full-recompute"}}};
}

Scenario read(const Json& object) {
  return scenario_from_json(object, "/nowhere", "night.json", {kConfigs});
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const InvalidInput& error) {
    return error.what();
  }
  return "no error";
}

std::string refusal(const Json& object) {
  return message_of([&] { read(object); });
}

/// One line, and it begins with the file.
MATCHER(NamesTheFileInOneLine, "") {
  return arg.rfind("night.json", 0) == 0 && arg.find('\n') == std::string::npos;
}

TEST(Scenario, ReadsWhatItSays) {
  Json object = small_scenario();
  object["name"] = "night";
  object["budget"] = "64GiB";
  object["host_budget"] = "1.5 TiB";
  object["iterations"] = 77;
  object["seed"] = 9;
  object["routing"] = {{"kind", "paper"}, {"largest", 2.0}};
  object["interruptions"] = {{"restart", "5min"},
                             {"checkpoint_interval", 20},
                             {"checkpoint", "1500ms"},
                             {"failures_per_day", 0.5}};
  const Scenario scenario = read(object);
  EXPECT_EQ(scenario.name, "night");
  EXPECT_EQ(scenario.job.layout.world_size, 8);
  EXPECT_EQ(scenario.job.model.experts, 8);
  EXPECT_EQ(scenario.system.name, "h100");
  EXPECT_EQ(scenario.budget_bytes, int64_t{64} << 30);
  EXPECT_EQ(scenario.host_budget_bytes, int64_t{3} << 39);  // 1.5 * 2^40
  EXPECT_EQ(scenario.iterations, 77);
  EXPECT_EQ(scenario.seed, 9U);
  EXPECT_EQ(scenario.routing.largest, 2.0);
  EXPECT_EQ(scenario.routing.seed, 9U) << "of the scenario, unless the routing has its own";
  EXPECT_EQ(scenario.interruptions.restart_s, 300);
  EXPECT_EQ(scenario.interruptions.checkpoint_interval, 20);
  EXPECT_EQ(scenario.interruptions.checkpoint_s, 1.5);
  EXPECT_EQ(scenario.interruptions.failures_per_day, 0.5);
}

TEST(Scenario, HasDefaults) {
  Json object = small_scenario();
  object.erase("policies");
  const Scenario scenario = read(object);
  EXPECT_EQ(scenario.budget_bytes, scenario.system.device_memory_bytes);
  EXPECT_EQ(scenario.host_budget_bytes, 0);
  EXPECT_EQ(scenario.routing.kind, "paper");
  EXPECT_EQ(scenario.interruptions.restart_s, 284);
  std::vector<std::string> labels;
  for (const SimPolicy& policy : scenario.policies) labels.push_back(policy.label);
  EXPECT_THAT(labels, ElementsAre("full-recompute", "static", "selective", "threshold", "retry",
                                  "kwai", "adapipe", "adaptive"));
}

TEST(Scenario, TakesARoutingByItsKind) {
  Json object = small_scenario();
  object["seed"] = 3;
  object["routing"] = "hot-rank";
  EXPECT_EQ(read(object).routing.kind, "hot-rank");
  EXPECT_EQ(read(object).routing.seed, 3U);
  object["routing"] = {{"kind", "hot-rank"}, {"seed", 5}};
  EXPECT_EQ(read(object).routing.seed, 5U);
}

TEST(Scenario, ReadsPoliciesWithTheirOptions) {
  Json object = small_scenario();
  object["policies"] = {"ablation",
                        {{"policy", "static"}, {"label", "bold"}, {"static_fit_imbalance", 1.1}},
                        {{"policy", "adaptive"}, {"overlap", false}}};
  const std::vector<SimPolicy> policies = read(object).policies;
  ASSERT_EQ(policies.size(), 6U);
  EXPECT_EQ(policies[0].label, "full recompute");
  EXPECT_EQ(policies[1].policy, "static");
  // 2.6 of the paper, and three standard deviations of 3 % of a micro-batch around it.
  EXPECT_DOUBLE_EQ(policies[1].options.static_fit_imbalance, 2.6 * 1.09);
  EXPECT_EQ(policies[2].policy, "adaptive");
  EXPECT_FALSE(policies[2].overlap);
  EXPECT_EQ(policies[3].policy, "adaptive");
  EXPECT_TRUE(policies[3].overlap);
  EXPECT_EQ(policies[4].label, "bold");
  EXPECT_EQ(policies[4].options.static_fit_imbalance, 1.1);
  EXPECT_EQ(policies[5].label, "adaptive");
  EXPECT_FALSE(policies[5].overlap);
}

TEST(Scenario, RefusesAWrongUnit) {
  Json object = small_scenario();
  object["budget"] = "64 gigs";
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("budget"),
                                     HasSubstr("\"64 gigs\""), HasSubstr("as 96MiB")));
  object["budget"] = 64;
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("budget: found 64"),
                                     HasSubstr("as text, \"64GiB\"")));
  object.erase("budget");
  for (const Json& wrong : {Json("284GiB"), Json("284"), Json("-1s"), Json("1e3s"), Json("s"),
                            Json(""), Json("1.2.3s"), Json("9999999999h"), Json(284)}) {
    object["interruptions"] = {{"restart", wrong}};
    EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(),
                                       HasSubstr("interruptions: restart: found " + wrong.dump()),
                                       HasSubstr("\"284s\", with the unit ms, s, min, h or d")));
  }
}

TEST(Scenario, RefusesAnUnknownPolicy) {
  Json object = small_scenario();
  object["policies"] = {"full-recompute", "adaptiv"};
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("policies[1]: found"),
                                     HasSubstr("\"adaptiv\""), HasSubstr("rivals, ablation"),
                                     HasSubstr("nearest is \"adaptive\"")));
  object["policies"] = {{{"policy", "kway"}}};
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("policies[0]: policy"),
                                     HasSubstr("\"kway\""), HasSubstr("nearest is \"kwai\"")));
  object["policies"] = {"rivals", "kwai"};
  EXPECT_THAT(refusal(object),
              AllOf(NamesTheFileInOneLine(), HasSubstr("\"kwai\" twice"), HasSubstr("label")));
  object["policies"] = {{{"policy", "static"}, {"static_fit_imbalanse", 1.2}}};
  EXPECT_THAT(refusal(object),
              AllOf(NamesTheFileInOneLine(), HasSubstr("static_fit_imbalanse: found"),
                    HasSubstr("static_fit_imbalance")));
  object["policies"] = {{{"policy", "selective"}, {"recompute_modules", "moe_act"}}};
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("recompute_modules"),
                                     HasSubstr("a list of texts")));
  object["policies"] = "adaptive";
  EXPECT_THAT(refusal(object),
              AllOf(NamesTheFileInOneLine(), HasSubstr("policies"), HasSubstr("a list of names")));
}

TEST(Scenario, RefusesALayoutThatDoesNotDivide) {
  Json object = small_scenario();
  object["strategy"]["world_size"] = 9;
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("strategy: world_size"),
                                     HasSubstr("found 9"), HasSubstr("tp * cp * pp = 2")));
  object = small_scenario();
  object["strategy"]["ep"] = 3;
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("strategy: ep"),
                                     HasSubstr("world_size / pp = 4")));
  object = small_scenario();
  object["strategy"].erase("microbatches");
  object["strategy"]["global_batch_size"] = 6;
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("global_batch_size"),
                                     HasSubstr("micro_batch_size * dp = 4")));
}

TEST(Scenario, RefusesParametersThatTheShapesDoNotHave) {
  Json object = small_scenario();
  object["total_parameters"] = 1000;
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("total_parameters"),
                                     HasSubstr("found 1000")));
}

TEST(Scenario, RefusesWhatItDoesNotKnow) {
  Json object = small_scenario();
  object["budgett"] = "64GiB";
  EXPECT_THAT(refusal(object),
              AllOf(NamesTheFileInOneLine(), HasSubstr("budgett"), HasSubstr("budget")));
  object = small_scenario();
  object["system"] = "h1000";
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("system"),
                                     HasSubstr("\"h1000\""), HasSubstr("h100, h200")));
  object = small_scenario();
  object.erase("model");
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("model: found nothing")));
  object = small_scenario();
  object["routing"] = {{"kind", "papper"}};
  EXPECT_THAT(refusal(object),
              AllOf(NamesTheFileInOneLine(), HasSubstr("kind"), HasSubstr("paper, balanced")));
  object["routing"] = 3;
  EXPECT_THAT(refusal(object), AllOf(NamesTheFileInOneLine(), HasSubstr("routing: found 3")));
}

class ScenarioFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              ("bagualu_scenario_" +
               std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  void write(const char* name, const std::string& text) { std::ofstream(folder_ / name) << text; }

  /// Two iterations of the layers, on so many ranks.
  void write_trace(int ranks, int layers = 4) {
    std::ofstream log(folder_ / "routing.log");
    for (int step = 0; step < 2; ++step) {
      for (int layer = 1; layer <= layers; ++layer) {
        for (int rank = 0; rank < ranks; ++rank) {
          log << "step: " << step << ", layer: " << layer << ", rank: " << rank
              << ", received_tokens: " << (rank == step ? 1500 : 1000) << "\n";
        }
      }
    }
  }
  fs::path folder_;
};

TEST_F(ScenarioFiles, FindsWhatLiesBesideThem) {
  Json object = small_scenario();
  write("m.json", object["model"].dump());
  write("s.json", object["strategy"].dump());
  object["model"] = "m.json";
  object["strategy"] = "s.json";
  write("night.json", object.dump());
  const Scenario scenario = scenario_from_file(folder_ / "night.json", {kConfigs});
  EXPECT_EQ(scenario.name, "night");
  EXPECT_EQ(scenario.job.layout.pp, 2);
  object["strategy"] = "t.json";
  write("night.json", object.dump());
  const auto refused = [&] { scenario_from_file(folder_ / "night.json", {kConfigs}); };
  EXPECT_THAT(message_of(refused), AllOf(HasSubstr((folder_ / "night.json").string()),
                                         HasSubstr("strategy"), HasSubstr("\"t.json\"")));
}

TEST_F(ScenarioFiles, RefusesATraceWithFewerRanksThanTheExpertGroup) {
  Json object = small_scenario();
  object["routing"] = {{"trace", "routing.log"}};
  write("night.json", object.dump());
  const auto reading = [&] { scenario_from_file(folder_ / "night.json", {kConfigs}); };
  write_trace(4);
  EXPECT_EQ(message_of(reading), "no error");
  write_trace(2);
  // The group has four ranks.
  EXPECT_THAT(message_of(reading),
              AllOf(HasSubstr((folder_ / "routing.log").string()), HasSubstr("ranks"),
                    HasSubstr("2"), HasSubstr("4"), Not(HasSubstr("\n"))));
  object["routing"] = {{"trace", "none.log"}};
  write("night.json", object.dump());
  EXPECT_THAT(message_of(reading), HasSubstr("none.log"));
}

// Ranks of tensor-parallel experts share their rows; a layer of multi-token prediction routes too.
TEST_F(ScenarioFiles, RunRecordedRoutingWithTensorParallelExpertsAndMultiTokenPrediction) {
  Json object = small_scenario();
  object["routing"] = {{"trace", "routing.log"}};
  Json split = object, further = object;
  split["strategy"]["ep"] = 2;
  split["strategy"]["etp"] = 2;
  further["mtp_layers"] = 1;
  further.erase("total_parameters");
  further.erase("active_parameters");
  for (const auto& [json, ranks, layers] : {std::tuple{split, 2, 4}, std::tuple{further, 4, 5}}) {
    write("night.json", json.dump());
    write_trace(ranks, layers);
    const Scenario scenario = scenario_from_file(folder_ / "night.json", {kConfigs});
    const SimRun run = simulate_job(scenario, {"all", "save-all", {}, false}, {.iterations = 2});
    EXPECT_EQ(run.iterations, 2) << ranks;
    EXPECT_GT(run.series[1].imbalance, 1.1) << ranks;
  }
}

TEST_F(ScenarioFiles, RefuseATraceInWhichNobodyGetsRows) {
  Json object = small_scenario();
  object["routing"] = {{"trace", "routing.log"}};
  write("night.json", object.dump());
  write("routing.log", "step: 0, layer: 1, rank: 0, received_tokens: 0\n");
  const auto reading = [&] { scenario_from_file(folder_ / "night.json", {kConfigs}); };
  EXPECT_THAT(message_of(reading), AllOf(HasSubstr("routing.log"), HasSubstr("tokens")));
}

TEST_F(ScenarioFiles, FitTheAblationToTheirTrace) {
  write_trace(4);
  Json object = small_scenario();
  object["routing"] = {{"trace", "routing.log"}};
  object["policies"] = {"ablation"};
  write("night.json", object.dump());
  const Scenario scenario = scenario_from_file(folder_ / "night.json", {kConfigs});
  // One rank has 1500 of a mean of 1125.
  EXPECT_NEAR(scenario.policies[1].options.static_fit_imbalance, 1500.0 / 1125, 0.01);
}

TEST(Scenario, RoutesRowsToItsExpertGroups) {
  const Scenario scenario = read(small_scenario());
  const RoutingGroup group = routing_group(scenario.job);
  EXPECT_EQ(group.layers, 4);
  EXPECT_EQ(group.ranks, 4);
  EXPECT_EQ(group.microbatches, 4);
  EXPECT_EQ(group.balanced_rows, 512 * 2);
  // Two experts of each rank: every token of the four ranks may use both.
  EXPECT_EQ(group.largest_rows, 4 * 512 * 2);
  std::vector<int32_t> rows;
  routing_of(scenario)->rows(0, 0, group, &rows);
  ASSERT_EQ(rows.size(), 4U * 4 * 4);
  EXPECT_EQ(rows[0] + rows[1] + rows[2] + rows[3], 4 * 1024);
}

}  // namespace
}  // namespace bagualu
