#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/graph/graph.h"

namespace bagualu {

/// A run of rows of one local expert. Rows of a rank lie expert by expert.
struct ExpertPiece {
  int expert = 0;
  int64_t row_begin = 0;
  int64_t rows = 0;
};

/// Cuts every local expert's rows into pieces of at most `chunk_rows`.
/// Note [Chunk grid]: a GEMM over other rows, or a weight gradient summed over other pieces,
/// differs in the last bit. So the grid is a function of the row counts alone and the same under
/// every policy; whether a piece's intermediates are kept is the only thing a residency changes.
/// Ensures: pieces are ordered by row_begin; experts without rows have none.
std::vector<ExpertPiece> piece_grid(const std::vector<int64_t>& rows_per_expert,
                                    int64_t chunk_rows);

/// The load of a layer whose local experts receive these rows.
LayerLoad layer_load(const std::vector<int64_t>& rows_per_expert, int64_t chunk_rows);

/// The largest load any routing can cause: every token of every expert-parallel rank picks as many
/// experts of this rank as it can, rows = ep_size * tokens * min(top_k, local experts).
/// Source: shared bound of Transformer Engine's dropless buffers; docs/design.md Eq. 6.
LayerLoad worst_case_load(int64_t ep_size, int64_t tokens, int64_t top_k, int64_t local_experts,
                          int64_t chunk_rows);

}  // namespace bagualu
