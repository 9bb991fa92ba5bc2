// States and labels of the dual-batch search: what is left to decide after a prefix of an order,
// and when. See docs/design.md, "Dual-batch schedules".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bagualu/schedule/dual_batch.h"
#include "bagualu/schedule/dual_batch_times.h"

namespace bagualu {

/// How many items of each kind are issued.
struct SearchState {
  int forward = 0;
  int backward = 0;
  int weight_grads = 0;
  int rebuilds = 0;
};

/// What follows from an instance for labels. A label is width() times: until when each resource is
/// busy (host synchronisation included), when the next operator of each chain can start, and the
/// ends of copies and fillers for which an item that is not issued waits. Unused entries are 0.
/// Ensures: if every entry of one label is at most the other's, at equal states, then so is the
/// best makespan. advance() raises entries to what cannot be used sooner anyhow, so that labels
/// that differ in nothing that matters become equal.
class LabelModel {
 public:
  /// `instance` and `times` outlive the model's use.
  void build(const DualBatchInstance& instance, const PrecedenceTimes& times);

  /// In windows, no chain passes a cut before the other has reached it. Cuts are pairs (operators
  /// of the forward, of the backward), growing; none: free.
  struct Cut {
    int forward = 0;
    int backward = 0;
  };
  void set_cuts(const std::vector<Cut>& cuts);

  size_t width() const { return width_; }
  size_t states() const { return states_; }
  /// Dense; a move leads to a state of a larger index.
  size_t state_index(const SearchState& state) const;
  SearchState state_at(size_t index) const;
  bool is_last(const SearchState& state) const;

  /// Writes the label of the empty order; the state it belongs to is the empty one.
  void first(int64_t* label) const;
  /// Items that an optimal continuation may start with: bit k for ItemKind k. Some continuation
  /// within the moves is as good as any.
  unsigned moves(const SearchState& state, const int64_t* label) const;
  /// Issues the next item of `kind` in both.
  void advance(ItemKind kind, SearchState& state, int64_t* label) const;
  /// Issues what automatic() names, then raises entries; after first() and after advance().
  void settle(SearchState& state, int64_t* label) const;
  /// A communication operator that may as well be issued now, if there is one.
  bool automatic(const SearchState& state, ItemKind& kind) const;

  /// Load bound of what is left on the compute stream, from the moment that it is free.
  int64_t compute_rest_ns(const SearchState& state) const;
  /// No continuation ends sooner. `compute_rest` is compute_rest_ns(state).
  int64_t bound_ns(const SearchState& state, const int64_t* label, int64_t compute_rest) const;

  static void count(ItemKind kind, SearchState& state);

 private:
  // Positions in a label; slots follow.
  enum : size_t { kCompute, kComm, kD2h, kH2d, kForwardNext, kBackwardNext, kSlots };

  struct Chain {
    std::vector<int64_t> ns;
    std::vector<uint8_t> comm;
    std::vector<uint8_t> sync;
    std::vector<int64_t> start_ns;  ///< running alone; one more for the end
    std::vector<int> next_compute;  ///< first at or behind; size if none
    std::vector<int> next_comm;
    std::vector<int> comm_before;       ///< communication operators before
    std::vector<int> comm_turn;         ///< of a communication operator: its place in the order
    std::vector<int64_t> rest_ns;       ///< longest path from its start
    std::vector<int64_t> comm_left_ns;  ///< communication at or behind
    int size = 0;
  };
  struct Job {
    ItemKind kind;
    int index;
    int64_t ns;
    int64_t tail_ns;
  };
  struct Range {
    int begin = 0;
    int end = 0;
  };
  // A copy that something waits for, and the entry that keeps its end.
  struct Token {
    int copy;
    int source;   ///< operator behind which the copy starts
    int waiting;  ///< operator that waits for it
    int rebuild;  ///< and rebuild, or -1
    size_t slot;
  };
  struct Candidate {
    ItemKind kind;
    int64_t start_ns;
    int64_t end_ns;
    bool blocks;  ///< may be put before another item without harm
  };

  void build_chain(const std::vector<ChainOp>& ops, ItemKind kind, const PrecedenceTimes& times,
                   Chain& chain) const;
  void build_turns(const DualBatchInstance& instance);
  void build_fillers(const DualBatchInstance& instance);
  void build_copies_out(const DualBatchInstance& instance);
  void build_copies_in(const DualBatchInstance& instance);
  void build_jobs(const DualBatchInstance& instance, const PrecedenceTimes& times);
  size_t add_slots(int count);

