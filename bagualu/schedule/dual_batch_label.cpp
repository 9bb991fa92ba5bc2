#include "bagualu/schedule/dual_batch_label.h"

#include <algorithm>
#include <limits>

namespace bagualu {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

void raise(int64_t& time, int64_t to) { time = std::max(time, to); }

unsigned bit(ItemKind kind) { return 1u << static_cast<unsigned>(kind); }

}  // namespace

void LabelModel::count(ItemKind kind, SearchState& state) {
  switch (kind) {
    case ItemKind::kForward:
      ++state.forward;
      return;
    case ItemKind::kBackward:
      ++state.backward;
      return;
    case ItemKind::kWeightGrad:
      ++state.weight_grads;
      return;
    case ItemKind::kRebuild:
      ++state.rebuilds;
      return;
  }
}

size_t LabelModel::state_index(const SearchState& state) const {
  // Fewer pending weight gradients come later, as fewer are left.
  const int issued = pending_size_ - 1 - pending(state);
  return static_cast<size_t>(
      ((state.forward * (backward_.size + 1) + state.backward) * pending_size_ + issued) *
          lead_size_ +
      lead(state));
}

SearchState LabelModel::state_at(size_t index) const {
  int rest = static_cast<int>(index);
  const int lead = rest % lead_size_;
  rest /= lead_size_;
  const int pending = pending_size_ - 1 - rest % pending_size_;
  rest /= pending_size_;
  const int j = rest % (backward_.size + 1);
  return {rest / (backward_.size + 1), j, grads_before_[j] - pending, needed_before_[j] + lead};
}

bool LabelModel::is_last(const SearchState& state) const {
  return state.forward == forward_.size && state.backward == backward_.size &&
         state.weight_grads == static_cast<int>(grad_ns_.size()) &&
         state.rebuilds == static_cast<int>(rebuild_of_.size());
}

void LabelModel::first(int64_t* label) const {
  std::fill_n(label, width_, 0);
  label[kH2d] = static_in_ns_;
}

bool LabelModel::rebuild_allowed(const SearchState& state) const {
  const int r = state.rebuilds;
  if (r >= static_cast<int>(rebuild_of_.size()) || rebuild_opens_[r] > state.backward) return false;
  return lead(state) < lead_limit_ || rebuild_of_[r] == state.backward;
}

// Whether the next operator of the chain exists, is communication and may be the next one of it.
bool LabelModel::comm_turn(ItemKind kind, const SearchState& state) const {
  const bool forward = kind == ItemKind::kForward;
  const Chain& own = chain(kind);
  const int index = forward ? state.forward : state.backward;
  if (index >= own.size || !own.comm[index] || !within_cut(kind, state)) return false;
  if (!forward && needed_until_[index] > state.rebuilds) return false;
  return !turns_given_ || own.comm_turn[index] == forward_.comm_before[state.forward] +
                                                      backward_.comm_before[state.backward];
}

bool LabelModel::within_cut(ItemKind kind, const SearchState& state) const {
  return kind == ItemKind::kForward ? state.forward < forward_limit_[state.backward]
                                    : state.backward < backward_limit_[state.forward];
}

bool LabelModel::automatic(const SearchState& state, ItemKind& kind) const {
  if (!turns_given_ || pending(state) > lag_) return false;
  const size_t turn = static_cast<size_t>(forward_.comm_before[state.forward] +
                                          backward_.comm_before[state.backward]);
  if (turn >= turns_.size()) return false;
  kind = turns_[turn];
  if (!comm_turn(kind, state)) return false;
  if (kind == ItemKind::kForward) return !forward_.sync[state.forward];
  // More pending weight gradients than the lag would force one now.
  return !backward_.sync[state.backward] &&
         grads_before_[state.backward + 1] - state.weight_grads <= lag_;
}

// Whether more fillers may be issued before the backward's next compute operator than now.
bool LabelModel::comm_enables_fillers(const SearchState& state) const {
  const int j = state.backward;
  const int b = backward_.next_compute[j];
  return b > j && (state.rebuilds < static_cast<int>(rebuild_of_.size()) ||
                   grads_before_[b] > grads_before_[j]);
}

