// Cases of the stage problem (bagualu/provision/stage_plan.h) for benchmarks and for comparison
// with other solvers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/op_cost.h"
#include "bagualu/graph/graph.h"
#include "bagualu/provision/stage_plan.h"

namespace bagualu {

struct StageCase {
  std::string model;
  Graph graph;
  CostTable cost;
  bool allow_quantise = false;
  bool recompute_only = false;
  std::vector<std::vector<LayerLoad>> loads;  ///< by micro-batch
  StageProblem problem;                       ///< points into loads

  StageCase() = default;
  StageCase(const StageCase&) = delete;
  StageCase& operator=(const StageCase&) = delete;
};

struct RealisticOptions {
  int layers = 0;        ///< 0: 1 to 8
  int microbatches = 0;  ///< 0: 1 to 4
};

/// DeepSeek-V3, Qwen3-235B, Mixtral 8x22B or Kimi-K2 (megatron profile, 4,096 tokens, H800 rates):
/// MoE layers at loads of 0 to 4 times the balanced one, budgets from a tenth of everything upward,
/// windows, bubbles, host limits, FP8 twins and quantising now and then.
std::unique_ptr<StageCase> realistic_case(const std::filesystem::path& configs,
                                          const RealisticOptions& options, std::mt19937_64& random);

/// 64 independent activations that may only be recomputed, as PyTorch's partitioner sees them.
std::unique_ptr<StageCase> items64_case(std::mt19937_64& random);

/// One line of bench/stage_case.py's format.
Json stage_case_json(int64_t number, const StageCase& stage, const StagePlan& plan,
                     int64_t solve_ns);

}  // namespace bagualu
