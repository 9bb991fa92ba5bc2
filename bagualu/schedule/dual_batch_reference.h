// For tests: small random dual-batch instances of several kinds, and their optimum by trying every
// order. Shares no code with the solver, its replay or verify_schedule().
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "bagualu/schedule/dual_batch.h"

namespace bagualu {

/// Tries every order that the rules of dual_batch.h allow; gives up a branch only once the items
/// that a resource has yet to run cannot end sooner than the best order found.
class EveryOrder {
 public:
  explicit EveryOrder(const DualBatchInstance& instance) : in_(instance) {}

  int64_t optimum_ns() {
    State start;
    start.end_f.assign(in_.forward.size(), 0);
    start.end_b.assign(in_.backward.size(), 0);
    start.end_r.assign(in_.rebuilds.size(), 0);
    start.end_out.assign(in_.copies_out.size(), 0);
    start.end_in.assign(in_.copies_in.size(), 0);
    copy(start);
    extend(start);
    return best_;
  }
  /// An order that ends then.
  const std::vector<ScheduleItem>& order() const { return best_order_; }

 private:
  struct State {
    size_t f = 0, b = 0, w = 0, r = 0, out = 0, in = 0, comm = 0;  // how many are issued
    int64_t free[kResourceCount] = {};  // when a resource has done what it was given
    int64_t host = 0;
    int64_t last = 0;
    std::vector<int64_t> end_f, end_b, end_r, end_out, end_in;
  };

  void copy(State& s) const {
    for (; s.out < in_.copies_out.size(); ++s.out) {
      const CopyOut& c = in_.copies_out[s.out];
      if (static_cast<size_t>(c.source_forward) >= s.f) break;
      s.end_out[s.out] = occupy(s, Resource::kD2h, s.end_f[c.source_forward], c.ns);
    }
    for (; s.in < in_.copies_in.size(); ++s.in) {
      const CopyIn& c = in_.copies_in[s.in];
      const bool at_once = c.not_before_backward < 0;
      if (!at_once && static_cast<size_t>(c.not_before_backward) >= s.b) break;
      s.end_in[s.in] =
          occupy(s, Resource::kH2d, at_once ? 0 : s.end_b[c.not_before_backward], c.ns);
    }
  }

  static int64_t occupy(State& s, Resource resource, int64_t ready, int64_t ns) {
    int64_t& free = s.free[static_cast<int>(resource)];
    free = std::max({free, ready, s.host}) + ns;
    s.last = std::max(s.last, free);
    return free;
  }

  bool is_next_comm(const State& s, Resource resource, ItemKind kind, size_t index) const {
    if (resource != Resource::kComm || in_.comm_order.empty()) return true;
    return in_.comm_order[s.comm] == ScheduleItem{kind, static_cast<int>(index)};
  }

  size_t pending(const State& s) const {
    size_t available = 0;
    for (const WeightGradFiller& w : in_.weight_grads) {
      available += static_cast<size_t>(w.after_backward) < s.b ? 1 : 0;
    }
    return available - s.w;
  }

  size_t leading(const State& s) const {
    size_t used = 0;
    for (const RebuildFiller& r : in_.rebuilds) {
      used += static_cast<size_t>(r.before_backward) < s.b ? 1 : 0;
    }
    return s.r - used;
  }

  // Of all compute items, if they follow each other without a gap from here on.
  int64_t compute_end(const State& s) const {
    int64_t end = s.free[static_cast<int>(Resource::kCompute)];
    const auto add = [&end](const std::vector<ChainOp>& chain, size_t from) {
      for (size_t i = from; i < chain.size(); ++i) {
        if (chain[i].resource == Resource::kCompute) end += chain[i].ns;
      }
    };
    add(in_.forward, s.f);
    add(in_.backward, s.b);
    for (size_t i = s.w; i < in_.weight_grads.size(); ++i) end += in_.weight_grads[i].ns;
    for (size_t i = s.r; i < in_.rebuilds.size(); ++i) end += in_.rebuilds[i].ns;
    return end;
  }

