#include "bagualu/schedule/dual_batch_fuse.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace bagualu {
namespace {

template <class T>
int count(const std::vector<T>& items) {
  return static_cast<int>(items.size());
}

// What fuse() has to know of each operator of a chain.
struct Joint {
  bool never = false;   ///< not with the operator before it
  int apart_from = -1;  ///< not in one run with this operator or one before it
  bool waits = false;   ///< for a copy
  bool feeds = false;   ///< the operator before it: a copy starts behind it
};

class RunFinder {
 public:
  explicit RunFinder(const std::vector<ChainOp>& chain) : chain_(chain), joints_(chain.size()) {
    for (int i = 0; i < count(chain); ++i) {
      joints_[i].never =
          i == 0 || chain[i].resource != chain[i - 1].resource || chain[i - 1].host_sync;
    }
  }

  void never_before(int op) {
    if (op < count(joints_)) joints_[op].never = true;
  }
  void feeds_copy(int op) {
    if (op + 1 < count(joints_)) joints_[op + 1].feeds = true;
  }
  void waits_for_copy(int op, int apart_from) {
    joints_[op].waits = true;
    joints_[op].apart_from = std::max(joints_[op].apart_from, apart_from);
  }

  // One past the last operator of each run.
  std::vector<int> ends() {
    std::vector<int> ends;
    int begin = 0;
    for (int stretch = 0; stretch < count(chain_); stretch = stretch_end_) {
      measure(stretch);
      begin = stretch;
      int64_t before_ns = 0;
      for (int i = stretch; i < stretch_end_; ++i) {
        if (i > begin && breaks(i, begin, before_ns)) {
          ends.push_back(i);
          begin = i;
          before_ns = 0;
        }
        before_ns += chain_[i].ns;
      }
      ends.push_back(stretch_end_);
    }
    return ends;
  }

 private:
  // The longest run from `begin` on, had copies no say.
  void measure(int begin) {
    stretch_ns_ = chain_[begin].ns;
    stretch_end_ = begin + 1;
    while (stretch_end_ < count(chain_) && !joints_[stretch_end_].never) {
      stretch_ns_ += chain_[stretch_end_++].ns;
    }
  }

  bool breaks(int op, int begin, int64_t before_ns) const {
    constexpr int kTenth = 10;
    const Joint& joint = joints_[op];
    if (joint.apart_from >= begin) return true;
    if (joint.waits && before_ns * kTenth > stretch_ns_) return true;
    return joint.feeds && chain_[op].ns * kTenth > stretch_ns_;
  }

  const std::vector<ChainOp>& chain_;
  std::vector<Joint> joints_;
  int stretch_end_ = 0;
  int64_t stretch_ns_ = 0;
};

std::vector<ChainOp> fuse_chain(const std::vector<ChainOp>& chain, const std::vector<int>& ends) {
  std::vector<ChainOp> fused;
  int begin = 0;
  for (int end : ends) {
    ChainOp op = chain[begin];
    for (int i = begin + 1; i < end; ++i) op.ns += chain[i].ns;
    op.host_sync = chain[end - 1].host_sync;
    fused.push_back(op);
    begin = end;
  }
  return fused;
}

std::vector<int> run_of(const std::vector<int>& ends) {
  std::vector<int> run;
  for (int r = 0; r < count(ends); ++r) run.resize(static_cast<size_t>(ends[r]), r);
  return run;
}

// Two neighbours of a chain stay apart where the other chain communicates between them.
void split_turns(const DualBatchInstance& instance, RunFinder& forward, RunFinder& backward) {
  for (size_t k = 1; k < instance.comm_order.size(); ++k) {
    const ScheduleItem& item = instance.comm_order[k];
    if (item.kind == instance.comm_order[k - 1].kind) continue;
    (item.kind == ItemKind::kForward ? forward : backward).never_before(item.index);
  }
}

int mapped(const std::vector<int>& run, int op) { return op < 0 ? op : run[op]; }

}  // namespace

FusedInstance fuse(const DualBatchInstance& instance) {
  RunFinder forward(instance.forward);
  RunFinder backward(instance.backward);
  split_turns(instance, forward, backward);
  for (const WeightGradFiller& grad : instance.weight_grads) {
    backward.never_before(grad.after_backward + 1);
  }
  for (const RebuildFiller& rebuild : instance.rebuilds) {
    backward.never_before(rebuild.before_backward);
  }
  for (const CopyOut& copy : instance.copies_out) {
    forward.feeds_copy(copy.source_forward);
    if (copy.releases_for_forward >= 0) {
      forward.waits_for_copy(copy.releases_for_forward, copy.source_forward);
    }
  }
  for (const CopyIn& copy : instance.copies_in) {
    backward.waits_for_copy(copy.wanted_by_backward, copy.not_before_backward);
    if (copy.not_before_backward >= 0) backward.feeds_copy(copy.not_before_backward);
  }
  FusedInstance fused;
  fused.instance = instance;
  fused.forward_end = forward.ends();
  fused.backward_end = backward.ends();
  const std::vector<int> f = run_of(fused.forward_end);
  const std::vector<int> b = run_of(fused.backward_end);
  DualBatchInstance& own = fused.instance;
  own.forward = fuse_chain(instance.forward, fused.forward_end);
  own.backward = fuse_chain(instance.backward, fused.backward_end);
  for (WeightGradFiller& grad : own.weight_grads) grad.after_backward = b[grad.after_backward];
  for (RebuildFiller& rebuild : own.rebuilds) rebuild.before_backward = b[rebuild.before_backward];
  for (CopyOut& copy : own.copies_out) {
    copy.source_forward = f[copy.source_forward];
    copy.releases_for_forward = mapped(f, copy.releases_for_forward);
  }
  for (CopyIn& copy : own.copies_in) {
    copy.wanted_by_backward = b[copy.wanted_by_backward];
    copy.not_before_backward = mapped(b, copy.not_before_backward);
  }
  for (ScheduleItem& item : own.comm_order) {
    item.index = (item.kind == ItemKind::kForward ? f : b)[item.index];
  }
  own.comm_order.erase(std::unique(own.comm_order.begin(), own.comm_order.end()),
                       own.comm_order.end());
  return fused;
}

std::vector<ScheduleItem> expand(const FusedInstance& fused,
                                 const std::vector<ScheduleItem>& order) {
  std::vector<ScheduleItem> expanded;
  for (const ScheduleItem& item : order) {
    if (item.kind == ItemKind::kWeightGrad || item.kind == ItemKind::kRebuild) {
      expanded.push_back(item);
      continue;
    }
    const auto& ends = item.kind == ItemKind::kForward ? fused.forward_end : fused.backward_end;
    const int begin = item.index > 0 ? ends[item.index - 1] : 0;
    for (int op = begin; op < ends[item.index]; ++op) expanded.push_back({item.kind, op});
  }
  return expanded;
}

}  // namespace bagualu
