#include "bagualu/schedule/dual_batch_times.h"

#include <algorithm>

namespace bagualu {
namespace {

constexpr size_t kF = static_cast<size_t>(ItemKind::kForward);
constexpr size_t kB = static_cast<size_t>(ItemKind::kBackward);
constexpr size_t kW = static_cast<size_t>(ItemKind::kWeightGrad);
constexpr size_t kR = static_cast<size_t>(ItemKind::kRebuild);

template <class T>
int count(const std::vector<T>& items) {
  return static_cast<int>(items.size());
}

template <class T>
const T& at(const std::vector<T>& items, int index) {
  return items[static_cast<size_t>(index)];
}

}  // namespace

void PrecedenceTimes::build(const DualBatchInstance& instance) {
  number_nodes(instance);
  edges_.clear();
  next_ = {};
  next_out_ = next_in_ = 0;
  last_comm_ = -1;
  comm_is_serial_ = !instance.comm_order.empty();
  compute_before_.clear();
  int last = -1;
  for (int j = 0; j < count(instance.backward); ++j) {
    compute_before_.push_back(last);
    if (at(instance.backward, j).resource == Resource::kCompute) last = j;
  }
  walk(instance);
  relax();
}

void PrecedenceTimes::retime(const DualBatchInstance& instance) {
  size_t node = 0;
  const auto copy = [&](const auto& items) {
    for (const auto& item : items) ns_[node++] = item.ns;
  };
  copy(instance.forward);
  copy(instance.backward);
  copy(instance.weight_grads);
  copy(instance.rebuilds);
  copy(instance.copies_out);
  copy(instance.copies_in);
  relax();
}

void PrecedenceTimes::number_nodes(const DualBatchInstance& instance) {
  ns_.clear();
  resource_.clear();
  const auto number = [&](size_t kind, const auto& items, auto resource_of) {
    base_[kind] = count(ns_);
    for (const auto& item : items) {
      ns_.push_back(item.ns);
      resource_.push_back(resource_of(item));
    }
  };
  const auto own = [](const ChainOp& op) { return op.resource; };
  const auto compute = [](const auto& /*filler*/) { return Resource::kCompute; };
  number(kF, instance.forward, own);
  number(kB, instance.backward, own);
  number(kW, instance.weight_grads, compute);
  number(kR, instance.rebuilds, compute);
  number(4, instance.copies_out, [](const CopyOut&) { return Resource::kD2h; });
  number(5, instance.copies_in, [](const CopyIn&) { return Resource::kH2d; });
  base_[6] = count(ns_);
}

// Any order that an issuing thread could follow will do; this one is fixed_order().
void PrecedenceTimes::walk(const DualBatchInstance& instance) {
  const auto backward_until = [&](int end) {
    while (next_[kB] < end) {
      const int j = next_[kB];
      while (next_[kR] < count(instance.rebuilds) &&
             at(instance.rebuilds, next_[kR]).before_backward == j) {
        add_rebuild(instance, next_[kR]++);
      }
      add_backward(instance, next_[kB]++);
      while (next_[kW] < count(instance.weight_grads) &&
             at(instance.weight_grads, next_[kW]).after_backward == j) {
        add_weight_grad(instance, next_[kW]++);
      }
    }
  };
  const auto forward_until = [&](int end) {
    while (next_[kF] < end) add_forward(instance, next_[kF]++);
  };
  add_copies_in(instance);
  for (const ScheduleItem& item : instance.comm_order) {
    if (item.kind == ItemKind::kForward) forward_until(item.index + 1);
    if (item.kind == ItemKind::kBackward) backward_until(item.index + 1);
  }
  backward_until(count(instance.backward));
  forward_until(count(instance.forward));
}

void PrecedenceTimes::add_comm(int node) {
  if (last_comm_ >= 0) edge(last_comm_, node);
  last_comm_ = node;
}

void PrecedenceTimes::add_forward(const DualBatchInstance& instance, int index) {
  const int self = node(ItemKind::kForward, index);
  if (index > 0) edge(self - 1, self);
  for (int k = 0; k < next_out_; ++k) {
    if (at(instance.copies_out, k).releases_for_forward == index) edge(copy_out(k), self);
  }
  if (!instance.comm_order.empty() && resource(self) == Resource::kComm) add_comm(self);
  while (next_out_ < count(instance.copies_out) &&
         at(instance.copies_out, next_out_).source_forward == index) {
    edge(self, copy_out(next_out_));
    if (next_out_ > 0) edge(copy_out(next_out_ - 1), copy_out(next_out_));
    ++next_out_;
  }
}

void PrecedenceTimes::add_backward(const DualBatchInstance& instance, int index) {
  const int self = node(ItemKind::kBackward, index);
  if (index > 0) edge(self - 1, self);
  for (int r = next_[kR]; r-- > 0 && at(instance.rebuilds, r).before_backward == index;) {
    edge(node(ItemKind::kRebuild, r), self);
  }
  for (int k = 0; k < next_in_; ++k) {
    if (at(instance.copies_in, k).wanted_by_backward == index) edge(copy_in(k), self);
  }
  // All but weight_lag of the weight gradients before it are issued: on one stream, also over.
  const int waited_for = next_[kW] - instance.weight_lag - 1;
  if (waited_for >= 0 && resource(self) == Resource::kCompute) {
    edge(node(ItemKind::kWeightGrad, waited_for), self);
  }
  if (!instance.comm_order.empty() && resource(self) == Resource::kComm) add_comm(self);
  add_copies_in(instance);
}

// Those that wait for no backward operator at or behind next_.
void PrecedenceTimes::add_copies_in(const DualBatchInstance& instance) {
  while (next_in_ < count(instance.copies_in) &&
         at(instance.copies_in, next_in_).not_before_backward < next_[kB]) {
    const int freed_by = at(instance.copies_in, next_in_).not_before_backward;
    if (freed_by >= 0) edge(node(ItemKind::kBackward, freed_by), copy_in(next_in_));
    if (next_in_ > 0) edge(copy_in(next_in_ - 1), copy_in(next_in_));
    ++next_in_;
  }
}

void PrecedenceTimes::add_weight_grad(const DualBatchInstance& instance, int index) {
  const int self = node(ItemKind::kWeightGrad, index);
  edge(node(ItemKind::kBackward, at(instance.weight_grads, index).after_backward), self);
  if (index > 0) edge(self - 1, self);
}

void PrecedenceTimes::add_rebuild(const DualBatchInstance& instance, int index) {
  const int self = node(ItemKind::kRebuild, index);
  if (index > 0) edge(self - 1, self);
  for (int k = 0; k < next_in_; ++k) {
    if (at(instance.copies_in, k).wanted_by_rebuild == index) edge(copy_in(k), self);
  }
  // The window opens when this many backward operators are issued.
  int opens = at(instance.rebuilds, index).before_backward;
  const int lead = instance.rebuild_lead;
  if (index < lead) return;
  if (lead > 0) opens = std::min(opens, at(instance.rebuilds, index - lead).before_backward + 1);
  if (opens == 0) return;
  const bool compute = at(instance.backward, opens - 1).resource == Resource::kCompute;
  const int behind = compute ? opens - 1 : at(compute_before_, opens - 1);
  if (behind >= 0) edge(node(ItemKind::kBackward, behind), self);
}

void PrecedenceTimes::relax() {
  head_.assign(ns_.size(), 0);
  tail_.assign(ns_.size(), 0);
  for (const Edge& edge : edges_) {
    const size_t from = static_cast<size_t>(edge.from);
    const size_t to = static_cast<size_t>(edge.to);
    head_[to] = std::max(head_[to], head_[from] + ns_[from]);
  }
  for (size_t e = edges_.size(); e-- > 0;) {
    const size_t from = static_cast<size_t>(edges_[e].from);
    const size_t to = static_cast<size_t>(edges_[e].to);
    tail_[from] = std::max(tail_[from], ns_[to] + tail_[to]);
  }
  critical_path_ns_ = 0;
  for (size_t node = 0; node < ns_.size(); ++node) {
    critical_path_ns_ = std::max(critical_path_ns_, head_[node] + ns_[node] + tail_[node]);
  }
}

}  // namespace bagualu
