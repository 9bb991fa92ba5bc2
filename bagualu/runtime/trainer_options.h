#pragma once

#include <cstdint>
#include <string>

#include "bagualu/base/json.h"
#include "bagualu/provision/training_rank.h"
#include "bagualu/runtime/ops/optimizer.h"

namespace bagualu {

/// Everything a run fixes at its start. Units: *_bytes, 0 = no limit.
struct TrainerOptions : TrainingSetup {
  uint64_t seed = 0;
  Json profile;              ///< null: measure at the start
  bool verify_checksums = false;
  ops::AdamwOptions adamw;
  double clip = 0.0;  ///< largest gradient norm; 0 = no clipping
  /// How long any wait for another rank lasts before the job ends.
  int64_t deadline_ns = int64_t{30} * 1'000'000'000;
  /// A stated speed of the expert all-to-alls, for measurements. 0 = as fast as they are.
  int64_t link_bytes_per_s = 0;
  int64_t link_latency_ns = 0;

  /// Throws: InvalidInput naming the option.
  static TrainerOptions from_json(const Json& json, const std::string& where);
};

/// Names of the torch.distributed groups of a rank; "" for a group of one.
struct TrainerGroups {
  std::string ep;   ///< ranks of the stage that share its experts
  std::string dp;   ///< ranks of the stage
  std::string edp;  ///< ranks of the stage that hold the same experts
  std::string pp;   ///< ranks of all stages that see the same tokens
  std::string world;
  std::string embedding;  ///< first and last stage, with tied embeddings; "" elsewhere

  /// {"ep":name,...}; what is left out is "". Throws: InvalidInput
  static TrainerGroups from_json(const Json& json, const std::string& where);
};

}  // namespace bagualu
