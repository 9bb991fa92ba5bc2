#include "bagualu/schedule/pipeline_fit.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/schedule/pipeline_exchange.h"

namespace bagualu {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// How a list breaks its ties.
struct ListRules {
  bool forward_first = false;  // a forward before an input gradient, if both could start
  bool lower_gradient_first = false;
  bool lower_first = false;  // of a rank's stages, the lower one's forward first
  // One stage per rank: most forwards without their input gradient, as multiples of what 1F1B has
  // on that rank; 0: what memory allows.
  int ahead = 0;
  bool whole_backward = false;  // a weight gradient at once behind its input gradient
  bool await_gradient = false;  // no forward that would put a known input gradient off
  // A weight gradient runs before a known arrival if so many quarters of it fit.
  int quarters_that_fit = 4;
};

// Decides pass after pass in the order of time. A rank knows what other ranks have begun, not what
// they will begin. Rank r holds stage r and, with two stages per rank, the mirrored one.
class ListScheduler {
 public:
  ListScheduler(int pp, int stages, int microbatches, const PipelineTimes& times,
                const HoldLimit& hold, ListRules rules)
      : pp_(pp),
        stages_(stages),
        microbatches_(microbatches),
        times_(times),
        hold_(hold),
        rules_(rules) {
    const size_t slots = static_cast<size_t>(stages) * static_cast<size_t>(microbatches);
    forward_ready_.assign(slots, kNever);
    gradient_ready_.assign(slots, kNever);
    ranks_.resize(static_cast<size_t>(pp));
    order_.stages = stages;
    order_.microbatches = microbatches;
    order_.ranks.resize(static_cast<size_t>(pp));
    for (int r = 0; r < pp; ++r) {
      Rank& rank = ranks_[static_cast<size_t>(r)];
      rank.held_stages = stages / pp;
      rank.stages = {{{r}, {2 * pp - 1 - r}}};
      order_.ranks[static_cast<size_t>(r)].reserve(static_cast<size_t>(3 * rank.held_stages) *
                                                   static_cast<size_t>(microbatches));
    }
    for (int m = 0; m < microbatches; ++m) forward_ready_[static_cast<size_t>(m)] = 0;
  }

  // A timetable: the simulation's may end earlier, never later.
  struct List {
    PipelineOrder order;
    int64_t makespan_ns = 0;
    int64_t span_ns = 0;  // the longest
  };

  // Nothing if the limit lets no rank go on.
  std::optional<List> make() {
    for (size_t left = 3 * forward_ready_.size(); left > 0;) {
      const auto next = std::min_element(
          ranks_.begin(), ranks_.end(),
          [](const Rank& one, const Rank& other) { return one.wake < other.wake; });
      if (next->wake == kNever) return std::nullopt;
      if (decide(static_cast<int>(next - ranks_.begin()), *next)) --left;
    }
    List list{std::move(order_)};
    for (const Rank& rank : ranks_) {
      list.makespan_ns = std::max(list.makespan_ns, rank.free);
      list.span_ns = std::max(list.span_ns, rank.free - rank.first_start);
    }
    return list;
  }

 private:
  struct StageState {
    int stage = 0;
    int forwards = 0;
    int gradients = 0;
  };
  struct Rank {
    int held_stages = 1;
    std::array<StageState, 2> stages;
    int64_t first_start = kNever;
    int64_t free = 0;
    int64_t wake = 0;  // when it decides next
    int64_t held = 0;
    std::vector<PipelinePass> put_off;
    size_t weights = 0;
    bool has_weight() const { return weights < put_off.size(); }
  };
  struct Candidate {
    StageState* state = nullptr;
    int64_t ready = kNever;
  };

  size_t slot(int stage, int m) const {
    return static_cast<size_t>(stage) * static_cast<size_t>(microbatches_) + static_cast<size_t>(m);
  }