int64_t LabelModel::next_compute_ns(const SearchState& state, const int64_t* label) const {
  int64_t next = kNever;
  const int f = forward_.next_compute[state.forward];
  if (f < forward_.size) {
    next = label[kForwardNext] + forward_.start_ns[f] - forward_.start_ns[state.forward];
  }
  const int b = backward_.next_compute[state.backward];
  if (b < backward_.size) {
    next = std::min(
        next, label[kBackwardNext] + backward_.start_ns[b] - backward_.start_ns[state.backward]);
  }
  return next;
}

void LabelModel::add_chain_candidate(ItemKind kind, const SearchState& state, const int64_t* label,
                                     Candidate* list, int& size) const {
  const bool forward = kind == ItemKind::kForward;
  const Chain& own = chain(kind);
  const int index = forward ? state.forward : state.backward;
  if (index >= own.size || own.comm[index] || !within_cut(kind, state)) return;
  bool blocks = !own.sync[index];
  if (!forward) {
    if (needed_until_[index] > state.rebuilds) return;
    blocks = blocks && grads_before_[index + 1] - state.weight_grads <= lag_;
  }
  const int64_t start = label[forward ? kForwardNext : kBackwardNext];
  list[size++] = {kind, start, start + own.ns[index], blocks};
}

void LabelModel::add_filler_candidates(const SearchState& state, const int64_t* label,
                                       Candidate* list, int& size) const {
  if (pending(state) > 0) {
    const int w = state.weight_grads;
    int64_t start = label[kCompute];
    const int group = grad_group_[grad_of_[w]];
    if (group >= 0) start = std::max(start, label[grad_slots_ + group % grad_ring_]);
    list[size++] = {ItemKind::kWeightGrad, start, start + grad_ns_[w], true};
  }
  if (rebuild_allowed(state)) {
    const int r = state.rebuilds;
    int64_t start = std::max(label[kCompute], rebuild_release_ns_[r]);
    const int token = rebuild_token_[r];
    if (token >= 0) start = std::max(start, label[in_tokens_[token].slot]);
    const int64_t end = start + rebuild_start_ns_[r + 1] - rebuild_start_ns_[r];
    list[size++] = {ItemKind::kRebuild, start, end, true};
  }
}

unsigned LabelModel::moves(const SearchState& state, const int64_t* label) const {
  if (pending(state) > lag_) return bit(ItemKind::kWeightGrad);
  Candidate list[4];
  int size = 0;
  add_filler_candidates(state, label, list, size);
  const int fillers = size;
  // A filler that fits before any chain can use the stream is put there, one kind or another.
  // Not so where communication, issued first, would let one more filler in.
  const bool comm_next =
      comm_turn(ItemKind::kForward, state) || comm_turn(ItemKind::kBackward, state);
  bool fits = false;
  if (!comm_next || !comm_enables_fillers(state)) {
    const int64_t chains_ns = next_compute_ns(state, label);
    for (int c = 0; c < fillers; ++c) fits = fits || list[c].end_ns <= chains_ns;
  }
  if (!fits) {
    add_chain_candidate(ItemKind::kForward, state, label, list, size);
    add_chain_candidate(ItemKind::kBackward, state, label, list, size);
  }
  // An item that could only start when another one, put before it, would be over is not next.
  int soonest = -1;
  for (int c = 0; c < size; ++c) {
    if (list[c].blocks && (soonest < 0 || list[c].end_ns < list[soonest].end_ns)) soonest = c;
  }
  unsigned allowed = 0;
  for (int c = 0; c < size; ++c) {
    if (soonest < 0 || c == soonest || list[c].start_ns < list[soonest].end_ns) {
      allowed |= bit(list[c].kind);
    }
  }
  if (fits || !comm_next) return allowed;
  if (comm_turn(ItemKind::kForward, state)) allowed |= bit(ItemKind::kForward);
  if (comm_turn(ItemKind::kBackward, state)) allowed |= bit(ItemKind::kBackward);
  return allowed;
}

