// A rank on which the policy decides, recorded loads for it, and a drive that times decisions.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <random>
#include <vector>

#include "bagualu/graph/native_moe.h"
#include "bagualu/provision/policy.h"

namespace bagualu {

template <typename Work>
int64_t timed_ns(Work&& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return (std::chrono::steady_clock::now() - begin) / std::chrono::nanoseconds(1);
}

/// Eight layers of Qwen3-30B-A3B over 8 ranks, bf16, 4,096 tokens, H800 rates; budget: what
/// save-all needs at 1.2 times the balanced load. Not copyable: the context points into it.
struct PolicySetup {
  static constexpr int64_t kLayers = 8, kEpSize = 8, kTokens = 4096, kChunkRows = 256;

  explicit PolicySetup(const std::filesystem::path& configs);
  PolicySetup(const PolicySetup&) = delete;
  PolicySetup& operator=(const PolicySetup&) = delete;

  /// Rows that stand to the balanced rows as `rows` to `mean`, in pieces of at most kChunkRows.
  LayerLoad scaled(double rows, double mean) const;

  ModelSpec spec;
  Graph graph;
  CostTable cost;
  ProvisionContext context;
};

struct TimedDecision {
  int gate = -1;
  int64_t ns = 0;
  bool cache_hit = false;
  bool mitigated = false;
};

/// One micro-batch as drive_microbatch() drives it.
/// Throws: InternalError if a decision is not feasible or the budget was exceeded.
void drive_timed(const ProvisionContext& context, Policy& policy,
                 const std::vector<LayerLoad>& loads,
                 const std::function<void(const TimedDecision&)>& add);

/// Micro-batches at 0.8 to 1.2 times the balanced load, each with some layers at 2.6 times.
std::vector<std::vector<LayerLoad>> spiked_loads(const PolicySetup& setup, int64_t microbatches,
                                                 std::mt19937_64& random);

/// 64 micro-batches of 8 layers. A recorded layer's load is that of the rank with two of the 16
/// experts, relative to the mean over ranks; two recorded micro-batches of 4 layers make one of 8.
std::vector<std::vector<LayerLoad>> trace_iteration(const PolicySetup& setup,
                                                    const std::filesystem::path& file);

/// The same from rows that a rank of `bagualu train` received (bench/data/README.md).
std::vector<std::vector<LayerLoad>> train_iteration(const PolicySetup& setup,
                                                    const std::filesystem::path& file);

}  // namespace bagualu