  static int64_t at(const std::vector<std::vector<int64_t>>& table, int stage, int m) {
    return table[static_cast<size_t>(stage)][static_cast<size_t>(m)];
  }

  // Earliest of what this rank could run next, of those that memory allows.
  Candidate next_forward(Rank& rank, int64_t now) {
    Candidate best;
    for (int i = 0; i < rank.held_stages; ++i) {
      const int place = rules_.lower_first ? i : rank.held_stages - 1 - i;
      StageState& state = rank.stages[static_cast<size_t>(place)];
      if (state.forwards == microbatches_) continue;
      // The way back up needs a place of its own, or the way down could take all of them.
      const int64_t needed = (rank.held_stages == 2 && place == 0 ? 2 : 1) * hold_.activation;
      if (rank.held + needed > hold_.limit) continue;
      const int most_ahead = rules_.ahead * (pp_ - state.stage);
      if (most_ahead > 0 && state.forwards - state.gradients >= most_ahead) continue;
      const int64_t ready = std::max(now, forward_ready_[slot(state.stage, state.forwards)]);
      if (ready < best.ready) best = {&state, ready};
    }
    return best;
  }

  Candidate next_gradient(Rank& rank, int64_t now) {
    Candidate best;
    for (int i = 0; i < rank.held_stages; ++i) {
      const int place = rules_.lower_gradient_first ? i : rank.held_stages - 1 - i;
      StageState& state = rank.stages[static_cast<size_t>(place)];
      if (state.gradients == state.forwards) continue;
      const int64_t ready = std::max(now, gradient_ready_[slot(state.stage, state.gradients)]);
      if (ready < best.ready) best = {&state, ready};
    }
    return best;
  }

  // Runs a pass of this rank, or puts its next decision off.
  bool decide(int r, Rank& rank) {
    const int64_t now = rank.wake;
    const Candidate forward = next_forward(rank, now);
    const Candidate gradient = next_gradient(rank, now);
    const bool can_gradient = gradient.ready <= now;
    const bool can_forward = forward.ready <= now && !(rules_.await_gradient && !can_gradient &&
                                                       delays(*forward.state, gradient.ready, now));
    if (rules_.whole_backward && rank.has_weight()) {
      run_weight(r, rank, now);
      return true;
    }
    if (can_gradient && !(rules_.forward_first && can_forward)) {
      run_gradient(r, rank, *gradient.state, now);
      return true;
    }
    if (can_forward) {
      run_forward(r, rank, *forward.state, now);
      return true;
    }
    // A forward that could start, but is held back, is nothing to wake for.
    const int64_t arrival =
        forward.ready <= now ? gradient.ready : std::min(forward.ready, gradient.ready);
    if (rank.has_weight()) {
      const int64_t quarter = (weight_end(rank, now) - now) / 4;
      if (weight_end(rank, now) - (4 - rules_.quarters_that_fit) * quarter <= arrival) {
        run_weight(r, rank, now);
        return true;
      }
    }
    rank.wake = arrival;
    return false;
  }

  bool delays(const StageState& state, int64_t gradient_ready, int64_t now) const {
    return gradient_ready < now + at(times_.forward_ns, state.stage, state.forwards);
  }

  int64_t weight_end(const Rank& rank, int64_t now) const {
    const PipelinePass& pass = rank.put_off[rank.weights];
    return now + at(times_.weight_grad_ns, pass.stage, pass.microbatch);
  }

  void run_weight(int r, Rank& rank, int64_t now) {
    rank.free = rank.wake = weight_end(rank, now);
    list(r).push_back(rank.put_off[rank.weights++]);
    rank.held -= hold_.weight_grad;
  }