void LabelModel::synchronise(int64_t end_ns, int64_t* label) const {
  for (size_t r = kCompute; r <= kH2d; ++r) raise(label[r], end_ns);
}

void LabelModel::issue_forward(int index, int64_t* label) const {
  const int64_t end = label[kForwardNext] + forward_.ns[index];
  label[forward_.comm[index] ? kComm : kCompute] = end;
  label[kForwardNext] = end;
  if (forward_.sync[index]) synchronise(end, label);
  for (int k = outs_before_[index]; k < outs_before_[index + 1]; ++k) {
    label[kD2h] = std::max(label[kD2h], end) + out_ns_[k];
    if (out_slot_[k] > 0) label[out_slot_[k]] = label[kD2h];
  }
}

void LabelModel::issue_backward(const SearchState& state, int64_t* label) const {
  const int index = state.backward;
  const int64_t end = label[kBackwardNext] + backward_.ns[index];
  label[backward_.comm[index] ? kComm : kCompute] = end;
  label[kBackwardNext] = end;
  if (backward_.sync[index]) synchronise(end, label);
  if (grad_group_[index] >= 0) label[grad_slots_ + grad_group_[index] % grad_ring_] = end;
  const Range before = in_live_[index];
  for (int t = before.begin; t < before.end; ++t) {
    const Token& token = in_tokens_[t];
    if (token.waiting == index && token.rebuild < state.rebuilds) label[token.slot] = 0;
  }
  const Range live = in_live_[index + 1];
  int t = live.begin;
  for (int k = ins_before_[index]; k < ins_before_[index + 1]; ++k) {
    if (in_source_[k] < 0) continue;  // ran first
    label[kH2d] = std::max(label[kH2d], end) + in_ns_[k];
    while (t < live.end && in_tokens_[t].copy < k) ++t;
    if (t < live.end && in_tokens_[t].copy == k) label[in_tokens_[t].slot] = label[kH2d];
  }
}

void LabelModel::issue_weight_grad(int index, int64_t* label) const {
  const int group = grad_group_[grad_of_[index]];
  if (group >= 0) {
    int64_t& slot = label[grad_slots_ + group % grad_ring_];
    raise(label[kCompute], slot);
    if (index + 1 == grads_before_[grad_of_[index] + 1]) slot = 0;
  }
  label[kCompute] += grad_ns_[index];
}

void LabelModel::issue_rebuild(const SearchState& state, int64_t* label) const {
  const int index = state.rebuilds;
  raise(label[kCompute], rebuild_release_ns_[index]);
  const int token = rebuild_token_[index];
  if (token >= 0) raise(label[kCompute], label[in_tokens_[token].slot]);
  label[kCompute] += rebuild_start_ns_[index + 1] - rebuild_start_ns_[index];
  for (int t = token; t >= 0 && in_tokens_[t].rebuild == index; --t) {
    if (in_tokens_[t].waiting < state.backward) label[in_tokens_[t].slot] = 0;
  }
  const int wanted = rebuild_of_[index];
  if (rebuild_group_[wanted] >= 0 && index + 1 == needed_until_[wanted]) {
    label[rebuild_slots_ + rebuild_group_[wanted] % rebuild_ring_] = label[kCompute];
  }
}

void LabelModel::advance(ItemKind kind, SearchState& state, int64_t* label) const {
  switch (kind) {
    case ItemKind::kForward:
      issue_forward(state.forward, label);
      break;
    case ItemKind::kBackward:
      issue_backward(state, label);
      break;
    case ItemKind::kWeightGrad:
      issue_weight_grad(state.weight_grads, label);
      break;
    case ItemKind::kRebuild:
      issue_rebuild(state, label);
      break;
  }
  count(kind, state);
}

void LabelModel::settle(SearchState& state, int64_t* label) const {
  raise_chains(state, label);
  ItemKind kind;
  while (automatic(state, kind)) {
    advance(kind, state, label);
    raise_chains(state, label);
  }
  raise_comm(state, label);
  raise_compute(state, label);
  raise_copies(state, label);
  raise_slots(state, label);
}

