#include "bagualu/cli/plan_page.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"
#include "bagualu/cli/test_page.h"

namespace bagualu {
namespace {

constexpr int64_t kGi = int64_t{1} << 30;

PlanPage example() {
  PlanPage page;
  page.title = "demo on 4 devices";
  page.summary = "Fits: 30.0 GiB of 32.0 GiB.";
  page.facts = {{"layout", "pp=2,ep=2"}};
  page.budget_bytes = 32 * kGi;
  page.asked_factor = 2.0;
  page.kinds = {"static", "saved activations", "transients"};
  for (int r = 0; r < 2; ++r) {
    PlanPageRank rank;
    rank.name = std::to_string(r);
    rank.content = r == 0 ? "Et*2" : "t*2L";
    rank.peak_kinds = {10 * kGi, 15 * kGi, 5 * kGi};
    rank.static_bytes = 10 * kGi;
    rank.calm_bytes = 25 * kGi;
    rank.peak_bytes = (30 + 4 * r) * kGi;
    rank.survivable_factor = 2.25;
    rank.cause = "layer1.expert_fc1 in 0B3";
    page.ranks.push_back(rank);
    PlanPageSeries series;
    series.name = "rank " + rank.name;
    for (int i = 0; i < 1000; ++i) {
      series.points.push_back({"0F" + std::to_string(i),
                               1.0 * i,
                               1.0 * i + 1,
                               {10 * kGi, (i % 7) * kGi, i == 777 ? 13 * kGi : kGi}});
    }
    page.over_time.push_back(series);
    page.curves.push_back({"rank " + rank.name, {{1.0, 25 * kGi}, {2.0, 30 * kGi}}});
  }
  page.pipeline_svg = "<svg xmlns=\"http://www.w3.org/2000/svg\"><text x=\"1\">0F0</text></svg>\n";
  page.tables = {
      {"Largest tensors", "of rank 0", {"name", "bytes"}, {{"rows", "3.0 GiB"}}, {false, true}}};
  page.notes = {"communication buffers are not counted"};
  return page;
}

TEST(PlanPage, IsWellFormed) {
  EXPECT_EQ(fault_of(plan_page_html(example())), "");
  EXPECT_EQ(fault_of(plan_page_html({})), "") << "an empty page too";
  EXPECT_NE(fault_of("<p><b></p></b>"), "") << "the check can fail";
  EXPECT_NE(fault_of("<p>a & b</p>"), "");
}

TEST(PlanPage, FetchesNothing) {
  const std::string html = plan_page_html(example());
  EXPECT_EQ(fetched_by(html), "");
  EXPECT_NE(fetched_by("<img src=\"x\"/>"), "") << "the check can fail";
  EXPECT_NE(html.find("default-src 'none'"), std::string::npos);
}

TEST(PlanPage, EscapesEveryText) {
  PlanPage page = example();
  const std::string evil = "a<b>&\"'\x01\xff</style>";
  page.title = page.summary = page.facts[0].first = page.facts[0].second = evil;
  page.kinds[0] = page.ranks[0].name = page.ranks[0].content = page.ranks[0].cause = evil;
  page.over_time[0].name = page.over_time[0].points[777].label = page.time_unit = evil;
  page.curves[0].name = page.notes[0] = evil;
  page.tables[0] = {evil, evil, {evil}, {{evil}}, {}};
  const std::string html = plan_page_html(page);
  EXPECT_EQ(fault_of(html), "");
  EXPECT_EQ(html.find("a<b>"), std::string::npos);
  EXPECT_EQ(html.find('\x01'), std::string::npos);
  EXPECT_EQ(escape_html("a<b>&\"'"), "a&lt;b&gt;&amp;&quot;&#39;");
  EXPECT_EQ(escape_html("\xc3\xa9\x1b\xc3"), "\xc3\xa9\xEF\xBF\xBD\xEF\xBF\xBD");
  EXPECT_EQ(escape_html("\xed\xa0\x80"), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD") << "a surrogate";
}

TEST(PlanPage, EqualPagesGiveEqualBytes) {
  EXPECT_EQ(plan_page_html(example()), plan_page_html(example()));
}

TEST(PlanPage, ThinningKeepsThePeak) {
  // 1,000 points in 240 columns. Point 777 holds 10 + 777 % 7 = 0 + 13 = 23 GiB.
  const std::string html = plan_page_html(example());
  EXPECT_NE(html.find("23.0 GiB in 0F777"), std::string::npos);
  const std::string hit = "class=\"hit\"";
  int64_t hits = 0;
  for (size_t at = html.find(hit); at != std::string::npos; at = html.find(hit, at + 1)) ++hits;
  EXPECT_EQ(hits, 2 * 240);
}

TEST(PlanPage, NamesRanksOverTheBudget) {
  const std::string html = plan_page_html(example());
  EXPECT_NE(html.find("34.0 GiB (over)"), std::string::npos);
  EXPECT_EQ(html.find("30.0 GiB (over)"), std::string::npos);
  EXPECT_NE(html.find("budget 32.0 GiB"), std::string::npos);
}

TEST(PlanPage, IsWrittenByPlanForEveryOrder) {
  const std::filesystem::path file =
      std::filesystem::path(testing::TempDir()) / "plan_page_test.html";
  for (const char* order : {"1f1b", "zb-h1", "zb-v", "dualpipe"}) {
    std::filesystem::remove(file);
    std::ostringstream out;
    std::ostringstream err;
    const std::string source = BAGUALU_SOURCE_DIR;
    const int code = run({"plan", "--model", source + "/configs/models/mixtral-8x7b.json",
                          "--system", source + "/configs/systems/h800.json", "--layout",
                          "pp=4,ep=4,dp=4", "--seq", "512", "--micro-batches", "20", "--budget",
                          "200GiB", "--pipeline", order, "--report", file.string()},
                         {out, err});
    ASSERT_EQ(code, kExitDone) << err.str();
    std::ostringstream html;
    html << std::ifstream(file).rdbuf();
    EXPECT_EQ(fault_of(html.str()), "") << order;
    for (const char* words : {"Memory over time", "rank 3", "Peak against imbalance",
                              "drawn with 16 of 20 micro-batches", "budget 200.0 GiB"}) {
      EXPECT_NE(html.str().find(words), std::string::npos) << order << ": " << words;
    }
  }
  std::filesystem::remove(file);
}

TEST(PlanPage, FoldsFurtherRanksAway) {
  PlanPage page = example();
  EXPECT_EQ(plan_page_html(page).find("<details>"), std::string::npos);
  page.over_time.resize(15, page.over_time[0]);
  EXPECT_NE(plan_page_html(page).find("3 further ranks"), std::string::npos);
}

}  // namespace
}  // namespace bagualu