  void run_forward(int r, Rank& rank, StageState& state, int64_t now) {
    const int m = state.forwards++;
    const int64_t end = now + at(times_.forward_ns, state.stage, m);
    rank.first_start = std::min(rank.first_start, now);
    list(r).push_back({state.stage, PassKind::kForward, m});
    rank.held += hold_.activation;
    rank.free = rank.wake = end;
    if (state.stage + 1 < stages_) {
      arrive(forward_ready_, state.stage + 1, m, r, end);
    } else {
      arrive(gradient_ready_, state.stage, m, r, end);
    }
  }

  void run_gradient(int r, Rank& rank, StageState& state, int64_t now) {
    const int m = state.gradients++;
    const int64_t end =
        now + at(times_.backward_ns, state.stage, m) - at(times_.weight_grad_ns, state.stage, m);
    list(r).push_back({state.stage, PassKind::kInputGrad, m});
    rank.held -= hold_.activation - hold_.weight_grad;
    rank.put_off.push_back({state.stage, PassKind::kWeightGrad, m});
    rank.free = rank.wake = end;
    if (state.stage > 0) arrive(gradient_ready_, state.stage - 1, m, r, end);
  }

  void arrive(std::vector<int64_t>& ready, int stage, int m, int from, int64_t end) {
    const int to = stage < pp_ ? stage : 2 * pp_ - 1 - stage;
    const int64_t time = end + (to == from ? 0 : times_.send_ns);
    ready[slot(stage, m)] = time;
    Rank& rank = ranks_[static_cast<size_t>(to)];
    rank.wake = std::min(rank.wake, std::max(rank.free, time));
  }

  std::vector<PipelinePass>& list(int r) { return order_.ranks[static_cast<size_t>(r)]; }

