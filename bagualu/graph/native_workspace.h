#pragma once

#include "bagualu/graph/native_moe.h"

namespace bagualu {

/// Fills the workspaces of every operator of a native graph: the temporaries that the operators
/// make (runtime/ops/workspace.h, which a test compares) and those the executor makes around them.
/// Note [Op workspace]: by operator, beside what the graph lists as storages:
///   core_attn       inside ATen's kernel: hidden_bytes, estimated here, replaced by a profile
///   attn_proj       backward: with dropout the masked gradient [T, h]; weight gradient
///   mlp_fc2         the same; shared_fc2 has the masked gradient as a storage (d_moe_out)
///   router          forward: bf16 logits, then the partial sums of the losses; backward: bf16
///                   gradient of the logits and weight gradient
///   experts         forward: with an exchange one output piece [P, h], scattered to the wire; else
///                   pieces are written in place. Backward: one gradient piece [P, h] (gathered,
///                   then reused for the rows' gradient), [P, f], [P, 2f], the gate weights'
///                   gradient [P] fp32, weight gradient. The piece buffers of intermediates that
///                   were given up come on top (StorageSpec::piece_bytes).
///   lm_head         bf16: forward the logits [T, V], backward their gradient and the weight
///                   gradient; in fp32 log_probs serves as both
///   other GEMMs     backward: weight gradient
/// A weight gradient needs a temporary in bf16 only (fp32 accumulates in the GEMM itself).
/// Split: a weight gradient's own temporary alone (router: the bf16 gradient of the logits again);
/// the input gradient has what is left of the above, without the masked gradient and the [P, 2f]
/// piece, which are storages then.
void set_native_workspaces(const ModelSpec& spec, const NativeGraphOptions& options, Graph& graph);

/// Scratch of ATen's causal CPU attention, forward: per thread a tile of scores, two statistics per
/// row and the output tile. Agrees with the counting allocator in fp32 (20,736 B per thread at seq
/// 128, head_dim 32; 591,872 at 1024, 64; torch 2.13); bf16 adds tiles in half precision.
int64_t attention_forward_hidden_bytes(const ModelSpec& spec, const NativeGraphOptions& options);

/// Backward: the kernel's scratch beside dq, dk, dv, or d_qkv beside them, whichever is more (one
/// of the two is the graph's d_qkv). The scratch is an estimate; `bagualu profile` measures it.
int64_t attention_backward_hidden_bytes(const ModelSpec& spec, const NativeGraphOptions& options);

}  // namespace bagualu
