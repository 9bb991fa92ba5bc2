#include "bagualu/cli/plan_job.h"

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
#include "bagualu/model/parameters.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;

class PlanJob : public CommandTest {
 protected:
  /// Mixtral 8x7B on 32 H100, four stages, experts over eight ranks.
  static std::vector<std::string> mixtral(std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", "--model", config("models", "mixtral-8x7b"), "--system",
                               config("systems", "h100"), "--layout", "tp=1,pp=4,ep=8,dp=8",
                               "--micro-batches", "16"});
    return more;
  }

  static Json answer(std::vector<std::string> more) {
    more.insert(more.end(), {"--json", "-"});
    return parse_json_object(run_line(mixtral(std::move(more))).out, "answer");
  }
};

TEST_F(PlanJob, NamesEveryRankWithItsCause) {
  const Outcome table = run_line(mixtral({}));
  EXPECT_EQ(table.code, kExitDone) << table.err;
  for (const char* words : {"46.70 B parameters", "Et*8", "t*8L", "heaviest: rank 0",
                            "largest tensors alive then", "MFU", "one action more"}) {
    EXPECT_NE(table.out.find(words), std::string::npos) << words << "\n" << table.out;
  }
  const Json json = answer({});
  ASSERT_EQ(json.at("ranks").size(), 4u);
  for (const Json& rank : json.at("ranks")) {
    int64_t sum = 0;
    for (const auto& [kind, bytes] : rank.at("loaded").at("by_kind").items()) {
      sum += bytes.get<int64_t>();
    }
    EXPECT_EQ(sum, rank.at("loaded").at("peak_bytes"));
    EXPECT_LE(rank.at("calm").at("peak_bytes"), rank.at("loaded").at("peak_bytes"));
    EXPECT_LE(rank.at("loaded").at("peak_bytes"), rank.at("worst_bytes"));
  }
  // 1F1B: 4, 3, 2, 1 micro-batches in flight.
  EXPECT_EQ(json.at("ranks")[0].at("loaded").at("in_flight"), 4);
  EXPECT_EQ(json.at("ranks")[3].at("loaded").at("in_flight"), 1);
}