void LabelModel::raise_chains(const SearchState& state, int64_t* label) const {
  const int i = state.forward;
  if (i < forward_.size) {
    raise(label[kForwardNext], label[forward_.comm[i] ? kComm : kCompute]);
    const Range live = out_live_[i];
    if (live.begin < live.end && out_tokens_[live.begin].waiting == i) {
      int64_t& slot = label[out_tokens_[live.begin].slot];
      raise(label[kForwardNext], slot);
      slot = 0;
    }
  } else {
    label[kForwardNext] = 0;
  }
  const int j = state.backward;
  if (j >= backward_.size) {
    label[kBackwardNext] = 0;
    return;
  }
  raise(label[kBackwardNext], label[backward_.comm[j] ? kComm : kCompute]);
  raise(label[kBackwardNext], backward_release_ns_[j]);
  const int missing = needed_until_[j] - state.rebuilds;
  if (missing > 0) {
    raise(label[kBackwardNext], label[kCompute] + rebuild_start_ns_[needed_until_[j]] -
                                    rebuild_start_ns_[state.rebuilds]);
  } else if (rebuild_group_[j] >= 0) {
    int64_t& slot = label[rebuild_slots_ + rebuild_group_[j] % rebuild_ring_];
    raise(label[kBackwardNext], slot);
    slot = 0;
  }
  const Range live = in_live_[j];
  for (int t = live.begin; t < live.end; ++t) {
    const Token& token = in_tokens_[t];
    if (token.waiting != j) continue;
    raise(label[kBackwardNext], label[token.slot]);
    if (token.rebuild < state.rebuilds) label[token.slot] = 0;
  }
}

// The comm stream is not used before the chain whose turn it is gets there, and who waits for its
// turn waits for those before.
void LabelModel::raise_comm(const SearchState& state, int64_t* label) const {
  const int i = state.forward;
  const int j = state.backward;
  const int f = forward_.next_comm[i];
  const int b = backward_.next_comm[j];
  const int64_t f_ns = f < forward_.size
                           ? label[kForwardNext] + forward_.start_ns[f] - forward_.start_ns[i]
                           : kNever;
  const int64_t b_ns = b < backward_.size
                           ? label[kBackwardNext] + backward_.start_ns[b] - backward_.start_ns[j]
                           : kNever;
  if (f_ns == kNever && b_ns == kNever) return;
  if (!turns_given_) {
    raise(label[kComm], std::min(f_ns, b_ns));
    if (f == i) raise(label[kForwardNext], label[kComm]);
    if (b == j) raise(label[kBackwardNext], label[kComm]);
    return;
  }
  const int turn = forward_.comm_before[i] + backward_.comm_before[j];
  raise(label[kComm], turns_[turn] == ItemKind::kForward ? f_ns : b_ns);
  if (f == i && f < forward_.size) {
    raise(label[kForwardNext],
          label[kComm] + turn_start_ns_[forward_.comm_turn[f]] - turn_start_ns_[turn]);
  }
  if (b == j && b < backward_.size) {
    raise(label[kBackwardNext],
          label[kComm] + turn_start_ns_[backward_.comm_turn[b]] - turn_start_ns_[turn]);
  }
}

void LabelModel::raise_compute(const SearchState& state, int64_t* label) const {
  if (pending(state) > 0 || rebuild_allowed(state) || comm_enables_fillers(state)) return;
  const int64_t next = next_compute_ns(state, label);
  if (next == kNever) return;  // only what nothing needs is left, or nothing
  raise(label[kCompute], next);
  const int i = state.forward;
  const int j = state.backward;
  if (i < forward_.size && !forward_.comm[i]) raise(label[kForwardNext], label[kCompute]);
  if (j < backward_.size && !backward_.comm[j]) raise(label[kBackwardNext], label[kCompute]);
}

