// Label-setting search over the issue orders of a dual-batch instance.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bagualu/schedule/dual_batch.h"
#include "bagualu/schedule/dual_batch_label.h"
#include "bagualu/schedule/dual_batch_times.h"

namespace bagualu {

struct SearchLimits {
  /// Only orders that end before this are looked for.
  int64_t below_ns = 0;
  /// Labels kept per state, those with the least bound; 0: all.
  int beam = 0;
  int64_t max_labels = 0;  ///< to look at
  /// On the clock of DualBatchSearch::now_ns(); 0: none.
  int64_t deadline_at_ns = 0;
};

struct SearchOutcome {
  bool found = false;
  int64_t makespan_ns = 0;  ///< if found
  /// No order that this pass did not look at ends sooner: together with the best order known it
  /// bounds the optimum.
  int64_t discarded_bound_ns = 0;
  bool complete = false;   ///< neither the labels nor the time ran out
  bool truncated = false;  ///< the beam left out labels that could have mattered
  int64_t labels = 0;      ///< looked at
};

/// Owns its memory and keeps it between passes and instances.
class DualBatchSearch {
 public:
  /// `instance` and `times` outlive the passes.
  /// Returns: false, and nothing is prepared, if that needs more than `most_states` states.
  bool prepare(const DualBatchInstance& instance, const PrecedenceTimes& times, size_t most_states);
  /// Splits both chains at these points, see LabelModel::set_cuts().
  void set_cuts(const std::vector<LabelModel::Cut>& cuts) { model_.set_cuts(cuts); }

  SearchOutcome pass(const SearchLimits& limits);
  /// Of the last pass, which found one.
  void write_order(std::vector<ScheduleItem>& order) const;

  static int64_t now_ns();

 private:
  struct Node {
    int64_t bound_ns;
    int parent;
    int next;  ///< in its state's list
    ItemKind kind;
  };
  struct Entry {
    int64_t bound_ns;
    int node;
  };

  int64_t* label(int node) { return labels_.data() + static_cast<size_t>(node) * model_.width(); }
  int add_node(int parent, ItemKind kind);
  void begin_pass();
  void visit(const SearchState& state);
  void gather(size_t index);
  void expand(const SearchState& state, int node);
  void place(const SearchState& state, int node);
  bool insert(size_t index, int node);
  bool out_of_limits();
  void discard(int64_t bound_ns);

  LabelModel model_;
  SearchLimits limits_;
  SearchOutcome outcome_;
  std::vector<int> heads_;             ///< by state: first of its labels, or -1
  std::vector<int64_t> compute_rest_;  ///< by state; -1: not computed
  std::vector<Node> nodes_;
  std::vector<int64_t> labels_;
  std::vector<Entry> entries_;  ///< labels of the state in work
  int used_ = 0;                ///< labels kept
  int64_t placed_ = 0;          ///< and all that were looked at
  int64_t next_look_ = 0;       ///< at the clock, in labels
  int last_ = -1;
};

}  // namespace bagualu
