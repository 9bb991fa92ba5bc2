#include "bagualu/cli/plan_command.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cli/test_command.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;

class PlanCommand : public CommandTest {
 protected:
  /// `bagualu plan` on the demo model over 4 ranks, with more flags.
  static Outcome plan(std::vector<std::string> flags) {
    flags.insert(flags.begin(),
                 {"plan", "--model", preset("demo"), "--ep", "4", "--system",
                  std::string(BAGUALU_SOURCE_DIR) + "/configs/systems/cpu-2core.json"});
    return run_line(flags);
  }
  static std::string preset(const std::string& name) { return config("models", name); }
};

TEST_F(PlanCommand, PrintsATable) {
  const Outcome outcome = plan({"--seq", "64", "--budget", "64MiB"});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  for (const char* words : {"static memory of a rank", "calm, everything kept",
                            "floor: any routing survives", "policies under 64.0 MiB", "adaptive"}) {
    EXPECT_NE(outcome.out.find(words), std::string::npos) << words << "\n" << outcome.out;
  }
}

TEST_F(PlanCommand, WritesJsonInsteadOrBeside) {
  const Outcome alone = plan({"--seq", "64", "--json", "-"});
  EXPECT_EQ(alone.code, kExitDone) << alone.err;
  const Json report = parse_json_object(alone.out, "output");
  EXPECT_EQ(report.at("type"), "plan");
  EXPECT_EQ(report.at("version"), 1);
  const Json& fixed = report.at("static");
  EXPECT_EQ(fixed.at("total_bytes").get<int64_t>() - fixed.at("table_bytes").get<int64_t>(),
            16'926'976);  // static_memory_test.cpp
  EXPECT_TRUE(report.at("budget_bytes").is_null());
  EXPECT_TRUE(report.at("policies").empty()) << "nothing to survive without a budget";

  const fs::path file = folder_ / "plan.json";
  const Outcome beside = plan({"--seq", "64", "--json", file.string()});
  EXPECT_NE(beside.out.find("static memory"), std::string::npos);
  EXPECT_EQ(read_json_file(file), report);
}

TEST_F(PlanCommand, ReadsAHuggingFaceConfig) {
  const fs::path config = write("config.json", R"({"model_type": "mixtral", "hidden_size": 64,
      "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
      "vocab_size": 256, "tie_word_embeddings": false})");
  const Outcome outcome = plan({"--model", config.string(), "--seq", "32", "--json", "-"});
  EXPECT_EQ(outcome.code, kExitBadInput) << "--model twice";
  const Outcome single =
      run_line({"plan", "--model", config.string(), "--system",
                std::string(BAGUALU_SOURCE_DIR) + "/configs/systems/cpu-2core.json", "--seq", "32",
                "--json", "-"});
  EXPECT_EQ(single.code, kExitDone) << single.err;
  EXPECT_EQ(parse_json_object(single.out, "output").at("model").at("family"), "mixtral");
}

TEST_F(PlanCommand, ABudgetUnderTheFloorIsInfeasibleByTheMissingBytes) {
  const Json free = parse_json_object(plan({"--seq", "64", "--json", "-"}).out, "output");
  const int64_t floor = free.at("floor").at("bytes");
  const Outcome under = plan({"--seq", "64", "--budget", std::to_string(floor - 1), "--json", "-"});
  EXPECT_EQ(under.code, kExitInfeasible);
  EXPECT_EQ(parse_json_object(under.out, "output").at("short_by_bytes"), 1);
  EXPECT_NE(under.err.find("(1 bytes) under the floor"), std::string::npos) << under.err;
  EXPECT_EQ(std::count(under.err.begin(), under.err.end(), '\n'), 1);
  const Outcome at = plan({"--seq", "64", "--budget", std::to_string(floor), "--json", "-"});
  EXPECT_EQ(at.code, kExitDone) << at.err;
}

TEST_F(PlanCommand, AHostBudgetUnderTheFloorIsInfeasibleToo) {
  const Json free = parse_json_object(plan({"--seq", "64", "--json", "-"}).out, "output");
  const int64_t floor = free.at("floor_host_bytes");
  ASSERT_GT(floor, 1);
  const Outcome under = plan({"--seq", "64", "--host-budget", std::to_string(floor - 1)});
  EXPECT_EQ(under.code, kExitInfeasible);
  EXPECT_NE(under.err.find("the host budget"), std::string::npos) << under.err;
  EXPECT_EQ(plan({"--seq", "64", "--host-budget", std::to_string(floor)}).code, kExitDone);
}

TEST_F(PlanCommand, ExplainsItsChoicesOnlyWhenAsked) {
  EXPECT_EQ(plan({"--seq", "64"}).out.find("choices that are left"), std::string::npos);
  EXPECT_FALSE(
      parse_json_object(plan({"--seq", "64", "--json", "-"}).out, "output").contains("explain"));
  const Outcome table = plan({"--seq", "64", "--explain"});
  EXPECT_EQ(table.code, kExitDone) << table.err;
  EXPECT_NE(table.out.find("choices that are left"), std::string::npos) << table.out;
  const Outcome json = plan({"--seq", "64", "--explain", "--json", "-"});
  EXPECT_EQ(parse_json_object(json.out, "output").at("explain").at("total").at("units"), 39);
}

