#include <algorithm>

#include "bagualu/schedule/dual_batch_label.h"

namespace bagualu {
namespace {

template <class T>
int count_of(const std::vector<T>& items) {
  return static_cast<int>(items.size());
}

}  // namespace

void LabelModel::build(const DualBatchInstance& instance, const PrecedenceTimes& times) {
  width_ = kSlots;
  lag_ = instance.weight_lag;
  lead_limit_ = instance.rebuild_lead;
  build_chain(instance.forward, ItemKind::kForward, times, forward_);
  build_chain(instance.backward, ItemKind::kBackward, times, backward_);
  build_turns(instance);
  build_fillers(instance);
  build_copies_out(instance);
  build_copies_in(instance);
  build_jobs(instance, times);
  out_rest_ns_.clear();
  for (int k = 0; k < count_of(out_ns_); ++k) {
    out_rest_ns_.push_back(out_ns_[k] + times.tail_ns(times.copy_out(k)));
  }
  in_rest_ns_.clear();
  for (int k = 0; k < count_of(in_ns_); ++k) {
    in_rest_ns_.push_back(in_ns_[k] + times.tail_ns(times.copy_in(k)));
  }
  states_ = static_cast<size_t>(forward_.size + 1) * static_cast<size_t>(backward_.size + 1) *
            static_cast<size_t>(pending_size_) * static_cast<size_t>(lead_size_);
  set_cuts({});
}

void LabelModel::build_chain(const std::vector<ChainOp>& ops, ItemKind kind,
                             const PrecedenceTimes& times, Chain& chain) const {
  const int size = count_of(ops);
  const size_t ends = ops.size() + 1;
  chain.size = size;
  chain.ns.resize(ops.size());
  chain.comm.resize(ops.size());
  chain.sync.resize(ops.size());
  chain.start_ns.assign(ends, 0);
  chain.comm_before.assign(ends, 0);
  chain.next_compute.assign(ends, size);
  chain.next_comm.assign(ends, size);
  chain.rest_ns.assign(ends, 0);
  chain.comm_left_ns.assign(ends, 0);
  for (int i = 0; i < size; ++i) {
    chain.ns[i] = ops[i].ns;
    chain.comm[i] = ops[i].resource == Resource::kComm;
    chain.sync[i] = ops[i].host_sync;
    chain.start_ns[i + 1] = chain.start_ns[i] + ops[i].ns;
    chain.comm_before[i + 1] = chain.comm_before[i] + chain.comm[i];
    chain.rest_ns[i] = ops[i].ns + times.tail_ns(times.node(kind, i));
  }
  for (int i = size; i-- > 0;) {
    chain.next_compute[i] = chain.comm[i] ? chain.next_compute[i + 1] : i;
    chain.comm_left_ns[i] = chain.comm_left_ns[i + 1] + (chain.comm[i] ? chain.ns[i] : 0);
    chain.next_comm[i] = chain.comm[i] ? i : chain.next_comm[i + 1];
  }
}

void LabelModel::build_turns(const DualBatchInstance& instance) {
  const int forward_comm = forward_.comm_before[forward_.size];
  const int backward_comm = backward_.comm_before[backward_.size];
  turns_.clear();
  turns_given_ = !instance.comm_order.empty() || forward_comm == 0 || backward_comm == 0;
  turn_start_ns_.assign(1, 0);
  forward_.comm_turn.assign(static_cast<size_t>(forward_.size), 0);
  backward_.comm_turn.assign(static_cast<size_t>(backward_.size), 0);
  if (!turns_given_) return;
  const auto add = [&](ItemKind kind, int index) {
    Chain& own = kind == ItemKind::kForward ? forward_ : backward_;
    own.comm_turn[index] = count_of(turns_);
    turns_.push_back(kind);
    turn_start_ns_.push_back(turn_start_ns_.back() + own.ns[index]);
  };
  if (!instance.comm_order.empty()) {
    for (const ScheduleItem& item : instance.comm_order) add(item.kind, item.index);
    return;
  }
  for (int i = 0; i < forward_.size; ++i) {
    if (forward_.comm[i]) add(ItemKind::kForward, i);
  }
  for (int j = 0; j < backward_.size; ++j) {
    if (backward_.comm[j]) add(ItemKind::kBackward, j);
  }
}

// `count` consecutive slots; the first one's position.
size_t LabelModel::add_slots(int count) {
  const size_t first = width_;
  width_ += static_cast<size_t>(count);
  return first;
}

void LabelModel::build_fillers(const DualBatchInstance& instance) {
  const int grads = count_of(instance.weight_grads);
  const int rebuilds = count_of(instance.rebuilds);
  const size_t ends = static_cast<size_t>(backward_.size) + 1;
  grad_ns_.clear();
  for (const WeightGradFiller& grad : instance.weight_grads) grad_ns_.push_back(grad.ns);
  rebuild_start_ns_.assign(1, 0);
  for (const RebuildFiller& rebuild : instance.rebuilds) {
    rebuild_start_ns_.push_back(rebuild_start_ns_.back() + rebuild.ns);
  }
  grads_before_.assign(ends, 0);
  needed_before_.assign(ends, 0);
  needed_until_.assign(ends, 0);
  int most_grads = 0;
  int most_rebuilds = lead_limit_;
  int grad_groups = 0;
  int rebuild_groups = 0;
  grad_group_.assign(ends, -1);
  rebuild_group_.assign(ends, -1);
  for (int j = 0, w = 0, r = 0; j <= backward_.size; ++j) {
    grads_before_[j] = w;
    needed_before_[j] = r;
    if (j == backward_.size) {
      needed_until_[j] = r;
      break;
    }
    while (w < grads && instance.weight_grads[w].after_backward == j) ++w;
    while (r < rebuilds && instance.rebuilds[r].before_backward == j) ++r;
    needed_until_[j] = r;
    most_grads = std::max(most_grads, w - grads_before_[j]);
    most_rebuilds = std::max(most_rebuilds, r - needed_before_[j]);
    // On one stream the order says it all; only communication needs the other item's end.
    if (backward_.comm[j] && w > grads_before_[j]) grad_group_[j] = grad_groups++;
    if (backward_.comm[j] && r > needed_before_[j]) rebuild_group_[j] = rebuild_groups++;
  }
  pending_size_ = std::min(lag_ + most_grads, grads) + 1;
  lead_size_ = std::min(most_rebuilds, rebuilds) + 1;
  grad_ring_ = std::min(grad_groups, pending_size_);
  rebuild_ring_ = std::min(rebuild_groups, lead_size_);
  grad_slots_ = add_slots(grad_ring_);
  rebuild_slots_ = add_slots(rebuild_ring_);
  grad_of_.clear();
  for (const WeightGradFiller& grad : instance.weight_grads)
    grad_of_.push_back(grad.after_backward);
  rebuild_of_.clear();
  for (const RebuildFiller& rebuild : instance.rebuilds) {
    rebuild_of_.push_back(rebuild.before_backward);
  }
}

void LabelModel::build_copies_out(const DualBatchInstance& instance) {
  const int copies = count_of(instance.copies_out);
  const size_t ends = static_cast<size_t>(forward_.size) + 1;
  out_ns_.clear();
  out_source_.clear();
  for (const CopyOut& copy : instance.copies_out) {
    out_ns_.push_back(copy.ns);
    out_source_.push_back(copy.source_forward);
  }
  outs_before_.assign(ends, 0);
  for (int i = 0, k = 0; i <= forward_.size; ++i) {
    outs_before_[i] = k;
    while (k < copies && out_source_[k] == i) ++k;
  }
  // A copy whose operator waits for a later copy anyhow needs no entry of its own.
  out_tokens_.clear();
  int sooner = forward_.size;
  for (int k = copies; k-- > 0;) {
    const int waiting = instance.copies_out[k].releases_for_forward;
    if (waiting < 0 || waiting >= sooner) continue;
    sooner = waiting;
    out_tokens_.push_back({k, out_source_[k], waiting, -1, 0});
  }
  std::reverse(out_tokens_.begin(), out_tokens_.end());
  out_live_.assign(ends, {});
  int most = 0;
  for (int i = 0, begin = 0, end = 0; i <= forward_.size; ++i) {
    while (end < count_of(out_tokens_) && out_tokens_[end].source < i) ++end;
    while (begin < end && out_tokens_[begin].waiting < i) ++begin;
    out_live_[i] = {begin, end};
    most = std::max(most, end - begin);
  }
  const size_t first = add_slots(most);
  out_slot_.assign(static_cast<size_t>(copies), 0);
  for (int t = 0; t < count_of(out_tokens_); ++t) {
    out_tokens_[t].slot = first + static_cast<size_t>(t % most);
    out_slot_[out_tokens_[t].copy] = out_tokens_[t].slot;
  }
}

void LabelModel::build_copies_in(const DualBatchInstance& instance) {
  const int copies = count_of(instance.copies_in);
  const size_t ends = static_cast<size_t>(backward_.size) + 1;
  in_ns_.clear();
  in_tokens_.clear();
  static_in_ns_ = 0;
  backward_release_ns_.assign(ends, 0);
  rebuild_release_ns_.assign(instance.rebuilds.size(), 0);
  rebuild_token_.assign(instance.rebuilds.size(), -1);
  rebuild_opens_.assign(instance.rebuilds.size(), 0);
  ins_before_.assign(ends, 0);
  in_source_.clear();
  for (int k = 0; k < copies; ++k) {
    const CopyIn& copy = instance.copies_in[k];
    in_ns_.push_back(copy.ns);
    in_source_.push_back(copy.not_before_backward);
    const int rebuild = copy.wanted_by_rebuild;
    if (copy.not_before_backward >= 0) {
      if (rebuild >= 0) {
        rebuild_token_[rebuild] = count_of(in_tokens_);
        rebuild_opens_[rebuild] = copy.not_before_backward + 1;
      }
      in_tokens_.push_back({k, copy.not_before_backward, copy.wanted_by_backward, rebuild, 0});
      continue;
    }
    static_in_ns_ += copy.ns;
    backward_release_ns_[copy.wanted_by_backward] = static_in_ns_;
    if (rebuild >= 0) rebuild_release_ns_[rebuild] = static_in_ns_;
  }
  for (int j = 0, k = 0; j <= backward_.size; ++j) {
    while (k < copies && in_source_[k] < j) ++k;
    ins_before_[j] = k;
  }
  in_live_.assign(ends, {});
  int most = 0;
  for (int j = 0; j <= backward_.size; ++j) {
    Range& live = in_live_[j];
    for (int t = 0; t < count_of(in_tokens_); ++t) {
      const Token& token = in_tokens_[t];
      const int rebuild_until = token.rebuild < 0 ? -1 : rebuild_of_[token.rebuild];
      if (token.source >= j || std::max(token.waiting, rebuild_until) < j) continue;
      if (live.end == 0) live.begin = t;
      live.end = t + 1;
    }
    most = std::max(most, live.end - live.begin);
  }
  const size_t first = add_slots(most);
  for (int t = 0; t < count_of(in_tokens_); ++t) {
    in_tokens_[t].slot = first + static_cast<size_t>(t % most);
  }
}

void LabelModel::build_jobs(const DualBatchInstance& instance, const PrecedenceTimes& times) {
  jobs_.clear();
  const auto add = [&](ItemKind kind, int size) {
    for (int index = 0; index < size; ++index) {
      const int node = times.node(kind, index);
      if (times.resource(node) != Resource::kCompute) continue;
      jobs_.push_back({kind, index, times.ns(node), times.tail_ns(node)});
    }
  };
  add(ItemKind::kForward, forward_.size);
  add(ItemKind::kBackward, backward_.size);
  add(ItemKind::kWeightGrad, count_of(instance.weight_grads));
  add(ItemKind::kRebuild, count_of(instance.rebuilds));
  std::stable_sort(jobs_.begin(), jobs_.end(),
                   [](const Job& a, const Job& b) { return a.tail_ns > b.tail_ns; });
}

void LabelModel::set_cuts(const std::vector<Cut>& cuts) {
  forward_limit_.assign(static_cast<size_t>(backward_.size) + 1, forward_.size);
  backward_limit_.assign(static_cast<size_t>(forward_.size) + 1, backward_.size);
  for (size_t c = cuts.size(); c-- > 0;) {
    for (int j = 0; j < cuts[c].backward; ++j) forward_limit_[j] = cuts[c].forward;
    for (int i = 0; i < cuts[c].forward; ++i) backward_limit_[i] = cuts[c].backward;
  }
}

}  // namespace bagualu
