#include "bagualu/schedule/dual_batch_issue.h"

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr size_t kF = static_cast<size_t>(ItemKind::kForward);
constexpr size_t kB = static_cast<size_t>(ItemKind::kBackward);
constexpr size_t kW = static_cast<size_t>(ItemKind::kWeightGrad);
constexpr size_t kR = static_cast<size_t>(ItemKind::kRebuild);

int count(size_t size) { return static_cast<int>(size); }

}  // namespace

void IssueState::reset(const DualBatchInstance& instance) {
  instance_ = &instance;
  next_ = {};
  free_ns_ = {};
  host_ns_ = makespan_ns_ = 0;
  issued_ = comm_issued_ = out_issued_ = in_issued_ = 0;
  in_awaited_ = rebuilds_consumed_ = grads_ready_ = 0;
  spans_[kF].resize(instance.forward.size());
  spans_[kB].resize(instance.backward.size());
  spans_[kW].resize(instance.weight_grads.size());
  spans_[kR].resize(instance.rebuilds.size());
  items_ = 0;
  for (const auto& spans : spans_) items_ += count(spans.size());
  copies_out_.resize(instance.copies_out.size());
  copies_in_.resize(instance.copies_in.size());
  released_by_.assign(instance.forward.size(), -1);
  for (int k = 0; k < count(instance.copies_out.size()); ++k) {
    const int forward = instance.copies_out[static_cast<size_t>(k)].releases_for_forward;
    if (forward >= 0) released_by_[static_cast<size_t>(forward)] = k;  // FIFO: the last one counts
  }
  filled_by_.assign(instance.rebuilds.size(), -1);
  for (int k = 0; k < count(instance.copies_in.size()); ++k) {
    const int rebuild = instance.copies_in[static_cast<size_t>(k)].wanted_by_rebuild;
    if (rebuild >= 0) filled_by_[static_cast<size_t>(rebuild)] = k;
  }
  run_copies_in();
}

const ChainOp& IssueState::chain_op(ItemKind kind) const {
  const auto& chain = kind == ItemKind::kForward ? instance_->forward : instance_->backward;
  return chain[static_cast<size_t>(next(kind))];
}

bool IssueState::comm_allows(ItemKind kind) const {
  if (instance_->comm_order.empty() || chain_op(kind).resource != Resource::kComm) return true;
  return instance_->comm_order[static_cast<size_t>(comm_issued_)].kind == kind;
}

bool IssueState::can_issue(ItemKind kind) const {
  const size_t k = static_cast<size_t>(kind);
  if (next_[k] >= count(spans_[k].size())) return false;
  if (kind == ItemKind::kWeightGrad) return next_[kW] < grads_ready_;
  if (grads_ready_ - next_[kW] > instance_->weight_lag) return false;
  if (kind == ItemKind::kRebuild) {
    const size_t rebuild = static_cast<size_t>(next_[kR]);
    if (filled_by_[rebuild] >= in_issued_) return false;
    return next_[kR] - rebuilds_consumed_ < instance_->rebuild_lead ||
           instance_->rebuilds[rebuild].before_backward == next_[kB];
  }
  if (kind == ItemKind::kBackward && next_[kR] < count(instance_->rebuilds.size()) &&
      instance_->rebuilds[static_cast<size_t>(next_[kR])].before_backward == next_[kB]) {
    return false;
  }
  return comm_allows(kind);
}

int64_t IssueState::start_ns(ItemKind kind) const {
  const size_t k = static_cast<size_t>(kind);
  const size_t index = static_cast<size_t>(next_[k]);
  if (kind == ItemKind::kWeightGrad) {
    const size_t backward = static_cast<size_t>(instance_->weight_grads[index].after_backward);
    return std::max({host_ns_, stream_ns(Resource::kCompute), spans_[kB][backward].end_ns});
  }
  if (kind == ItemKind::kRebuild) {
    const int64_t start = std::max(host_ns_, stream_ns(Resource::kCompute));
    if (filled_by_[index] < 0) return start;
    return std::max(start, copies_in_[static_cast<size_t>(filled_by_[index])].end_ns);
  }
  int64_t start = std::max(host_ns_, stream_ns(chain_op(kind).resource));
  if (index > 0) start = std::max(start, spans_[k][index - 1].end_ns);
  if (kind == ItemKind::kForward) {
    const int copy = released_by_[index];
    return copy < 0 ? start : std::max(start, copies_out_[static_cast<size_t>(copy)].end_ns);
  }
  for (size_t r = static_cast<size_t>(rebuilds_consumed_); r < static_cast<size_t>(next_[kR]);
       ++r) {
    if (instance_->rebuilds[r].before_backward != next_[kB]) break;
    start = std::max(start, spans_[kR][r].end_ns);
  }
  for (size_t c = static_cast<size_t>(in_awaited_); c < copies_in_.size(); ++c) {
    if (instance_->copies_in[c].wanted_by_backward != next_[kB]) break;
    start = std::max(start, copies_in_[c].end_ns);
  }
  return start;
}