TEST_F(PlanCommand, RefusesToExplainLatentAttention) {
  const Outcome outcome =
      run_line({"plan", "--model", preset("deepseek-v3"), "--ep", "8", "--explain", "--system",
                BAGUALU_SOURCE_DIR "/configs/systems/h800.json"});
  EXPECT_EQ(outcome.code, kExitBadInput);
  EXPECT_EQ(outcome.out, "");
  EXPECT_NE(outcome.err.find("latent attention (MLA)"), std::string::npos) << outcome.err;
}

TEST_F(PlanCommand, HelpNamesUnitsAndDefaults) {
  const Outcome outcome = run_line({"plan", "--help"});
  EXPECT_EQ(outcome.code, kExitDone);
  for (const char* words : {"--budget SIZE", "--seq TOKENS", "[256]", "[fp32]", "MiB"}) {
    EXPECT_NE(outcome.out.find(words), std::string::npos) << words << "\n" << outcome.out;
  }
}

TEST_F(PlanCommand, RefusesBadInputInOneLineAndWritesNothing) {
  const std::string folder = folder_.string();
  const std::string empty = write("empty.json", "");
  const std::string cut = write("cut.json", "{\"layers\": 4,");
  const std::string list = write("list.json", "[1]");
  const std::string top_k =
      write("top_k.json", R"({"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
            "vocab": 256, "experts": 8, "top_k": 9, "expert_ffn": 64})");
  const std::string family = write("family.json", R"({"model_type": "bert"})");
  const std::string output = folder + "/out.json";
  // Flags after `bagualu plan --json OUT`, and what the complaint has to name.
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{}, "--model"},
      {{"--model", ""}, "--model"},
      {{"--model", "no-such-model"}, "--model"},
      {{"--model", folder}, "--model"},
      {{"--model", empty}, "empty.json"},
      {{"--model", cut}, "cut.json: line 1"},
      {{"--model", list}, "list.json"},
      {{"--model", top_k}, "top_k: found 9"},
      {{"--model", family}, "allowed mixtral, qwen3_moe"},
      {{"--model", preset("demo"), "--ep", "3"}, "experts = 16"},
      {{"--model", preset("demo"), "--ep", "0"}, "--ep"},
      {{"--model", preset("demo"), "--ep", "4", "--world-size", "6"}, "world_size = 6"},
      {{"--model", preset("demo"), "--world-size", "-1"}, "--world-size"},
      {{"--model", preset("demo"), "--seq", "many"}, "--seq"},
      {{"--model", preset("demo"), "--micro-batch-size", "0"}, "--micro-batch-size"},
      {{"--model", preset("demo"), "--micro-batches", "1.5"}, "--micro-batches"},
      {{"--model", preset("demo"), "--seq", "2000000000"}, "seq"},
      {{"--model", preset("demo"), "--dtype", "fp16"}, "--dtype"},
      {{"--model", preset("demo"), "--budget", "0"}, "--budget"},
      {{"--model", preset("demo"), "--budget", "-5MiB"}, "--budget"},
      {{"--model", preset("demo"), "--budget", "12 parsecs"}, "--budget"},
      {{"--model", preset("demo"), "--host-budget", "0MiB"}, "--host-budget"},
      {{"--model", preset("demo"), "--imbalance", "0.5"}, "--imbalance"},
      {{"--model", preset("demo"), "--imbalance", "nan"}, "--imbalance"},
      {{"--model", preset("demo"), "--chunk-rows", "0"}, "--chunk-rows"},
      {{"--model", preset("demo"), "--threads", "0"}, "--threads"},
      {{"--model", preset("demo"), "--policy", "magic"}, "--policy"},
      {{"--model", preset("demo"), "--policy", "adaptive,adaptive"}, "--policy"},
      {{"--model", preset("demo"), "--system", "abacus"}, "--system"},
      {{"--model", preset("demo"), "--buget", "1GiB"}, "--buget"},
      {{"--model", preset("demo"), "surplus"}, "surplus"},
      {{"--model", preset("demo"), "--budget"}, "--budget"},
  };
  const auto files_before = std::distance(fs::directory_iterator(folder_), {});
  for (const auto& [flags, named] : cases) {
    std::vector<std::string> arguments = {"plan", "--json", output};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const Outcome outcome = run_line(arguments);
    EXPECT_EQ(outcome.code, kExitBadInput) << named;
    EXPECT_EQ(outcome.out, "") << named;
    EXPECT_NE(outcome.err.find(named), std::string::npos) << named << "\n" << outcome.err;
    EXPECT_EQ(outcome.err.rfind("bagualu plan: ", 0), 0u) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), files_before);
}

TEST_F(PlanCommand, RefusesAnUnwritableAnswerBeforePrinting) {
  const Outcome outcome = plan({"--seq", "32", "--json", (folder_ / "none" / "x.json").string()});
  EXPECT_EQ(outcome.code, kExitBadInput);
  EXPECT_EQ(outcome.out, "");
}

}  // namespace
}  // namespace bagualu