TEST_F(PlanJob, TellsTheModelsOwnParameterCount) {
  EXPECT_EQ(answer({}).at("parameters").at("total"), int64_t{46'702'792'704});
}

TEST_F(PlanJob, ABudgetThatDoesNotHoldIsInfeasibleByTheMissingBytes) {
  const Json free = answer({});
  const int64_t peak = free.at("ranks")[0].at("loaded").at("peak_bytes");
  const Outcome under = run_line(mixtral({"--budget", std::to_string(peak - 1)}));
  EXPECT_EQ(under.code, kExitInfeasible);
  EXPECT_NE(under.err.find("(1 bytes)"), std::string::npos) << under.err;
  EXPECT_EQ(std::count(under.err.begin(), under.err.end(), '\n'), 1);
  EXPECT_EQ(run_line(mixtral({"--budget", std::to_string(peak)})).code, kExitDone);
}

TEST_F(PlanJob, ASpikeOfOneMicrobatchCostsItsShareOfThePeak) {
  const auto peak = [&](const std::vector<std::string>& flags) {
    return answer(flags).at("ranks")[0].at("loaded").at("peak_bytes").get<int64_t>();
  };
  const int64_t calm = peak({"--imbalance", "1"});
  const int64_t one = peak({"--imbalance", "1", "--spike", "2=2.0"});
  const int64_t all = peak({"--imbalance", "2"});
  EXPECT_GT(one, calm);
  EXPECT_LT(one, all);
  // Of four in flight one is twice as hot: about a quarter of the growth, and the transient's.
  EXPECT_NEAR(static_cast<double>(one - calm), static_cast<double>(all - calm) / 4,
              0.1 * static_cast<double>(all - calm));
}

TEST_F(PlanJob, LooksAtNoLoadThatTheLayoutCannotHave) {
  // One rank with all experts gets tokens * top_k rows, however they are routed; and a model
  // without experts has no rows. So nothing differs from a balanced router.
  for (const auto& [model, layout] :
       {std::pair{"mixtral-8x7b", "pp=4,dp=8"}, std::pair{"llama-3-70b", "tp=8,pp=4"}}) {
    const Outcome outcome =
        run_line({"plan", "--model", config("models", model), "--system", config("systems", "h100"),
                  "--layout", layout, "--json", "-"});
    const Json plan = parse_json_object(outcome.out, "answer");
    EXPECT_EQ(plan.at("imbalance"), 1.0) << model;
    for (const Json& rank : plan.at("ranks")) {
      EXPECT_EQ(rank.at("loaded").at("peak_bytes"), rank.at("calm").at("peak_bytes")) << model;
      EXPECT_EQ(rank.at("loaded").at("peak_bytes"), rank.at("worst_bytes")) << model;
    }
  }
}

TEST_F(PlanJob, ExplainsATensorWithItsNumbers) {
  const Outcome text = run_line(mixtral({"--explain", "expert_fc1.out"}));
  EXPECT_EQ(text.code, kExitDone) << text.err;
  // 4096 tokens of top 2 give 8192 rows; gate and up of 14336 columns in bf16.
  EXPECT_NE(text.out.find("8192 rows * 57344 B"), std::string::npos) << text.out;
  const Outcome none = run_line(mixtral({"--explain", "no_such"}));
  EXPECT_EQ(none.code, kExitBadInput);
  EXPECT_NE(none.err.find("expert_fc1.out"), std::string::npos) << none.err;
}

TEST_F(PlanJob, ValuesAnActionByThePeakThatItLeaves) {
  const auto heaviest = [](const Json& json) {
    int64_t bytes = 0;
    for (const Json& rank : json.at("ranks")) {
      bytes = std::max(bytes, rank.at("loaded").at("peak_bytes").get<int64_t>());
    }
    return bytes;
  };
  const Json json = answer({});
  int compared = 0;
  for (const Json& action : json.at("actions")) {
    const std::string name = action.at("name");
    if (name != "recompute moe_act" && name != "offload expert_fc1") continue;
    const Json changed =
        answer({"--" + name.substr(0, name.find(' ')), name.substr(name.find(' ') + 1)});
    EXPECT_EQ(action.at("peak_change_bytes"), heaviest(changed) - heaviest(json)) << name;
    EXPECT_EQ(action.at("time_change_ns"), changed.at("time").at("iteration_ns").get<int64_t>() -
                                               json.at("time").at("iteration_ns").get<int64_t>())
        << name;
    ++compared;
  }
  EXPECT_EQ(compared, 2);
}

TEST_F(PlanJob, SearchesUnderTheBudget) {
  const Json json = answer({"--search", "--budget", "70GiB"});
  const Json& search = json.at("search");
  EXPECT_GT(search.at("configurations"), 100);
  ASSERT_FALSE(search.at("best").empty());
  for (const Json& point : search.at("best")) EXPECT_LE(point.at("peak_bytes"), 70LL << 30);
  const Outcome none = run_line(mixtral({"--search", "--budget", "1GiB"}));
  EXPECT_EQ(none.code, kExitInfeasible);
  EXPECT_NE(none.err.find("every configuration is over the budget"), std::string::npos);
}

TEST_F(PlanJob, ForecastsFromARecordedRouting) {
  std::ofstream log(path("routing.log"));
  // Four iterations of the 32 layers; in one of them rank 1 gets 2.6 times the mean.
  for (int step = 0; step < 4; ++step) {
    for (int layer = 1; layer <= 32; ++layer) {
      for (int rank = 0; rank < 2; ++rank) {
        const int hot = step == 2 ? 1900 : 1000;
        log << "step: " << step << ", layer: " << layer << ", rank: " << rank
            << ", received_tokens: " << (rank == 1 ? hot : 2000 - hot) << "\n";
      }
    }
  }
  log.close();
  const Json calm = answer({"--imbalance", "1.4"});
  const std::string budget =
      std::to_string(calm.at("ranks")[0].at("loaded").at("peak_bytes").get<int64_t>());
  const Json json = answer({"--routing", path("routing.log"), "--budget", budget});
  EXPECT_EQ(json.at("forecast").at("iterations"), 4);
  EXPECT_EQ(json.at("forecast").at("iterations_over"), 1);
  EXPECT_EQ(json.at("forecast").at("per_1000"), 250.0);
}

TEST_F(PlanJob, PlansForAColdRouter) {
  const Json json = answer({"--cold-router", "100", "--budget", "80GiB"});
  EXPECT_EQ(json.at("cold_forecast").at("iterations"), 100);
  EXPECT_EQ(json.at("cold_forecast").at("worst_iteration"), 0);
}

TEST_F(PlanJob, EmitsFlagsThatReadBackAsTheSameJob) {
  const Outcome flags = run_line(mixtral({"--emit", "megatron"}));
  ASSERT_EQ(flags.code, kExitDone) << flags.err;
  std::ofstream(path("args.sh")) << flags.out;
  const std::vector<std::string> common = {"--system", config("systems", "h100"), "--json", "-"};
  std::vector<std::string> again = {"plan", "--megatron-args", path("args.sh"), "--world-size",
                                    "32"};
  again.insert(again.end(), common.begin(), common.end());
  const Outcome back = run_line(again);
  ASSERT_EQ(back.code, kExitDone) << back.err;
  const Json json = parse_json_object(back.out, "answer");
  const Json first = answer({});
  EXPECT_EQ(json.at("job"), first.at("job"));
  EXPECT_EQ(json.at("ranks"), first.at("ranks"));
  EXPECT_EQ(json.at("time"), first.at("time"));
}

TEST_F(PlanJob, WritesAPage) {
  const Outcome outcome = run_line(mixtral({"--report", path("page.html")}));
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  std::stringstream text;
  text << std::ifstream(path("page.html")).rdbuf();
  EXPECT_NE(text.str().find("<svg"), std::string::npos);
  EXPECT_EQ(text.str().find("http://") != std::string::npos &&
                text.str().find("http://www.w3.org") == std::string::npos,
            false);
}

TEST_F(PlanJob, GivesTheSameBytesTwice) {
  EXPECT_EQ(run_line(mixtral({})).out, run_line(mixtral({})).out);
  EXPECT_EQ(answer({"--search"}), answer({"--search"}));
}

TEST_F(PlanJob, RefusesBadInputInOneLineAndWritesNothing) {
  // Flags behind a good job and what the complaint has to name.
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--ep", "4"}, "--ep"},
      {{"--dtype", "bf16"}, "--dtype"},
      {{"--policy", "adaptive"}, "--policy"},
      {{"--stages", "Et*8|t*8"}, "--stages"},
      {{"--pipeline", "gpipe"}, "--pipeline"},
      {{"--pipeline", "dualpipe-v", "--stages", "Et*32|L"}, "--stages"},
      {{"--global-batch", "100"}, "--global-batch"},
      {{"--world-size", "30"}, "--world-size"},
      {{"--recompute", "full:2"}, "--recompute"},
      {{"--recompute", "fulll"}, "fulll"},
      {{"--recompute", "moe_akt"}, "moe_akt"},
      {{"--recompute", ""}, "--recompute"},
      {{"--offload", "expert_fc9"}, "expert_fc9"},
      {{"--offload", "moe_act@2"}, "--offload"},
      {{"--spike", "99=2"}, "--spike"},
      {{"--spike", "1"}, "--spike"},
      {{"--imbalance", "-1"}, "--imbalance"},
      {{"--imbalance", "nan"}, "--imbalance"},
      {{"--imbalance", "4.01"}, "at most 4,"},  // 8 ranks of one expert, top 2
      {{"--spike", "1=5"}, "1=5"},
      {{"--spike", "1=2,1=3"}, "micro-batch 1 twice"},
      {{"--emit", "megatron", "--json", "-"}, "--json"},
      {{"--emit", "megatron", "--search"}, "--search"},
      {{"--explain", "rows", "--report", path("page.html")}, "--report"},
      {{"--json", ""}, "--json"},
      {{"--cold-router", "0"}, "--cold-router"},
      {{"--routing", path("none.log")}, "none.log"},
      {{"--emit", "deepspeed"}, "--emit"},
      {{"--vocab", "32000"}, "--vocab"},
      {{"--megatron-args", path("none.sh")}, "--model"},
      {{"--seq", "0"}, "--seq"},
      {{"--budget", "many"}, "--budget"},
      {{"--report", path("no/such/folder.html")}, "no/such"},
  };
  for (const auto& [flags, named] : cases) {
    std::vector<std::string> arguments = mixtral(flags);
    if (flags[0] == "--global-batch") {
      arguments.erase(std::find(arguments.begin(), arguments.end(), "--micro-batches"),
                      std::find(arguments.begin(), arguments.end(), "--micro-batches") + 2);
    }
    const Outcome outcome = run_line(arguments);
    EXPECT_EQ(outcome.code, kExitBadInput) << named;
    EXPECT_EQ(outcome.out, "") << named;
    EXPECT_NE(outcome.err.find(named), std::string::npos) << named << "\n" << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
  const Outcome no_budget =
      run_line({"plan", "--model", config("models", "mixtral-8x7b"), "--system",
                config("systems", "cpu-2core"), "--layout", "pp=4", "--cold-router", "9"});
  EXPECT_EQ(no_budget.code, kExitBadInput) << "nothing to compare with, so no forecast";
  const Outcome folder = run_line({"plan", "--megatron-args", folder_.string()});
  EXPECT_EQ(folder.code, kExitBadInput);
  EXPECT_NE(folder.err.find("a folder"), std::string::npos) << folder.err;
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 0);
  for (const char* layout : {"tp=3,pp=4,ep=8,dp=8", "pp=4,ep=7,dp=8", "pp=64", "pp=4,vpp=9"}) {
    const Outcome outcome = run_line({"plan", "--model", config("models", "mixtral-8x7b"),
                                      "--system", config("systems", "h100"), "--layout", layout});
    EXPECT_EQ(outcome.code, kExitBadInput) << layout << outcome.out;
  }
}

}  // namespace
}  // namespace bagualu