  int pp_;
  int stages_;
  int microbatches_;
  const PipelineTimes& times_;
  HoldLimit hold_;
  ListRules rules_;
  std::vector<int64_t> forward_ready_;   // by slot(): when its input is here
  std::vector<int64_t> gradient_ready_;  // the same of its input gradient
  std::vector<Rank> ranks_;
  PipelineOrder order_;
};

using Cost = std::pair<int64_t, int64_t>;

Cost step_cost(const PipelineOrder& order, const PipelineTimes& times) {
  const PipelineRun run = simulate(order, times);
  return {run.makespan_ns, *std::max_element(run.span_ns.begin(), run.span_ns.end())};
}

Cost span_cost(const PipelineOrder& order, const PipelineTimes& times) {
  const auto [makespan, span] = step_cost(order, times);
  return {span, makespan};
}

std::vector<ListRules> all_rules(bool two_stages, size_t passes) {
  std::vector<ListRules> rules;
  // For many passes, more lists cost more than they are worth.
  const unsigned few = passes <= 1000 ? 1 : 0;
  for (unsigned set = 0; set < (few ? 8U : 1U); ++set) {
    for (unsigned choice = 0; choice < (few ? 6U : 4U); ++choice) {
      // Which of a rank's stages is first is a question of two, how far ahead one of one.
      for (int variant = 0; variant < (two_stages ? 2 : 3); ++variant) {
        ListRules list;
        list.whole_backward = (set & 1U) != 0;
        list.await_gradient = (set & 2U) != 0;
        list.lower_gradient_first = (set & 4U) != 0;
        if (list.lower_gradient_first && !two_stages) continue;
        list.forward_first = (choice & 1U) != 0;
        if (list.forward_first && two_stages && !few) continue;
        list.quarters_that_fit = std::array{4, 0, 2}[choice / 2];
        list.lower_first = two_stages && variant == 1;
        list.ahead = two_stages ? 0 : variant;
        rules.push_back(list);
      }
    }
  }
  return rules;
}

// No step is shorter: before a rank begins, micro-batch 0 has come to it, and then it has its work.
int64_t least_step(const PipelineOrder& order, const PipelineTimes& times) {
  int64_t least = 0;
  int64_t arrival = 0;
  for (size_t r = 0; r < order.ranks.size(); ++r) {
    int64_t sum = arrival;
    for (const auto& [stage, kind, microbatch] : order.ranks[r]) {
      const auto s = static_cast<size_t>(stage);
      const auto m = static_cast<size_t>(microbatch);
      if (kind == PassKind::kForward) sum += times.forward_ns[s][m];
      if (kind == PassKind::kInputGrad) sum += times.backward_ns[s][m];
    }
    least = std::max(least, sum);
    arrival +=
        *std::min_element(times.forward_ns[r].begin(), times.forward_ns[r].end()) + times.send_ns;
  }
  return least;
}

int most(const std::vector<int>& counts) { return *std::max_element(counts.begin(), counts.end()); }

// 1F1B with the same work on every rank: one stage in place of those that the rank holds.
int64_t one_f_one_b_ns(PipelineKind kind, int pp, int microbatches, const PipelineTimes& times) {
  const PipelineOrder order = one_f_one_b(pp, microbatches);
  PipelineTimes merged = equal_times(order, 0, 0, times.send_ns);
  for (size_t s = 0; s < times.forward_ns.size(); ++s) {
    const auto r = static_cast<size_t>(rank_of_stage(kind, pp, static_cast<int64_t>(s)));
    for (size_t m = 0; m < merged.forward_ns[r].size(); ++m) {
      merged.forward_ns[r][m] += times.forward_ns[s][m];
      merged.backward_ns[r][m] += times.backward_ns[s][m];
    }
  }
  return simulate(order, merged).makespan_ns;
}

// 1F1B with every backward split and its weight gradient next: no step of it is longer.
PipelineOrder split_one_f_one_b(int pp, int microbatches) {
  PipelineOrder order = one_f_one_b(pp, microbatches);
  for (auto& list : order.ranks) {
    std::vector<PipelinePass> split;
    for (const PipelinePass& pass : list) {
      if (pass.kind == PassKind::kForward) {
        split.push_back(pass);
        continue;
      }
      split.push_back({pass.stage, PassKind::kInputGrad, pass.microbatch});
      split.push_back({pass.stage, PassKind::kWeightGrad, pass.microbatch});
    }
    list = std::move(split);
  }
  return order;
}

struct BestList {
  PipelineOrder order;
  int64_t step_ns = 0;    ///< the simulation's may be shorter, never longer
  bool shortest = false;  ///< no step is shorter
};

// The best of several lists, if one is shorter than `best`.
BestList best_list(PipelineOrder best, bool two_stages, const PipelineTimes& times) {
  const auto pp = static_cast<int>(best.ranks.size());
  const int limit = most(in_flight(best));
  Cost best_cost = step_cost(best, times);
  if (best_cost.first == least_step(best, times)) return {best, best_cost.first, true};
  const auto offer = [&](PipelineOrder& order, Cost cost) {
    if (cost >= best_cost) return;
    best = std::move(order);
    best_cost = cost;
  };
  if (!two_stages) {
    PipelineOrder plain = split_one_f_one_b(pp, best.microbatches);
    offer(plain, step_cost(plain, times));
  }
  for (const ListRules& rules :
       all_rules(two_stages, static_cast<size_t>(3 * best.stages * best.microbatches))) {
    auto list =
        ListScheduler(pp, best.stages, best.microbatches, times, {limit, 1, 1}, rules).make();
    if (list) offer(list->order, {list->makespan_ns, list->span_ns});
  }
  return {std::move(best), best_cost.first, false};
}

}  // namespace

