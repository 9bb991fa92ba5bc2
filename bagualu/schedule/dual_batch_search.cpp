#include "bagualu/schedule/dual_batch_search.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int kNone = -1;

}  // namespace

int64_t DualBatchSearch::now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool DualBatchSearch::prepare(const DualBatchInstance& instance, const PrecedenceTimes& times,
                              size_t most_states) {
  model_.build(instance, times);
  if (model_.states() > most_states) return false;
  compute_rest_.assign(model_.states(), -1);
  return true;
}

void DualBatchSearch::begin_pass() {
  heads_.assign(model_.states(), kNone);
  used_ = 0;
  placed_ = next_look_ = 0;
  last_ = kNone;
  outcome_ = {};
  outcome_.discarded_bound_ns = std::numeric_limits<int64_t>::max();
  outcome_.complete = true;
}

int DualBatchSearch::add_node(int parent, ItemKind kind) {
  const size_t width = model_.width();
  if (nodes_.size() == static_cast<size_t>(used_)) {
    const size_t more = std::max<size_t>(1024, nodes_.size() * 2);
    nodes_.resize(more);
    labels_.resize(more * width);
  }
  if (labels_.size() < nodes_.size() * width) labels_.resize(nodes_.size() * width);
  nodes_[static_cast<size_t>(used_)] = {0, parent, kNone, kind};
  return used_++;
}

SearchOutcome DualBatchSearch::pass(const SearchLimits& limits) {
  limits_ = limits;
  begin_pass();
  const int root = add_node(kNone, ItemKind::kForward);
  model_.first(label(root));
  place({}, root);
  for (size_t index = 0; index < heads_.size() && outcome_.complete; ++index) {
    if (heads_[index] == kNone) continue;
    gather(index);
    visit(model_.state_at(index));
  }
  outcome_.labels = placed_;
  return outcome_;
}

void DualBatchSearch::discard(int64_t bound_ns) {
  outcome_.discarded_bound_ns = std::min(outcome_.discarded_bound_ns, bound_ns);
}

// The state's labels, least bound first; beyond the beam they are discarded.
void DualBatchSearch::gather(size_t index) {
  entries_.clear();
  for (int node = heads_[index]; node != kNone; node = nodes_[static_cast<size_t>(node)].next) {
    entries_.push_back({nodes_[static_cast<size_t>(node)].bound_ns, node});
  }
  if (entries_.size() > 1) {
    std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
      return a.bound_ns != b.bound_ns ? a.bound_ns < b.bound_ns : a.node < b.node;
    });
  }
  const size_t beam = static_cast<size_t>(limits_.beam);
  if (beam == 0 || entries_.size() <= beam) return;
  if (entries_[beam].bound_ns < limits_.below_ns) outcome_.truncated = true;
  discard(entries_[beam].bound_ns);
  entries_.resize(beam);
}

void DualBatchSearch::visit(const SearchState& state) {
  for (const Entry& entry : entries_) {
    if (entry.bound_ns >= limits_.below_ns) {
      discard(entry.bound_ns);
      continue;
    }
    if (out_of_limits()) {
      outcome_.complete = false;
      return;
    }
    expand(state, entry.node);
  }
}

bool DualBatchSearch::out_of_limits() {
  if (placed_ >= limits_.max_labels) return true;
  // A look at the clock costs as much as half a label.
  constexpr int kLabelsPerLook = 64;
  if (limits_.deadline_at_ns == 0 || placed_ < next_look_) return false;
  next_look_ = placed_ + kLabelsPerLook;
  return now_ns() >= limits_.deadline_at_ns;
}

void DualBatchSearch::expand(const SearchState& state, int node) {
  const unsigned moves = model_.moves(state, label(node));
  for (unsigned k = 0; k < 4; ++k) {
    if ((moves & (1u << k)) == 0) continue;
    const ItemKind kind = static_cast<ItemKind>(k);
    const int child = add_node(node, kind);
    std::copy_n(label(node), model_.width(), label(child));
    SearchState next = state;
    model_.advance(kind, next, label(child));
    place(next, child);
  }
}

// Settles a new label and files it under its state, or drops it.
void DualBatchSearch::place(const SearchState& state, int node) {
  ++placed_;
  SearchState settled = state;
  int64_t* own = label(node);
  model_.settle(settled, own);
  const size_t index = model_.state_index(settled);
  int64_t& rest = compute_rest_[index];
  if (rest < 0) rest = model_.compute_rest_ns(settled);
  const int64_t bound = model_.bound_ns(settled, own, rest);
  nodes_[static_cast<size_t>(node)].bound_ns = bound;
  if (bound >= limits_.below_ns) {
    discard(bound);
    --used_;
    return;
  }
  if (model_.is_last(settled)) {
    limits_.below_ns = bound;
    outcome_.found = true;
    outcome_.makespan_ns = bound;
    last_ = node;
    return;
  }
  if (!insert(index, node)) --used_;
}

// Keeps only labels that no other one of the state is at most in every entry.
bool DualBatchSearch::insert(size_t index, int node) {
  const size_t width = model_.width();
  const int64_t* own = label(node);
  int* link = &heads_[index];
  while (*link != kNone) {
    Node& other = nodes_[static_cast<size_t>(*link)];
    const int64_t* theirs = label(*link);
    bool own_less = false;
    bool theirs_less = false;
    for (size_t k = 0; k < width; ++k) {
      own_less = own_less || own[k] < theirs[k];
      theirs_less = theirs_less || theirs[k] < own[k];
      if (own_less && theirs_less) break;
    }
    if (!own_less) return false;
    if (theirs_less) {
      link = &other.next;
    } else {
      *link = other.next;
    }
  }
  nodes_[static_cast<size_t>(node)].next = kNone;
  *link = node;
  return true;
}

void DualBatchSearch::write_order(std::vector<ScheduleItem>& order) const {
  BGL_CHECK(last_ != kNone);
  std::vector<ItemKind> moves;
  for (int node = last_; nodes_[static_cast<size_t>(node)].parent != kNone;
       node = nodes_[static_cast<size_t>(node)].parent) {
    moves.push_back(nodes_[static_cast<size_t>(node)].kind);
  }
  order.clear();
  SearchState state;
  const auto emit = [&](ItemKind kind) {
    const int next[] = {state.forward, state.backward, state.weight_grads, state.rebuilds};
    order.push_back({kind, next[static_cast<int>(kind)]});
    LabelModel::count(kind, state);
  };
  const auto settle = [&] {
    ItemKind kind;
    while (model_.automatic(state, kind)) emit(kind);
  };
  settle();
  for (size_t m = moves.size(); m-- > 0;) {
    emit(moves[m]);
    settle();
  }
}

}  // namespace bagualu