  void extend(const State& s) {
    if (s.last >= best_ || compute_end(s) >= best_) return;
    if (s.f == in_.forward.size() && s.b == in_.backward.size() && s.w == in_.weight_grads.size() &&
        s.r == in_.rebuilds.size()) {
      best_ = s.last;
      best_order_ = path_;
      return;
    }
    const size_t waiting = pending(s);
    if (waiting > 0) issue_weight_grad(s);
    if (waiting > static_cast<size_t>(in_.weight_lag)) return;
    if (s.f < in_.forward.size()) issue_forward(s);
    if (s.b < in_.backward.size()) issue_backward(s);
    if (s.r < in_.rebuilds.size()) issue_rebuild(s);
  }

  void issue_weight_grad(State s) {
    const WeightGradFiller& w = in_.weight_grads[s.w];
    occupy(s, Resource::kCompute, s.end_b[w.after_backward], w.ns);
    go_on(s, ItemKind::kWeightGrad, s.w);
  }

  void issue_forward(State s) {
    const ChainOp& op = in_.forward[s.f];
    if (!is_next_comm(s, op.resource, ItemKind::kForward, s.f)) return;
    int64_t ready = s.f > 0 ? s.end_f[s.f - 1] : 0;
    for (size_t c = 0; c < in_.copies_out.size(); ++c) {
      if (in_.copies_out[c].releases_for_forward == static_cast<int>(s.f)) {
        ready = std::max(ready, s.end_out[c]);
      }
    }
    s.end_f[s.f] = occupy(s, op.resource, ready, op.ns);
    issue_chain(s, op, s.end_f[s.f], ItemKind::kForward, s.f);
  }

  void issue_backward(State s) {
    const ChainOp& op = in_.backward[s.b];
    if (!is_next_comm(s, op.resource, ItemKind::kBackward, s.b)) return;
    int64_t ready = s.b > 0 ? s.end_b[s.b - 1] : 0;
    for (size_t r = 0; r < in_.rebuilds.size(); ++r) {
      if (in_.rebuilds[r].before_backward != static_cast<int>(s.b)) continue;
      if (r >= s.r) return;
      ready = std::max(ready, s.end_r[r]);
    }
    for (size_t c = 0; c < in_.copies_in.size(); ++c) {
      if (in_.copies_in[c].wanted_by_backward == static_cast<int>(s.b)) {
        ready = std::max(ready, s.end_in[c]);
      }
    }
    s.end_b[s.b] = occupy(s, op.resource, ready, op.ns);
    issue_chain(s, op, s.end_b[s.b], ItemKind::kBackward, s.b);
  }

  void issue_chain(State& s, const ChainOp& op, int64_t end, ItemKind kind, size_t& issued) {
    if (op.resource == Resource::kComm) ++s.comm;
    ++issued;
    copy(s);
    if (op.host_sync) s.host = std::max(s.host, end);
    --issued;
    go_on(s, kind, issued);
  }

  void go_on(State& s, ItemKind kind, size_t& issued) {
    path_.push_back({kind, static_cast<int>(issued++)});
    extend(s);
    path_.pop_back();
  }

  void issue_rebuild(State s) {
    const RebuildFiller& filler = in_.rebuilds[s.r];
    const bool due = static_cast<size_t>(filler.before_backward) == s.b;
    if (!due && leading(s) >= static_cast<size_t>(in_.rebuild_lead)) return;
    int64_t ready = 0;
    for (size_t c = 0; c < in_.copies_in.size(); ++c) {
      if (in_.copies_in[c].wanted_by_rebuild != static_cast<int>(s.r)) continue;
      if (c >= s.in) return;  // its buffer is not free yet
      ready = std::max(ready, s.end_in[c]);
    }
    s.end_r[s.r] = occupy(s, Resource::kCompute, ready, filler.ns);
    go_on(s, ItemKind::kRebuild, s.r);
  }

  const DualBatchInstance& in_;
  int64_t best_ = INT64_MAX;
  std::vector<ScheduleItem> path_, best_order_;
};

/// What a small random instance has.
enum class SmallKind : uint8_t {
  kAnyChains,    ///< two chains, resources at random
  kAlternating,  ///< two chains, compute and communication by turns
  kFillers,      ///< and weight gradients and rebuilds
  kEverything,   ///< and copies that release buffers, and host synchronisation
};
inline constexpr int kSmallKinds = 4;

/// Units: durations of 0 to 9 ns (many ties) or up to 1 ms, drawn per instance.
class SmallInstances {
 public:
  explicit SmallInstances(uint64_t seed) : random_(seed) {}

