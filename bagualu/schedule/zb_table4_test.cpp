// Published throughput and memory of pipeline orders against ours. No number is fitted to them:
// the times of a pass and of a send are those that another table of the same paper gave
// (zb_table5_test.cpp).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/schedule/pipeline_fit.h"

namespace bagualu {
namespace {

Json data(const std::string& name) {
  return read_json_file(std::string(BAGUALU_SOURCE_DIR) + "/tests/data/" + name);
}

Json of_model(const Json& list, const Json& model) {
  return *std::find_if(list.begin(), list.end(),
                       [&](const Json& entry) { return entry["model"] == model; });
}

struct Row {
  Json model;
  std::string order;
  int microbatches = 1;
  double samples_per_s = 0;
  double peak_gb = 0;
  bool interleaved() const { return order == "1F1B-I"; }
  /// Megatron-LM's own orders: it waits for each message before the next pass. The authors' orders
  /// issue theirs beside the passes.
  bool waits_for_sends() const { return order == "1F1B" || interleaved(); }
  int pp() const { return model["pp"]; }
  int chunks() const { return interleaved() ? model["chunks_1f1b_i"].get<int>() : 1; }
};

std::vector<Row> rows() {
  const Json table = data("zb_table4.json");
  std::vector<Row> rows;
  for (const Json& row : table["rows"]) {
    rows.push_back({of_model(table["models"], row["model"]), row["order"], row["micro_batches"],
                    row["samples_per_s"], row["peak_gb"]});
  }
  return rows;
}

PassTimes profiled(const Row& row) {
  const Json fit = data("fitted.json").at("fits").at("zb_table5");
  const Json by = of_model(fit["fitted"], row.model["model"]);
  return {by["forward_ns"], by["input_grad_ns"], by["weight_grad_ns"], by["send_ns"]};
}

/// Bytes of a micro-batch's activations per layer, 16-bit, nothing recomputed, and what of them a
/// weight gradient needs (Korthikanti et al. 2022, Eq. 1; Qi et al. 2023, section 2).
double layer_bytes(const Row& row, bool weight_gradient) {
  const double sbh = row.model["seq"].get<double>() * row.model["micro_batch_size"].get<double>() *
                     row.model["hidden"].get<double>();
  const double quadratic = 5.0 * row.model["heads"].get<double>() * row.model["seq"].get<double>() /
                           row.model["hidden"].get<double>();
  return sbh * (weight_gradient ? 32 : 34 + quadratic);
}

PipelineOrder order_of(const Row& row) {
  const int pp = row.pp(), count = row.microbatches;
  const PassTimes stage = profiled(row);
  if (row.order == "1F1B") return one_f_one_b(pp, count);
  if (row.interleaved()) return interleaved(pp, row.chunks(), count);
  const int64_t activations = row.order == "ZB-2p" ? 2 * pp : pp;
  const auto permille =
      static_cast<int64_t>(std::lround(1000 * layer_bytes(row, true) / layer_bytes(row, false)));
  return zero_bubble_order(pp, count, equal_times(one_f_one_b(pp, count), stage),
                           {1000 * activations, 1000, permille});
}

/// Longest span of a rank, by which the paper counts: from its first pass to the end of its last.
double span_ns(const Row& row, const PassTimes& stage, bool waits) {
  const PipelineOrder order = order_of(row);
  const PassTimes chunk = {stage.forward_ns / row.chunks(), stage.input_grad_ns / row.chunks(),
                           stage.weight_grad_ns / row.chunks(), waits ? 0 : stage.send_ns};
  PipelineTimes times = equal_times(order, chunk);
  for (int s = 0; waits && s < order.stages; ++s) {
    for (int64_t& ns : times.forward_ns[s]) ns += s + 1 < order.stages ? stage.send_ns : 0;
    for (int64_t& ns : times.backward_ns[s]) ns += s > 0 ? stage.send_ns : 0;
  }
  const std::vector<int64_t> spans = simulate(order, times).span_ns;
  return static_cast<double>(*std::max_element(spans.begin(), spans.end()));
}

/// Samples per unit of time, comparable within one model.
double throughput(const Row& row, const PassTimes& stage, bool waits) {
  return row.microbatches / span_ns(row, stage, waits);
}

/// Measured and three times predicted: as we say it is, with sends all beside the passes, and of
/// equal passes without sends.
struct Throughput {
  double measured = 0, ours = 0, beside = 0, equal = 0;
};

std::vector<Throughput> throughputs(const std::vector<Row>& rows) {
  std::vector<Throughput> all;
  for (const Row& row : rows) {
    all.push_back({row.samples_per_s, throughput(row, profiled(row), row.waits_for_sends()),
                   throughput(row, profiled(row), false),
                   throughput(row, {12000, 12000, 12000, 0}, false)});
  }
  return all;
}

/// Of one model: two orders at the same count of micro-batches, or two counts of the same order.
bool comparable(const Row& a, const Row& b) {
  return a.model == b.model && (a.microbatches == b.microbatches) != (a.order == b.order);
}

TEST(ZeroBubbleTable4, RatiosOfThroughputComeWithinFivePercent) {
  const std::vector<Row> all = rows();
  const std::vector<Throughput> of = throughputs(all);
  int pairs = 0;
  double sum = 0, sum_beside = 0, sum_equal = 0, largest = 0;
  std::cout << "ratio: measured, ours (error; sends all beside the passes; F = I = W, no sends)\n";
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = i + 1; j < all.size(); ++j) {
      if (!comparable(all[i], all[j])) continue;
      const double measured = of[i].measured / of[j].measured;
      const double error = of[i].ours / of[j].ours / measured - 1;
      const double beside = of[i].beside / of[j].beside / measured - 1;
      const double equal = of[i].equal / of[j].equal / measured - 1;
      const std::string name =
          fmt::format("{} {} m{} / {} m{}", all[i].model["model"].get<std::string>(), all[i].order,
                      all[i].microbatches, all[j].order, all[j].microbatches);
      std::cout << fmt::format("{}: {:.3f}, {:.3f} ({:+.1f} %; {:+.1f} %; {:+.1f} %)\n", name,
                               measured, of[i].ours / of[j].ours, 100 * error, 100 * beside,
                               100 * equal);
      EXPECT_LE(std::abs(error), 0.05) << name;
      ++pairs;
      sum += std::abs(error);
      sum_beside += std::abs(beside);
      sum_equal += std::abs(equal);
      largest = std::max(largest, std::abs(error));
    }
  }
  ASSERT_EQ(pairs, 32);
  std::cout << fmt::format(
      "mean {:.1f} %, largest {:.1f} %; sends beside {:.1f} %, equal {:.1f} %\n", 100 * sum / pairs,
      100 * largest, 100 * sum_beside / pairs, 100 * sum_equal / pairs);
  EXPECT_LT(sum, sum_beside);
  EXPECT_LT(sum, sum_equal);
}