  const Chain& chain(ItemKind kind) const {
    return kind == ItemKind::kForward ? forward_ : backward_;
  }
  int pending(const SearchState& s) const { return grads_before_[s.backward] - s.weight_grads; }
  int lead(const SearchState& s) const { return s.rebuilds - needed_before_[s.backward]; }
  bool rebuild_allowed(const SearchState& state) const;
  bool comm_turn(ItemKind kind, const SearchState& state) const;
  bool within_cut(ItemKind kind, const SearchState& state) const;
  bool comm_enables_fillers(const SearchState& state) const;
  int64_t next_compute_ns(const SearchState& state, const int64_t* label) const;
  void add_chain_candidate(ItemKind kind, const SearchState& state, const int64_t* label,
                           Candidate* list, int& size) const;
  void add_filler_candidates(const SearchState& state, const int64_t* label, Candidate* list,
                             int& size) const;

  void issue_forward(int index, int64_t* label) const;
  void issue_backward(const SearchState& state, int64_t* label) const;
  void issue_weight_grad(int index, int64_t* label) const;
  void issue_rebuild(const SearchState& state, int64_t* label) const;
  void synchronise(int64_t end_ns, int64_t* label) const;

  void raise_chains(const SearchState& state, int64_t* label) const;
  void raise_comm(const SearchState& state, int64_t* label) const;
  void raise_compute(const SearchState& state, int64_t* label) const;
  void raise_copies(const SearchState& state, int64_t* label) const;
  void raise_slots(const SearchState& state, int64_t* label) const;

  size_t width_ = kSlots;
  size_t states_ = 0;
  int lag_ = 0;
  int lead_limit_ = 0;
  int pending_size_ = 1;
  int lead_size_ = 1;
  Chain forward_;
  Chain backward_;
  bool turns_given_ = false;
  std::vector<ItemKind> turns_;         ///< chain of each communication operator, if given
  std::vector<int64_t> turn_start_ns_;  ///< sum of the ones before

  std::vector<int64_t> grad_ns_;
  std::vector<int> grad_of_;               ///< by weight gradient: its backward operator
  std::vector<int> grads_before_;          ///< by backward prefix
  std::vector<int64_t> rebuild_start_ns_;  ///< prefix sums
  std::vector<int> rebuild_of_;            ///< by rebuild: its backward operator
  std::vector<int> needed_before_;         ///< by backward prefix: rebuilds of operators before
  std::vector<int> needed_until_;          ///< and of the next operator itself
  // Communication operators of the backward with weight gradients (rebuilds), numbered; their ends
  // (those of the rebuilds) are kept in a ring of slots. -1: none.
  std::vector<int> grad_group_;
  std::vector<int> rebuild_group_;
  int grad_ring_ = 0;
  int rebuild_ring_ = 0;
  size_t grad_slots_ = 0;
  size_t rebuild_slots_ = 0;

  std::vector<int64_t> out_ns_;
  std::vector<int> out_source_;
  std::vector<int64_t> out_rest_ns_;  ///< by copy: from its start to the end of the schedule
  std::vector<int> outs_before_;      ///< by forward prefix: copies of operators before
  std::vector<size_t> out_slot_;      ///< by copy; 0: nothing waits
  std::vector<Token> out_tokens_;
  std::vector<Range> out_live_;  ///< by forward prefix

  std::vector<int64_t> in_ns_;
  std::vector<int> in_source_;
  std::vector<int64_t> in_rest_ns_;
  std::vector<int> ins_before_;               ///< by backward prefix: copies that may be issued
  int64_t static_in_ns_ = 0;                  ///< copies that wait for nothing run first
  std::vector<int64_t> backward_release_ns_;  ///< when those let a backward operator start
  std::vector<int64_t> rebuild_release_ns_;
  std::vector<int> rebuild_token_;  ///< by rebuild: last token that it waits for, or -1
  std::vector<int> rebuild_opens_;  ///< by rebuild: backward prefix that issues its copies
  std::vector<Token> in_tokens_;    ///< of copies that wait for an operator
  std::vector<Range> in_live_;      ///< by backward prefix: those that may be live

  std::vector<Job> jobs_;            ///< on compute, longest tail first
  std::vector<int> forward_limit_;   ///< by backward prefix
  std::vector<int> backward_limit_;  ///< by forward prefix
};

}  // namespace bagualu