PipelineOrder zero_bubble_order(int pp, int microbatches, const PipelineTimes& times,
                                const HoldLimit& hold) {
  BGL_CHECK(hold.activation <= hold.limit, hold.activation, hold.limit);
  BGL_CHECK(hold.weight_grad >= 0 && hold.weight_grad <= hold.activation, hold.weight_grad);
  std::optional<PipelineOrder> best;
  Cost best_cost;
  const auto offer = [&](PipelineOrder order, Cost cost) {
    if (best && cost >= best_cost) return;
    best = std::move(order);
    best_cost = cost;
  };
  for (PipelineKind kind : {PipelineKind::kZbH1, PipelineKind::kZbH2}) {
    PipelineOrder order = make_order(kind, pp, 1, microbatches);
    if (most(in_flight(order)) * hold.activation <= hold.limit) {
      const Cost cost = span_cost(order, times);
      offer(std::move(order), cost);
    }
  }
  for (const ListRules& rules : all_rules(false, static_cast<size_t>(3 * pp * microbatches))) {
    auto list = ListScheduler(pp, pp, microbatches, times, hold, rules).make();
    if (list) offer(std::move(list->order), {list->span_ns, list->makespan_ns});
  }
  BGL_CHECK(best, pp, microbatches, hold.limit);
  return *std::move(best);
}

int64_t least_v_step_ns(int pp, int microbatches, const PipelineTimes& times) {
  const auto shortest = [](const std::vector<int64_t>& row) {
    return *std::min_element(row.begin(), row.end());
  };
  const auto stages = static_cast<size_t>(2 * pp);
  int64_t least = 0;
  for (size_t r = 0; r < static_cast<size_t>(pp); ++r) {
    const size_t mirrored = stages - 1 - r;
    int64_t work = 0;
    for (size_t s : {r, mirrored}) {
      for (size_t m = 0; m < static_cast<size_t>(microbatches); ++m) {
        work += times.forward_ns[s][m] + times.backward_ns[s][m];
      }
    }
    int64_t arrival = 0;  // of the first micro-batch at the rank's later stage
    for (size_t s = 0; s < mirrored; ++s) arrival += shortest(times.forward_ns[s]);
    arrival += times.send_ns * 2 * static_cast<int64_t>(static_cast<size_t>(pp) - 1 - r);
    arrival += times.send_ns * static_cast<int64_t>(r);
    std::vector<int64_t> forwards = times.forward_ns[r];
    std::sort(forwards.begin(), forwards.end(), std::greater<>());
    int64_t before = 0;
    for (size_t i = 0; i < forwards.size() && i < stages - 1; ++i) before += forwards[i];
    least = std::max(least, arrival + work - before);
  }
  return least;
}

namespace {

// The promise of fitted_order(): 1F1B's step, or what the memory of a V allows.
int64_t longest_step_ns(PipelineKind kind, int pp, int microbatches, const PipelineTimes& times) {
  const int64_t plain = one_f_one_b_ns(kind, pp, microbatches, times);
  if (kind != PipelineKind::kZbV) return plain;
  return std::max(plain, least_v_step_ns(pp, microbatches, times));
}

}  // namespace

PipelineOrder fitted_order(PipelineKind kind, int pp, int virtual_per_rank, int microbatches,
                           const PipelineTimes& times) {
  PipelineOrder best = make_order(kind, pp, virtual_per_rank, microbatches);
  if (kind == PipelineKind::k1F1B || kind == PipelineKind::kDualPipe) return best;
  const int limit = most(in_flight(best));
  const bool one_stage = kind == PipelineKind::kZbH1 || kind == PipelineKind::kZbH2;
  const bool two_stages = kind == PipelineKind::kZbV || kind == PipelineKind::kVHalf;
  BestList list = one_stage || two_stages ? best_list(std::move(best), two_stages, times)
                                          : BestList{std::move(best), kNever, false};
  best = std::move(list.order);
  if (one_stage || kind == PipelineKind::kVHalf || list.shortest) return best;
  const int64_t goal = longest_step_ns(kind, pp, microbatches, times);
  if (list.step_ns <= goal || simulate(best, times).makespan_ns <= goal) return best;
  constexpr int64_t kPassesSimulated = 6'000'000;
  const int64_t tries = kPassesSimulated / (int64_t{3} * best.stages * microbatches);
  return exchange_passes(best, times, {goal, limit, static_cast<int>(tries)});
}

}  // namespace bagualu
