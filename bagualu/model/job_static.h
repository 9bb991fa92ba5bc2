#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/model/job.h"
#include "bagualu/model/parameters.h"

namespace bagualu {

/// Bytes of one kind of a rank's model state and what they are made of.
struct StaticBucket {
  std::string name;      ///< "parameters", "gradients", "masters", "exp_avg", "exp_avg_sq", ...
  std::string part;      ///< "dense", "expert", or "" where there is no such split
  int64_t elements = 0;  ///< of the rank, before the division
  int64_t divisor = 1;   ///< ranks that share the elements (distributed optimizer), or 1
  int64_t element_bytes = 0;
  int64_t bytes = 0;
};

/// What a pipeline rank holds from the first step to the last, activations aside.
struct JobStatic {
  RankElements elements;
  std::vector<StaticBucket> buckets;

  int64_t bytes() const;
  int64_t bytes_of(const std::string& name) const;
};

/// Virtual stages whose parameters a pipeline rank holds: those it runs; with DualPipe also those
/// of its mirror, since it has two copies of the model.
std::vector<int64_t> stages_held(const Job& job, int64_t pp_rank);

/// Elements of a pipeline rank: dense ones are the same on dp * cp ranks, expert ones on
/// expert_dp(). Cost: no allocation for one stage per rank but the list of its stages.
RankElements job_rank_elements(const Job& job, const ModelParameters& parameters, int64_t pp_rank);

/// Total of job_static(), without the list. Cost: below a microsecond.
int64_t job_static_bytes(const Job& job, const ModelParameters& parameters, int64_t pp_rank);

/// Model state, stand-ins of weight gradients, workspaces and persistent communication buffers of a
/// pipeline rank.
/// Requires: the job passed validate().
/// Source: Megatron-Core's distributed optimizer (param_and_grad_buffer.py, distrib_optimizer.py).
JobStatic job_static(const Job& job, int64_t pp_rank);

}  // namespace bagualu
