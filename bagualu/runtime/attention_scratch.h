#pragma once

#include "bagualu/graph/graph.h"
#include "bagualu/model/layout.h"
#include "bagualu/model/model_spec.h"

namespace bagualu {

/// Runs attention once, forward and backward, at the run's shape and puts the scratch that ATen's
/// kernel takes into the graph (Workspace::hidden_bytes of every core_attn). It depends on the
/// sequence, the threads and the instruction set, and on nothing that routing decides.
/// Requires: the device arena is installed and has no budget that one layer's attention would
/// exceed.
void measure_attention_scratch(const ModelSpec& spec, const TrainShape& shape, Graph& graph);

}  // namespace bagualu