  DualBatchInstance next(SmallKind kind, bool pinned) {
    longest_ = pick(0, 1) ? 9 : 1'000'000;
    DualBatchInstance in;
    const int most = kind >= SmallKind::kFillers ? 5 : 8;
    in.forward = chain(pick(0, most), kind);
    in.backward = chain(pick(kind >= SmallKind::kFillers ? 1 : 0, most), kind);
    in.weight_lag = pick(0, 2);
    in.rebuild_lead = pick(0, 3);
    if (kind >= SmallKind::kFillers) add_fillers(in);
    if (kind == SmallKind::kEverything) add_copies(in);
    if (pinned) in.comm_order = pick(0, 1) ? pinned_comm_order(in) : any_comm_order(in);
    return in;
  }

 private:
  int pick(int least, int most) {
    return least + static_cast<int>(random_() % static_cast<uint64_t>(most - least + 1));
  }
  int64_t duration() { return pick(0, longest_); }

  std::vector<ChainOp> chain(int length, SmallKind kind) {
    std::vector<ChainOp> ops(static_cast<size_t>(length));
    const int first = pick(0, 1);
    for (int i = 0; i < length; ++i) {
      ops[i].ns = duration();
      const bool comm = kind == SmallKind::kAnyChains ? pick(0, 1) : (first + i) % 2;
      ops[i].resource = comm ? Resource::kComm : Resource::kCompute;
      ops[i].layer = i / 3;
      ops[i].host_sync = kind == SmallKind::kEverything && pick(0, 5) == 0;
    }
    return ops;
  }

  std::vector<int> sorted_picks(int count, int least, int most) {
    std::vector<int> picks;
    for (int i = 0; i < count; ++i) picks.push_back(pick(least, most));
    std::sort(picks.begin(), picks.end());
    return picks;
  }

  void add_fillers(DualBatchInstance& in) {
    const int last = static_cast<int>(in.backward.size()) - 1;
    for (int op : sorted_picks(pick(0, 4), 0, last)) in.weight_grads.push_back({duration(), op});
    for (int op : sorted_picks(pick(0, 3), 0, last)) in.rebuilds.push_back({duration(), op});
  }

  void add_copies(DualBatchInstance& in) {
    const int forward = static_cast<int>(in.forward.size());
    const int backward = static_cast<int>(in.backward.size());
    if (forward > 0) {
      for (int source : sorted_picks(pick(0, 3), 0, forward - 1)) {
        const bool releases = source + 1 < forward && pick(0, 2) > 0;
        in.copies_out.push_back(
            {duration(), source, releases ? pick(source + 1, forward - 1) : -1});
      }
    }
    int freed = -1;
    int rebuild = 0;
    for (int reader : sorted_picks(pick(0, 3), 0, backward - 1)) {
      freed = std::max(freed, pick(-1, reader - 1));
      CopyIn copy{duration(), reader, -1, freed};
      while (rebuild < static_cast<int>(in.rebuilds.size()) &&
             in.rebuilds[rebuild].before_backward <= freed) {
        ++rebuild;
      }
      if (rebuild < static_cast<int>(in.rebuilds.size()) && pick(0, 1)) {
        copy.wanted_by_rebuild = rebuild;
      }
      in.copies_in.push_back(copy);
    }
  }

  // Any interleaving of the two chains' communication.
  std::vector<ScheduleItem> any_comm_order(const DualBatchInstance& in) {
    std::vector<ScheduleItem> order;
    size_t f = 0, b = 0;
    while (f < in.forward.size() || b < in.backward.size()) {
      const bool forward = b == in.backward.size() || (f < in.forward.size() && pick(0, 1));
      const size_t index = forward ? f++ : b++;
      if ((forward ? in.forward : in.backward)[index].resource != Resource::kComm) continue;
      order.push_back(
          {forward ? ItemKind::kForward : ItemKind::kBackward, static_cast<int>(index)});
    }
    return order;
  }

  std::mt19937_64 random_;
  int longest_ = 9;
};

}  // namespace bagualu
