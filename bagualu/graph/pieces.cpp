#include "bagualu/graph/pieces.h"

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {

std::vector<ExpertPiece> piece_grid(const std::vector<int64_t>& rows_per_expert,
                                    int64_t chunk_rows) {
  BGL_CHECK(chunk_rows > 0, chunk_rows);
  std::vector<ExpertPiece> pieces;
  int64_t begin = 0;
  for (size_t e = 0; e < rows_per_expert.size(); ++e) {
    for (int64_t done = 0; done < rows_per_expert[e]; done += chunk_rows) {
      const int64_t rows = std::min(chunk_rows, rows_per_expert[e] - done);
      pieces.push_back({static_cast<int>(e), begin + done, rows});
    }
    begin += rows_per_expert[e];
  }
  return pieces;
}

LayerLoad layer_load(const std::vector<int64_t>& rows_per_expert, int64_t chunk_rows) {
  LayerLoad load;
  for (int64_t rows : rows_per_expert) {
    load.rows += rows;
    load.piece_rows = std::max(load.piece_rows, std::min(rows, chunk_rows));
  }
  return load;
}

LayerLoad worst_case_load(int64_t ep_size, int64_t tokens, int64_t top_k, int64_t local_experts,
                          int64_t chunk_rows) {
  LayerLoad load;
  load.rows = ep_size * tokens * std::min(top_k, local_experts);
  load.piece_rows = std::min(chunk_rows, ep_size * tokens);
  return load;
}

}  // namespace bagualu
