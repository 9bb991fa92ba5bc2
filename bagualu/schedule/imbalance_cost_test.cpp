// What uneven routing costs, published for one model at four context lengths with everything else
// equal. One number, how much more than its share the hottest rank receives, is fitted to one
// length and predicts the losses at the other three.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/measured_jobs.h"
#include "bagualu/cost/system.h"
#include "bagualu/schedule/job_time.h"

namespace bagualu {
namespace {

const std::string kSource = BAGUALU_SOURCE_DIR;

struct Length {
  std::string id;
  Job job;
  double balanced_tflops = 0;
  double dropless_tflops = 0;
  double loss() const { return 1 - dropless_tflops / balanced_tflops; }
};

std::vector<Length> lengths() {
  const Json file = read_json_file(kSource + "/tests/data/modelzoo_qwen3.json");
  const MeasuredJobs jobs = measured_jobs_from_json(file.at("jobs"), "modelzoo_qwen3.json");
  std::vector<Length> lengths;
  for (size_t i = 0; i < jobs.rows.size(); ++i) {
    const Json& at = file.at("throughput").at(i);
    EXPECT_EQ(at.at("id"), jobs.rows[i].id);
    lengths.push_back({jobs.rows[i].id, jobs.rows[i].job, at.at("forced_balance_tflops"),
                       at.at("dropless_tflops")});
  }
  return lengths;
}

SystemSpec h100() { return system_from_file(kSource + "/configs/systems/h100.json"); }

JobTime time_at(const Length& length, double factor) {
  RoutedLoads loads;
  loads.factor = factor;
  return job_time(length.job, h100(), loads);
}

double predicted_loss(const Length& length, double factor) {
  return 1 - static_cast<double>(time_at(length, 1).iteration_ns) /
                 static_cast<double>(time_at(length, factor).iteration_ns);
}

/// The factor at which the loss is the measured one; losses rise with it.
double fitted_factor(const Length& length) {
  double low = 1, high = 8;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (predicted_loss(length, middle) < length.loss() ? low : high) = middle;
  }
  return low;
}

TEST(ImbalanceCost, OneLengthPredictsTheLossOfTheOthersWithinThreePoints) {
  const std::vector<Length> all = lengths();
  ASSERT_EQ(all.size(), 4u);
  for (const Length& fitted : all) {
    const double factor = fitted_factor(fitted);
    std::cout << fmt::format("fitted at {}: {:.3f}; errors in points:", fitted.id, factor);
    for (const Length& other : all) {
      const double points = 100 * (predicted_loss(other, factor) - other.loss());
      std::cout << fmt::format(" {} {:+.1f}", other.id, points);
      EXPECT_LE(std::abs(points), 3) << fitted.id << " " << other.id;
    }
    std::cout << '\n';
  }
}

TEST(ImbalanceCost, TheFittedNumberIsTheOneRecorded) {
  const Json recorded =
      read_json_file(kSource + "/tests/data/fitted.json").at("fits").at("modelzoo_qwen3");
  ASSERT_EQ(recorded.at("numbers").size(), 1u);
  ASSERT_EQ(recorded.at("fitted_on").at("rows"), Json::array({"16k"}));
  const double after = recorded.at("numbers").front().at("after");
  EXPECT_NEAR(fitted_factor(lengths().front()), after, 2e-3);
}

// The machine's efficiencies come from other people's runs on H800; nothing here was fitted to
// these throughputs. All four are 12 to 14 % above ours, so their ratios, which the losses are, are
// not touched.
TEST(ImbalanceCost, BalancedThroughputIsUnderestimatedAlikeAtEveryLength) {
  for (const Length& length : lengths()) {
    const double ours = time_at(length, 1).model_flops_per_s_per_device / 1e12;
    std::cout << fmt::format("{}: {:.0f} TFLOP/s, ours {:.0f} ({:+.1f} %)\n", length.id,
                             length.balanced_tflops, ours,
                             100 * (ours / length.balanced_tflops - 1));
    EXPECT_NEAR(ours / length.balanced_tflops, 0.87, 0.02) << length.id;
  }
}

}  // namespace
}  // namespace bagualu
