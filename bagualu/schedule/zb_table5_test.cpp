// Published bubble rates against ours: three numbers per model, fitted on one count of
// micro-batches, predict the other two counts.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iostream>

#include "bagualu/base/json.h"
#include "bagualu/schedule/pipeline_fit.h"

namespace bagualu {
namespace {

constexpr std::array<const char*, 6> kNames = {"1F1B",  "1F1B-I", "ZB-H1",
                                               "ZB-H2", "ZB-1p",  "ZB-2p"};
using Rates = std::array<double, kNames.size()>;

Json data(const std::string& name) {
  return read_json_file(std::string(BAGUALU_SOURCE_DIR) + "/tests/data/" + name);
}

struct Shape {
  int pp = 1;
  int microbatches = 1;
  int chunks = 1;
  /// Of an activation's bytes, per mille: what a weight gradient still needs. Zero Bubble, section
  /// 2: 32 s b h of 34 s b h + 5 a b s^2.
  int64_t weight_grad_permille = 1000;
};

double rate(const Shape& at, const PassTimes& stage, const PipelineOrder& order,
            const PassTimes& times) {
  const PipelineRun run = simulate(order, equal_times(order, times));
  const auto cost = static_cast<double>(*std::max_element(run.span_ns.begin(), run.span_ns.end()));
  const int64_t work =
      at.microbatches * (stage.forward_ns + stage.input_grad_ns + stage.weight_grad_ns);
  return (cost - static_cast<double>(work)) / cost;
}

Rates rates(const Shape& at, const PassTimes& stage) {
  const PassTimes chunk = {stage.forward_ns / at.chunks, stage.input_grad_ns / at.chunks,
                           stage.weight_grad_ns / at.chunks, stage.send_ns};
  const PipelineOrder plain = one_f_one_b(at.pp, at.microbatches);
  const PipelineTimes times = equal_times(plain, stage);
  const auto fitted = [&](int64_t activations) {
    return zero_bubble_order(at.pp, at.microbatches, times,
                             {1000 * activations, 1000, at.weight_grad_permille});
  };
  const auto of = [&](const PipelineOrder& order) { return rate(at, stage, order, stage); };
  return {of(plain),
          rate(at, stage, interleaved(at.pp, at.chunks, at.microbatches), chunk),
          of(make_order(PipelineKind::kZbH1, at.pp, 1, at.microbatches)),
          of(make_order(PipelineKind::kZbH2, at.pp, 1, at.microbatches)),
          of(fitted(at.pp)),
          of(fitted(2 * at.pp))};
}

TEST(ZeroBubbleTable5, ThreeNumbersOfOneCountPredictTheOthersWithinOnePercentPoint) {
  const Json table = data("zb_table5.json");
  const Json fit = data("fitted.json").at("fits").at("zb_table5");
  // Three numbers per model (forward_ns only sets the unit), a third of the figures at most.
  ASSERT_LE(3 * 3 * fit["fitted"].size(), table["rows"].size() * kNames.size());
  double fitted_sum = 0;
  double equal_sum = 0;
  double worst = 0;
  int predicted = 0;
  std::cout << "model m: rate (error; error with F = I = W and no send), * fitted on\n";
  for (const Json& row : table["rows"]) {
    const auto same_model = [&row](const Json& entry) { return entry["model"] == row["model"]; };
    const Json model = *std::find_if(table["models"].begin(), table["models"].end(), same_model);
    const Json by = *std::find_if(fit["fitted"].begin(), fit["fitted"].end(), same_model);
    const double heads = model["heads"];
    const double quadratic =
        5.0 * heads * model["seq"].get<double>() / model["hidden"].get<double>();
    const Shape at = {row["pp"], row["micro_batches"], model["chunks_1f1b_i"],
                      std::lround(1000 * 32 / (34 + quadratic))};
    const PassTimes stage = {by["forward_ns"], by["input_grad_ns"], by["weight_grad_ns"],
                             by["send_ns"]};
    const Rates ours = rates(at, stage);
    const Rates equal = rates(at, {12000, 12000, 12000, 0});
    const bool seen = by["fitted_on_micro_batches"] == row["micro_batches"];
    std::cout << row["model"].get<std::string>() << " " << at.microbatches << (seen ? "*:" : ":");
    for (size_t i = 0; i < kNames.size(); ++i) {
      const double error = ours[i] - row[kNames[i]].get<double>();
      const double equal_error = equal[i] - row[kNames[i]].get<double>();
      std::cout << fmt::format(" {} {:.4f} ({:+.4f}; {:+.4f})", kNames[i], ours[i], error,
                               equal_error);
      if (seen) continue;
      ++predicted;
      fitted_sum += std::abs(error);
      equal_sum += std::abs(equal_error);
      worst = std::max(worst, std::abs(error));
      EXPECT_LE(std::abs(error), 0.01) << row["model"] << " " << at.microbatches << kNames[i];
    }
    std::cout << '\n';
  }
  ASSERT_EQ(predicted, 48);
  std::cout << fmt::format(
      "predicted figures: mean error {:.4f}, largest {:.4f}; without the fit {:.4f}\n",
      fitted_sum / predicted, worst, equal_sum / predicted);
  EXPECT_LT(3 * fitted_sum, equal_sum);
}

}  // namespace
}  // namespace bagualu
