// What precedence alone says about an instance: how early each item can start and how long the
// rest behind it takes, whatever the order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bagualu/schedule/dual_batch.h"

namespace bagualu {

/// Nodes are all items and copies; forward operators first, then backward, weight gradients,
/// rebuilds, copies out, copies in. Edges: chains, fillers and their operators, first in first out,
/// windows, copies and what waits for them, the pinned communication order.
/// A second build() on an instance of a size seen before allocates nothing.
class PrecedenceTimes {
 public:
  /// Cost: O(items).
  void build(const DualBatchInstance& instance);

  /// As build(), on an instance that differs from the last one in durations alone.
  void retime(const DualBatchInstance& instance);

  int node(ItemKind kind, int index) const { return base_[static_cast<size_t>(kind)] + index; }
  int copy_out(int index) const { return base_[4] + index; }
  int copy_in(int index) const { return base_[5] + index; }
  int nodes() const { return base_[6]; }

  int64_t ns(int node) const { return ns_[static_cast<size_t>(node)]; }
  Resource resource(int node) const { return resource_[static_cast<size_t>(node)]; }
  /// Earliest start.
  int64_t head_ns(int node) const { return head_[static_cast<size_t>(node)]; }
  /// Longest path behind its end.
  int64_t tail_ns(int node) const { return tail_[static_cast<size_t>(node)]; }
  int64_t critical_path_ns() const { return critical_path_ns_; }
  /// The order of communication is given, so that it is a path like any other.
  bool comm_is_serial() const { return comm_is_serial_; }

 private:
  void number_nodes(const DualBatchInstance& instance);
  void walk(const DualBatchInstance& instance);
  void edge(int from, int to) { edges_.push_back({from, to}); }
  void add_forward(const DualBatchInstance& instance, int index);
  void add_backward(const DualBatchInstance& instance, int index);
  void add_weight_grad(const DualBatchInstance& instance, int index);
  void add_rebuild(const DualBatchInstance& instance, int index);
  void add_comm(int node);
  void add_copies_in(const DualBatchInstance& instance);
  void relax();

  struct Edge {
    int from;
    int to;
  };
  std::array<int, 7> base_{};
  std::vector<int64_t> ns_;
  std::vector<Resource> resource_;
  std::vector<int64_t> head_;
  std::vector<int64_t> tail_;
  std::vector<Edge> edges_;  ///< every edge into a node before every edge out of it
  int64_t critical_path_ns_ = 0;
  bool comm_is_serial_ = false;
  // Where the walk over the instance stands.
  std::array<int, 4> next_{};  ///< by ItemKind
  int next_out_ = 0;
  int next_in_ = 0;
  int last_comm_ = -1;
  std::vector<int> compute_before_;  ///< by backward operator: last compute one before it, or -1
};

}  // namespace bagualu