TimeSpan IssueState::run(Resource resource, int64_t ready_ns, int64_t duration_ns) {
  int64_t& free = free_ns_[static_cast<size_t>(resource)];
  const int64_t start = std::max({ready_ns, free, host_ns_});
  free = start + duration_ns;
  makespan_ns_ = std::max(makespan_ns_, free);
  return {start, free};
}

void IssueState::run_copies_out() {
  const auto& copies = instance_->copies_out;
  while (out_issued_ < count(copies.size())) {
    const CopyOut& copy = copies[static_cast<size_t>(out_issued_)];
    if (copy.source_forward >= next_[kF]) return;
    const int64_t ready = spans_[kF][static_cast<size_t>(copy.source_forward)].end_ns;
    copies_out_[static_cast<size_t>(out_issued_++)] = run(Resource::kD2h, ready, copy.ns);
  }
}

void IssueState::run_copies_in() {
  const auto& copies = instance_->copies_in;
  while (in_issued_ < count(copies.size())) {
    const CopyIn& copy = copies[static_cast<size_t>(in_issued_)];
    if (copy.not_before_backward >= next_[kB]) return;
    const int64_t ready = copy.not_before_backward < 0
                              ? 0
                              : spans_[kB][static_cast<size_t>(copy.not_before_backward)].end_ns;
    copies_in_[static_cast<size_t>(in_issued_++)] = run(Resource::kH2d, ready, copy.ns);
  }
}

void IssueState::issue(ItemKind kind) {
  const size_t k = static_cast<size_t>(kind);
  const size_t index = static_cast<size_t>(next_[k]);
  const int64_t start = start_ns(kind);
  ++issued_;
  ++next_[k];
  if (kind == ItemKind::kWeightGrad) {
    spans_[k][index] = run(Resource::kCompute, start, instance_->weight_grads[index].ns);
    return;
  }
  if (kind == ItemKind::kRebuild) {
    spans_[k][index] = run(Resource::kCompute, start, instance_->rebuilds[index].ns);
    return;
  }
  const bool forward = kind == ItemKind::kForward;
  const ChainOp& op = (forward ? instance_->forward : instance_->backward)[index];
  spans_[k][index] = run(op.resource, start, op.ns);
  if (op.resource == Resource::kComm) ++comm_issued_;
  if (op.host_sync) host_ns_ = std::max(host_ns_, spans_[k][index].end_ns);
  if (forward) {
    run_copies_out();
    return;
  }
  const int backward = static_cast<int>(index);
  const auto& grads = instance_->weight_grads;
  while (grads_ready_ < count(grads.size()) &&
         grads[static_cast<size_t>(grads_ready_)].after_backward <= backward) {
    ++grads_ready_;
  }
  while (rebuilds_consumed_ < next_[kR] &&
         instance_->rebuilds[static_cast<size_t>(rebuilds_consumed_)].before_backward <= backward) {
    ++rebuilds_consumed_;
  }
  while (in_awaited_ < count(copies_in_.size()) &&
         instance_->copies_in[static_cast<size_t>(in_awaited_)].wanted_by_backward <= backward) {
    ++in_awaited_;
  }
  run_copies_in();
}

int64_t issue_all(const DualBatchInstance& instance, const std::vector<ScheduleItem>& order,
                  IssueState& state) {
  state.reset(instance);
  for (const ScheduleItem& item : order) {
    BGL_CHECK(state.can_issue(item.kind) && state.next(item.kind) == item.index,
              static_cast<int>(item.kind), item.index);
    state.issue(item.kind);
  }
  BGL_CHECK(state.done(), order.size());
  return state.makespan_ns();
}

}  // namespace bagualu
