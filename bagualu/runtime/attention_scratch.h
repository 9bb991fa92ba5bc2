#pragma once

#include "bagualu/model/layout.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/provision/training_rank.h"

namespace bagualu {

/// Runs attention once, forward and backward, at the run's shape: the scratch that ATen's kernel
/// takes. It depends on the sequence, the threads and the instruction set, and on nothing that
/// routing decides.
/// Requires: the device arena is installed and has no budget that one layer's attention would
/// exceed.
AttentionScratch measure_attention_scratch(const ModelSpec& spec, const TrainShape& shape);

}  // namespace bagualu