/// GB of the rank that needs most: 18 bytes per weight of its layers, activations in flight. The
/// embedding and the head, first and last in place of a layer, are left out.
double peak_gb(const Row& row) {
  const PipelineOrder order = order_of(row);
  const int slots = row.model["layers"].get<int>() + 2;
  const int per_stage = slots / order.stages;
  EXPECT_EQ(per_stage * order.stages, slots);
  std::vector<std::vector<int64_t>> bytes(order.stages), weight_grad(order.stages);
  for (int s = 0; s < order.stages; ++s) {
    const bool end = s == 0 || s == order.stages - 1;
    const double layers = per_stage - (end ? 1 : 0);
    bytes[s].assign(row.microbatches, std::llround(layers * layer_bytes(row, false)));
    weight_grad[s].assign(row.microbatches, std::llround(layers * layer_bytes(row, true)));
  }
  const double hidden = row.model["hidden"];
  const double layers_per_rank = static_cast<double>(slots) / row.pp();
  double largest = 0;
  const std::vector<ResidentPeak> peaks = resident_peaks(order, bytes, weight_grad);
  for (int rank = 0; rank < row.pp(); ++rank) {
    const bool end = rank == 0 || rank == row.pp() - 1;
    const double weights = (layers_per_rank - (end ? 1 : 0)) * 12 * hidden * hidden;
    largest = std::max(largest, 18 * weights + static_cast<double>(peaks[rank].bytes));
  }
  return largest / (1024.0 * 1024 * 1024);
}

TEST(ZeroBubbleTable4, OrdersNeedMoreOrLessMemoryAsMeasured) {
  const std::vector<Row> all = rows();
  std::vector<double> ours;
  double worst = 0;
  for (const Row& row : all) {
    ours.push_back(peak_gb(row));
    const double error = ours.back() / row.peak_gb - 1;
    worst = std::max(worst, std::abs(error));
    std::cout << fmt::format("{} {} m{}: {:.0f} GB, ours {:.1f} ({:+.0f} %)\n",
                             row.model["model"].get<std::string>(), row.order, row.microbatches,
                             row.peak_gb, ours.back(), 100 * error);
  }
  int compared = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < all.size(); ++j) {
      if (all[i].model != all[j].model || all[i].peak_gb >= all[j].peak_gb) continue;
      ++compared;
      EXPECT_LT(ours[i], ours[j]) << all[i].order << " " << all[j].order << all[i].model["model"];
    }
  }
  EXPECT_GT(compared, 40);
  EXPECT_LT(worst, 0.12);
}

}  // namespace
}  // namespace bagualu
