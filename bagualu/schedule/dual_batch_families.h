// Families of dual-batch instances for tests and benchmarks: some layers of a forward beside some
// layers of a backward, with operator times of DeepSeek-V3 or of a smaller model, weight gradients,
// rebuilds, offloads and reloads.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/schedule/dual_batch.h"

namespace bagualu {

enum class FamilyTimes : uint8_t {
  /// Attention 1.5, dispatch 0.9, experts 1.2, combine 0.9 ms; backward twice as long.
  kBrief,
  /// Read off the training trace that DeepSeek published (H800, 64-way expert parallel, 4,096
  /// tokens, FP8; deepseek-ai/profile-data, train.json): 31.0 ms of compute and 20.5 of
  /// communication per pair of layers. Times under overlap, waiting for peers not counted.
  kDeepSeekV3,
};

enum class FamilyKind : uint8_t {
  kBalanced,
  kForwardHot,   ///< each layer's routed rows in the forward 1 to 2.6 times the balanced ones
  kBackwardHot,  ///< the same in the backward
  kCommSlow,     ///< communication 1.6 times as long
  kCopiesSlow,   ///< copies twice as long
  kHostSync,     ///< hot forward whose dispatch the issuing thread waits for
};

struct Family {
  FamilyTimes times{};
  FamilyKind kind{};
  int layers = 4;
};

/// All combinations with 4 and with 8 layers: 24.
std::vector<Family> all_families();

/// "dsv3 L4 forward hot".
std::string family_name(const Family& family);

/// Every duration with noise of 10 to 30 % (drawn per instance); links of 25 to 50 GB/s. Weight
/// gradients may lag by 2, rebuilds lead by 3, an offload has two layers of time, a reload waits
/// until the layer but one before has freed its buffer. Integer arithmetic only: equal generators
/// give equal instances everywhere.
/// Units: ns. Ensures: check_instance() holds; comm_order is pinned_comm_order() if `pinned`.
DualBatchInstance family_instance(const Family& family, bool pinned, std::mt19937_64& random);

/// Instances small enough for a MILP: one or two layers of a family, lags of 1 to 3, leads of 0 to 3, every
/// second one pinned. Durations are multiples of kMilpUnitNs, so that a MILP's tolerances cannot
/// hide one.
inline constexpr int64_t kMilpUnitNs = 10'000;
DualBatchInstance milp_instance(int64_t number);

/// Makespan without any overlap of compute and communication, of the two orders (backward or
/// forward first) that need no more than that; copies run beside, what waits for them waits.
int64_t no_overlap_ns(const DualBatchInstance& instance);

/// {"forward":[[ns,resource,host_sync],...],"backward":[...],"weight_grads":[[ns,after],...],
///  "rebuilds":[[ns,before],...],"copies_out":[[ns,source,releases],...],
///  "copies_in":[[ns,wanted_by_backward,wanted_by_rebuild,not_before],...],
///  "weight_lag","rebuild_lead","comm_order":[[kind,index],...]}; enumerators as numbers.
Json instance_json(const DualBatchInstance& instance);

}  // namespace bagualu