// A stream that nothing will use ends, as far as the makespan can tell, when the last one does.
void LabelModel::raise_copies(const SearchState& state, int64_t* label) const {
  const int i = state.forward;
  const int j = state.backward;
  const int out = outs_before_[i];
  if (out < static_cast<int>(out_ns_.size())) {
    const int source = out_source_[out];
    raise(label[kD2h], label[kForwardNext] + forward_.start_ns[source + 1] - forward_.start_ns[i]);
  }
  const int in = ins_before_[j];
  if (in < static_cast<int>(in_ns_.size())) {
    const int source = in_source_[in];
    raise(label[kH2d],
          label[kBackwardNext] + backward_.start_ns[source + 1] - backward_.start_ns[j]);
  }
  int64_t last = 0;
  for (size_t r = kCompute; r <= kH2d; ++r) last = std::max(last, label[r]);
  if (forward_.next_comm[i] == forward_.size && backward_.next_comm[j] == backward_.size) {
    label[kComm] = last;
  }
  if (out == static_cast<int>(out_ns_.size())) label[kD2h] = last;
  if (in == static_cast<int>(in_ns_.size())) label[kH2d] = last;
  if (is_last(state)) label[kCompute] = last;
}

void LabelModel::raise_slots(const SearchState& state, int64_t* label) const {
  const int i = state.forward;
  const Range outs = out_live_[i];
  for (int t = outs.begin; t < outs.end; ++t) {
    const int waiting = out_tokens_[t].waiting;
    if (waiting == i) continue;
    raise(label[out_tokens_[t].slot],
          label[kForwardNext] + forward_.start_ns[waiting] - forward_.start_ns[i]);
  }
  const int j = state.backward;
  const Range ins = in_live_[j];
  for (int t = ins.begin; t < ins.end; ++t) {
    const Token& token = in_tokens_[t];
    if (token.rebuild >= state.rebuilds || token.waiting <= j) continue;
    raise(label[token.slot],
          label[kBackwardNext] + backward_.start_ns[token.waiting] - backward_.start_ns[j]);
  }
  if (grad_ring_ == 0 || pending(state) == 0) return;
  int last = -1;
  for (int w = state.weight_grads; w < grads_before_[j]; ++w) {
    const int group = grad_group_[grad_of_[w]];
    if (group < 0 || group == last) continue;
    raise(label[grad_slots_ + group % grad_ring_], label[kCompute]);
    last = group;
  }
}

int64_t LabelModel::compute_rest_ns(const SearchState& state) const {
  const int issued[] = {state.forward, state.backward, state.weight_grads, state.rebuilds};
  int64_t load = 0;
  int64_t rest = 0;
  for (const Job& job : jobs_) {
    if (job.index < issued[static_cast<int>(job.kind)]) continue;
    load += job.ns;
    rest = std::max(rest, load + job.tail_ns);
  }
  return rest;
}

int64_t LabelModel::bound_ns(const SearchState& state, const int64_t* label,
                             int64_t compute_rest) const {
  int64_t bound =
      std::max({label[kCompute] + compute_rest, label[kComm], label[kD2h], label[kH2d]});
  raise(bound, label[kForwardNext] + forward_.rest_ns[state.forward]);
  raise(bound, label[kBackwardNext] + backward_.rest_ns[state.backward]);
  const int i = state.forward;
  const int j = state.backward;
  if (turns_given_) {
    const size_t turn = static_cast<size_t>(forward_.comm_before[i] + backward_.comm_before[j]);
    if (turn < turns_.size()) {
      const bool forward = turns_[turn] == ItemKind::kForward;
      raise(bound, label[kComm] + (forward ? forward_.rest_ns[forward_.next_comm[i]]
                                           : backward_.rest_ns[backward_.next_comm[j]]));
    }
  } else {
    raise(bound, label[kComm] + forward_.comm_left_ns[i] + backward_.comm_left_ns[j]);
  }
  const int out = outs_before_[i];
  if (out < static_cast<int>(out_ns_.size())) raise(bound, label[kD2h] + out_rest_ns_[out]);
  const int in = ins_before_[j];
  if (in < static_cast<int>(in_ns_.size())) raise(bound, label[kH2d] + in_rest_ns_[in]);
  return bound;
}

}  // namespace bagualu
