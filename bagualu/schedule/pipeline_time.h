#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/model/job.h"

namespace bagualu {

/// Times of a virtual stage as pipeline_ns() needs them.
struct StagePasses {
  double forward_ns = 0;
  double input_gradient_ns = 0;  ///< with what is recomputed before it
  double weight_gradient_ns = 0;
  double backward_ns() const { return input_gradient_ns + weight_gradient_ns; }
  double total_ns() const { return forward_ns + backward_ns(); }
};

/// Makespan of all passes of a step, every micro-batch alike.
/// Shapes:  stages [pp * virtual stages of a rank], in the model's order
/// Ensures: exact for equal stages; within some per cent of simulate() for unequal ones
///          (pipeline_time_test.cpp)
/// Cost:    O(stages); orders other than 1F1B, interleaved and ZB-H1 are simulated once per shape
double pipeline_ns(PipelineKind kind, const std::vector<StagePasses>& stages, int64_t pp,
                   int64_t microbatches);

}  // namespace bagualu
