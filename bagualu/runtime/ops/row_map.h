#pragma once

#include <cstdint>
#include <span>
#include <vector>

/// Where rows lie on the wire and at the experts. Free of torch.
/// Glossary: assignment = token * top_k + slot; send order = sorted by (expert, token), which is
///   (destination rank, local expert, token) because experts lie on ranks in blocks;
///   expert-major = at the receiver: by (local expert, source, send order).
namespace bagualu::ops {

/// Counting sort of one rank's assignments.
/// Shapes:  topk_ids [T * k], ids in [0, E); row_map [T * k]; tokens_per_expert [E]
/// Ensures: row_map[assignment] = its row in send order (one map serves packing and combining).
/// Throws:  InvalidInput if an id is outside [0, E)
/// Cost:    O(T k + E), no allocation beyond E counters
void build_row_map(std::span<const int32_t> topk_ids, int64_t experts, std::span<int32_t> row_map,
                   std::span<int64_t> tokens_per_expert);
void build_row_map(std::span<const int16_t> topk_ids, int64_t experts, std::span<int32_t> row_map,
                   std::span<int64_t> tokens_per_expert);

/// Byte layout of one all-to-all buffer: per peer [rows x row_bytes | rows x fp32 prob].
class WireLayout {
 public:
  /// `with_probs` false: rows only (outputs and their gradients carry no gate weight).
  /// Requires: row_bytes a multiple of 4, so that the fp32 values are aligned.
  WireLayout(std::vector<int64_t> peer_rows, int64_t row_bytes, bool with_probs);

  int64_t peers() const { return static_cast<int64_t>(peer_rows_.size()); }
  int64_t peer_rows(int64_t peer) const { return peer_rows_[peer]; }
  int64_t first_row(int64_t peer) const { return first_row_[peer]; }
  int64_t rows() const { return first_row_.back(); }
  int64_t row_bytes() const { return row_bytes_; }
  bool with_probs() const { return with_probs_; }
  int64_t segment_bytes(int64_t peer) const { return peer_rows_[peer] * bytes_per_row_; }
  int64_t segment_begin(int64_t peer) const { return first_row_[peer] * bytes_per_row_; }
  int64_t probs_begin(int64_t peer) const {
    return segment_begin(peer) + peer_rows_[peer] * row_bytes_;
  }
  int64_t total_bytes() const { return rows() * bytes_per_row_; }
  /// The peer whose segment holds `row`.
  int64_t peer_of_row(int64_t row) const;
  int64_t row_begin(int64_t peer, int64_t row) const {
    return segment_begin(peer) + (row - first_row_[peer]) * row_bytes_;
  }

 private:
  std::vector<int64_t> peer_rows_;
  std::vector<int64_t> first_row_;  // one more than peers
  int64_t row_bytes_;
  int64_t bytes_per_row_;
  bool with_probs_;
};

/// Consecutive rows that are consecutive on both sides.
struct RowRun {
  int64_t source;       ///< rank that sent them
  int64_t segment_row;  ///< first row inside that source's segment
  int64_t expert_row;   ///< first row inside the local expert
  int64_t rows;
};

/// Which received rows belong to which local expert.
/// Shapes: counts [sources * experts_local], source-major
class ReceivedRows {
 public:
  ReceivedRows(std::span<const int64_t> counts, int64_t sources, int64_t experts_local);

  int64_t experts_local() const { return static_cast<int64_t>(runs_.size()); }
  int64_t expert_rows(int64_t expert) const { return expert_rows_[expert]; }
  /// First row of the expert in expert-major order.
  int64_t expert_begin(int64_t expert) const { return expert_begin_[expert]; }
  int64_t rows() const { return expert_begin_.back(); }
  const std::vector<int64_t>& source_rows() const { return source_rows_; }
  const std::vector<RowRun>& runs(int64_t expert) const { return runs_[expert]; }

 private:
  std::vector<std::vector<RowRun>> runs_;
  std::vector<int64_t> expert_rows_;
  std::vector<int64_t> expert_begin_;  // one more than experts
  std::vector<int64_t> source_rows_;
};

}  // namespace bagualu::ops
