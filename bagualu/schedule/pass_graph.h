// Passes of an order, or its dual-batch slots, as nodes of a graph: what each waits for, and an
// order in which every input comes first. Shared by the functions that simulate an order and those
// that reason about what a rank may know; a caller wants pipeline.h or overlap_order.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/schedule/pipeline.h"

namespace bagualu {

/// Passes whose results a pass reads.
struct PassInputs {
  std::array<PipelinePass, 4> pass;
  size_t count = 0;
  void add(const PipelinePass& input) { pass[count++] = input; }
};

/// True for passes of the copy engines, which run beside a rank's other passes.
constexpr bool is_copy(PassKind kind) {
  return kind == PassKind::kOffload || kind == PassKind::kReload;
}

/// Owns: nothing of the order, which outlives it.
class PassGraph {
 public:
  /// A pass, or two that are one slot, by the place of the first in the rank's list.
  struct Node {
    size_t rank = 0;
    size_t index = 0;
  };
  static constexpr size_t kNone = SIZE_MAX;
  /// Nodes of the same rank that end before this one starts: the last one on the compute stream,
  /// and, of a copy, the last one on its engine.
  struct Before {
    size_t compute = kNone;
    size_t engine = kNone;
  };

  /// `fused` as OverlapOrder::fused; null: every pass is a node of its own.
  /// Throws: InternalError as simulate().
  /// Cost:   O(passes * ranks)
  explicit PassGraph(const PipelineOrder& order,
                     const std::vector<std::vector<bool>>* fused = nullptr);

  const PipelineOrder& order() const { return order_; }
  const std::vector<Node>& sorted() const { return sorted_; }
  size_t size_of(const Node& node) const {
    return fused_ != nullptr && (*fused_)[node.rank][node.index] ? 2 : 1;
  }
  const PipelinePass& pass_at(const Node& node, size_t part = 0) const {
    return order_.ranks[node.rank][node.index + part];
  }
  const Before& before(const Node& node) const { return before_[node.rank][node.index]; }
  /// The node that runs a pass. Requires: it is listed.
  const Node& node_of(const PipelinePass& pass) const { return nodes_[slot_of(pass)]; }
  /// A missing backward of the next stage is named as a whole one.
  PassInputs inputs_of(const PipelinePass& pass) const;

 private:
  size_t slot_of(const PipelinePass& pass) const;
  bool listed(const PipelinePass& pass) const { return listed_[slot_of(pass)] != 0; }
  void place_passes();
  void sort();
  bool ready(const Node& node, const std::vector<char>& done) const;
  bool waits(const PipelinePass& pass, const std::vector<char>& done, PipelinePass* first) const;
  std::string deadlock_text(const std::vector<size_t>& next, const std::vector<char>& done) const;

  const PipelineOrder& order_;
  const std::vector<std::vector<bool>>* fused_;
  bool has_extras_ = false;   ///< passes that recompute or copy
  std::vector<Node> nodes_;   ///< by slot_of()
  std::vector<char> listed_;  ///< by slot_of()
  std::vector<std::vector<Before>> before_;
  std::vector<Node> sorted_;
};

}  // namespace bagualu
