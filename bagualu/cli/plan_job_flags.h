#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "bagualu/cli/plan_job.h"
#include "bagualu/cli/source_tree.h"

namespace bagualu {

/// Flags of `bagualu plan` that describe a training job of another framework, as they were typed.
struct JobFlags {
  std::string layout;
  std::string stages;
  std::string pipeline;
  std::string global_batch;
  std::string recompute;
  std::string offload;
  std::string strategy;
  std::string megatron_args;
  std::string vocab;
  std::string spike;
  std::string routing;
  std::string cold_router;
  std::string emit;
  std::string report;
  bool search = false;
};

void add_job_flags(CLI::App* app, JobFlags* flags);

/// True if one of the flags says that a job is meant, and not one rank of `bagualu train`.
bool is_job(const JobFlags& flags);

/// Flags that `bagualu plan` has for both questions.
struct CommonPlanFlags {
  std::string model, world_size, micro_batch_size, seq, microbatches, budget, imbalance, system;
};

/// Throws: InvalidInput naming the flag or the file and field.
JobPlanRequest job_request(const JobFlags& flags, const CommonPlanFlags& common,
                           const SourceTree& tree);

}  // namespace bagualu
