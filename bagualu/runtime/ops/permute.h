#pragma once

#include <ATen/core/Tensor.h>

#include "bagualu/runtime/ops/row_map.h"

/// Rows between token order, wire layout and expert-major order. No temporaries on the CPU.
/// Shapes:  wire uint8 [layout.total_bytes()], contiguous; row_map int32 [T * k], contiguous
namespace bagualu::ops {

/// Token side, before a collective: wire row row_map[t k + slot] = x[t] for every slot; with
/// layout.with_probs() also the gate weights.
/// Shapes:  x [T, h]; probs fp32 [T, k] or undefined (layout without probs)
/// Serves the forward rows and, without probs, the gradients of the combined output.
void pack_rows(const at::Tensor& x, const at::Tensor& probs, const at::Tensor& row_map,
               const WireLayout& layout, at::Tensor& wire);

/// Token side, after a collective: out[t] = sum over slots 0..k-1 in that order of its returned
/// rows (added in fp32 and rounded once), or out[t] += that sum when `accumulate`; with
/// layout.with_probs(), d_probs[t, slot] = the returned fp32 value.
/// Shapes:  out [T, h]; d_probs fp32 [T, k] or undefined
/// Serves combine and the gradient of dispatch.
void combine_rows(const at::Tensor& wire, const at::Tensor& row_map, const WireLayout& layout,
                  bool accumulate, at::Tensor& out, at::Tensor& d_probs);

/// Expert side: rows [row_begin, row_begin + P) of a local expert from the wire, and their fp32
/// values where the layout has them.
/// Shapes:  rows [P, h]; row_probs fp32 [P] or undefined
void gather_piece(const at::Tensor& wire, const WireLayout& layout, const ReceivedRows& received,
                  int64_t expert, int64_t row_begin, at::Tensor& rows, at::Tensor& row_probs);

/// Expert side: the mirror of gather_piece. Touches only this piece's bytes of the wire, so a piece
/// may be written back into the buffer it was gathered from.
void scatter_piece(const at::Tensor& rows, const at::Tensor& row_probs, const WireLayout& layout,
                   const ReceivedRows& received, int64_t expert, int64_t row_begin,
                   at::Tensor& wire);

/// All experts at once, expert-major.
/// Shapes:  rows [R, h]; row_probs fp32 [R] or undefined
void unpack_rows(const at::Tensor& wire, const WireLayout& layout, const ReceivedRows& received,
                 at::Tensor& rows, at::Tensor& row_probs);

namespace detail {
/// The same on ATen calls alone.
void pack_rows_aten(const at::Tensor& x, const at::Tensor& probs, const at::Tensor& row_map,
                    const WireLayout& layout, at::Tensor& wire);
void combine_rows_aten(const at::Tensor& wire, const at::Tensor& row_map, const WireLayout& layout,
                       bool accumulate, at::Tensor& out, at::Tensor& d_probs);
}  // namespace detail
}  // namespace bagualu::ops
