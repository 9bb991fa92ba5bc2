#include "bagualu/schedule/dual_batch_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>

#include "bagualu/schedule/dual_batch.h"
#include "bagualu/schedule/dual_batch_bounds.h"
#include "bagualu/schedule/dual_batch_issue.h"

namespace bagualu {
namespace {

constexpr ItemKind kKinds[] = {ItemKind::kForward, ItemKind::kBackward, ItemKind::kWeightGrad,
                               ItemKind::kRebuild};

// Best makespan over every issue order there is.
void try_all(const IssueState& state, int64_t& best) {
  if (state.makespan_ns() >= best) return;
  if (state.done()) {
    best = state.makespan_ns();
    return;
  }
  for (ItemKind kind : kKinds) {
    if (!state.can_issue(kind)) continue;
    IssueState next = state;
    next.issue(kind);
    try_all(next, best);
  }
}

int64_t brute_force_ns(const DualBatchInstance& instance) {
  IssueState state;
  state.reset(instance);
  int64_t best = std::numeric_limits<int64_t>::max();
  try_all(state, best);
  return best;
}

class RandomInstances {
 public:
  explicit RandomInstances(unsigned seed) : random_(seed) {}

  DualBatchInstance next() {
    DualBatchInstance instance;
    fill_chain(instance.forward);
    fill_chain(instance.backward);
    const int backward = static_cast<int>(instance.backward.size());
    if (backward > 0) {
      for (int j : sorted(pick(0, 3), backward)) instance.weight_grads.push_back({pick(0, 9), j});
      for (int j : sorted(pick(0, 3), backward)) instance.rebuilds.push_back({pick(0, 9), j});
      add_copies_in(instance);
    }
    add_copies_out(instance);
    instance.weight_lag = pick(0, 2);
    instance.rebuild_lead = pick(0, 2);
    if (pick(0, 1) == 1) instance.comm_order = pinned_comm_order(instance);
    return instance;
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  std::vector<int> sorted(int count, int below) {
    std::vector<int> values;
    for (int k = 0; k < count; ++k) values.push_back(pick(0, below - 1));
    std::sort(values.begin(), values.end());
    return values;
  }

  void fill_chain(std::vector<ChainOp>& chain) {
    const bool alternating = pick(0, 1) == 1;
    const int size = pick(0, 5);
    for (int i = 0; i < size; ++i) {
      const bool comm = alternating ? i % 2 == 1 : pick(0, 1) == 1;
      chain.push_back(
          {pick(0, 9), comm ? Resource::kComm : Resource::kCompute, pick(0, 7) == 0, i / 2});
    }
  }

  void add_copies_out(DualBatchInstance& instance) {
    const int forward = static_cast<int>(instance.forward.size());
    if (forward == 0) return;
    for (int source : sorted(pick(0, 3), forward)) {
      const int waiting = source + pick(1, 3);
      instance.copies_out.push_back({pick(0, 20), source, waiting < forward ? waiting : -1});
    }
  }

  void add_copies_in(DualBatchInstance& instance) {
    int freed = -1;
    int rebuild = 0;
    for (int wanted : sorted(pick(0, 3), static_cast<int>(instance.backward.size()))) {
      freed = std::max(freed, wanted - pick(1, 4));
      if (freed >= wanted) freed = wanted - 1;
      CopyIn copy{pick(0, 20), wanted, -1, freed};
      const int rebuilds = static_cast<int>(instance.rebuilds.size());
      if (rebuild < rebuilds && pick(0, 1) == 1) {
        const int r = pick(rebuild, rebuilds - 1);
        if (freed < instance.rebuilds[static_cast<size_t>(r)].before_backward) {
          copy.wanted_by_rebuild = rebuild = r;
        }
      }
      if (!instance.copies_in.empty() && freed < instance.copies_in.back().not_before_backward) {
        continue;
      }
      instance.copies_in.push_back(copy);
    }
  }

  std::mt19937 random_;
};

std::string describe(const DualBatchInstance& instance) {
  std::string text;
  const auto chain = [&](const char* name, const std::vector<ChainOp>& ops) {
    text += std::string(" ") + name;
    for (const ChainOp& op : ops) {
      text += (op.resource == Resource::kComm ? " c" : " x") + std::to_string(op.ns) +
              (op.host_sync ? "s" : "");
    }
  };
  chain("F", instance.forward);
  chain("B", instance.backward);
  for (const auto& w : instance.weight_grads) {
    text += " W" + std::to_string(w.ns) + "@" + std::to_string(w.after_backward);
  }
  for (const auto& r : instance.rebuilds) {
    text += " R" + std::to_string(r.ns) + "@" + std::to_string(r.before_backward);
  }
  for (const auto& c : instance.copies_out) {
    text += " D" + std::to_string(c.ns) + "@" + std::to_string(c.source_forward) + ">" +
            std::to_string(c.releases_for_forward);
  }
  for (const auto& c : instance.copies_in) {
    text += " H" + std::to_string(c.ns) + "@" + std::to_string(c.not_before_backward) + ">" +
            std::to_string(c.wanted_by_backward) + "r" + std::to_string(c.wanted_by_rebuild);
  }
  return text + " lag " + std::to_string(instance.weight_lag) + " lead " +
         std::to_string(instance.rebuild_lead) + (instance.comm_order.empty() ? "" : " pinned");
}

// The search alone, without a good order or a bound to start from.
int64_t search_ns(const DualBatchInstance& instance) {
  PrecedenceTimes times;
  times.build(instance);
  DualBatchSearch search;
  EXPECT_TRUE(search.prepare(instance, times, 1'000'000));
  SearchLimits limits;
  limits.below_ns = std::numeric_limits<int64_t>::max();
  const SearchOutcome outcome = search.pass(limits);
  EXPECT_TRUE(outcome.found && outcome.complete);
  std::vector<ScheduleItem> order;
  search.write_order(order);
  EXPECT_EQ(replay(instance, order).makespan_ns, outcome.makespan_ns);
  return outcome.makespan_ns;
}

TEST(DualBatchSearch, ExactEqualsBruteForceOnSmallInstances) {
  RandomInstances random(6);
  SolveOptions options;
  options.tolerance_ppm = 0;
  for (int k = 0; k < 3000; ++k) {
    const DualBatchInstance instance = random.next();
    const DualBatchSchedule schedule = solve(instance, options);
    const int64_t best = brute_force_ns(instance);
    ASSERT_EQ(schedule.makespan_ns, best) << k << describe(instance);
    ASSERT_EQ(schedule.bound_ns, best) << k << describe(instance);
    ASSERT_LE(lower_bound_ns(instance), best) << k << describe(instance);
    ASSERT_EQ(search_ns(instance), best) << k << describe(instance);
  }
}

}  // namespace
}  // namespace bagualu
