#include "bagualu/cli/simulate_perfetto.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/cli/simulate_command.h"
#include "bagualu/cli/test_simulation.h"

namespace bagualu {
namespace {

Json events_of(const std::vector<int64_t>& ranks) {
  SimulateRequest request;
  request.scenarios = {fake_scenario()};
  request.wants_perfetto = true;
  request.perfetto_ranks = ranks;
  std::ostringstream progress;
  const std::string text = simulate(request, fake_simulator(), progress).perfetto;
  const Json trace = parse_json_object(text, "trace");
  EXPECT_EQ(trace.at("otherData").at("kind"), "simulated");
  return trace.at("traceEvents");
}

TEST(SimulatePerfetto, HasTracksAndACounterOfEveryRankAndPolicy) {
  const Json events = events_of({0, 5});
  std::set<std::string> processes;
  std::map<int64_t, std::set<std::string>> tracks;
  std::set<int64_t> counters;
  for (const Json& event : events) {
    if (event.at("name") == "process_name") processes.insert(event.at("args").at("name"));
    if (event.at("name") == "thread_name") {
      tracks[event.at("pid").get<int64_t>()].insert(event.at("args").at("name"));
    }
    if (event.at("ph") == "C") counters.insert(event.at("pid").get<int64_t>());
  }
  EXPECT_EQ(processes,
            (std::set<std::string>{"static, rank 0 (stage 0), iteration 9, simulated",
                                   "static, rank 5 (stage 1), iteration 9, simulated",
                                   "adaptive, rank 0 (stage 0), iteration 9, simulated",
                                   "adaptive, rank 5 (stage 1), iteration 9, simulated"}));
  ASSERT_EQ(tracks.size(), 4U);
  for (const auto& [process, names] : tracks) {
    // Two messages are sent side by side and take a lane each.
    EXPECT_EQ(names,
              (std::set<std::string>{"compute", "comm", "d2h", "h2d", "send", "send 2", "receive"}))
        << process;
  }
  EXPECT_EQ(counters.size(), 4U);
}

TEST(SimulatePerfetto, SlicesOfATrackDoNotOverlap) {
  std::map<std::pair<int64_t, int64_t>, double> end;
  for (const Json& event : events_of({0})) {
    if (event.at("ph") != "X") continue;
    double& last = end[{event.at("pid").get<int64_t>(), event.at("tid").get<int64_t>()}];
    EXPECT_GE(event.at("ts").get<double>(), last) << event.dump();
    last = event.at("ts").get<double>() + event.at("dur").get<double>();
  }
  EXPECT_FALSE(end.empty());
}

TEST(SimulatePerfetto, WithoutRanksTheHeaviestOfEveryStageAndTheHottest) {
  std::set<std::string> counters;
  for (const Json& event : events_of({})) {
    if (event.at("ph") == "C") counters.insert(event.at("name"));
  }
  EXPECT_EQ(counters, (std::set<std::string>{"live bytes, rank 1", "live bytes, rank 5",
                                             "live bytes, rank 6"}));
}

TEST(SimulatePerfetto, FieldsAreThoseOfReport) {
  for (const Json& event : events_of({0})) {
    if (event.at("ph") != "X") continue;
    EXPECT_EQ(event.at("args").at("stage"), 0);
    EXPECT_EQ(event.at("args").at("microbatch"), 0);
    EXPECT_TRUE(event.contains("cat"));
  }
}

}  // namespace
}  // namespace bagualu
