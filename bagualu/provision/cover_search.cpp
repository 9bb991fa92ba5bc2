#include "bagualu/provision/cover_search.h"

#include <algorithm>
#include <limits>

namespace bagualu {
namespace {

constexpr int kMaxExchangeRounds = 8;
constexpr size_t kMaxInsertions = 32;
constexpr size_t kMaxRepairs = 12;
// Bounds the time of the last improvements by work, not by a clock: same problem, same choice.
constexpr int64_t kMaxChanges = 800;

}  // namespace

int64_t cover_cost(const CoverProblem& problem, const CoverChoice& choice) {
  int64_t cost = 0;
  for (int option : choice) {
    if (option >= 0) cost += problem.options[option].cost_ns;
  }
  return cost;
}

void CoverSearch::load(const CoverProblem& problem, const CoverChoice& choice) {
  problem_ = &problem;
  missing_ = problem.need_bytes;
  host_left_ = problem.host_free_bytes;
  choice_.assign(static_cast<size_t>(problem.groups()), -1);
  for (int group = 0; group < static_cast<int>(choice.size()); ++group) set(group, choice[group]);
}

void CoverSearch::set(int group, int option) {
  const int old = choice_[group];
  if (old == option) return;
  --changes_left_;
  for (int o : {old, option}) {
    if (o < 0) continue;
    const int64_t sign = o == old ? 1 : -1;
    const CoverOption& spec = problem_->options[o];
    host_left_ += sign * spec.host_bytes;
    for (int i = spec.first_segment; i < spec.end_segment; ++i) {
      const CoverSegment& segment = problem_->segments[i];
      for (int p = segment.begin; p < segment.end; ++p) missing_[p] += sign * segment.bytes;
    }
  }
  choice_[group] = option;
}

int CoverSearch::worst_point() const {
  int64_t worst = 0;
  int point = -1;
  for (size_t p = 0; p < missing_.size(); ++p) {
    if (missing_[p] <= worst) continue;
    worst = missing_[p];
    point = static_cast<int>(p);
  }
  return point;
}

int CoverSearch::tightest_point() const {
  if (missing_.empty()) return -1;
  return static_cast<int>(std::max_element(missing_.begin(), missing_.end()) - missing_.begin());
}

bool CoverSearch::covered() const { return host_left_ >= 0 && worst_point() < 0; }

int64_t CoverSearch::bytes_at(int option, int point) const {
  if (option < 0) return 0;
  const CoverOption& spec = problem_->options[option];
  int64_t bytes = 0;
  for (int i = spec.first_segment; i < spec.end_segment; ++i) {
    const CoverSegment& segment = problem_->segments[i];
    if (segment.begin <= point && point < segment.end) bytes += segment.bytes;
  }
  return bytes;
}

int64_t CoverSearch::option_cost(int option) const {
  return option < 0 ? 0 : problem_->options[option].cost_ns;
}

// Every option not yet in taken_ is taken at most once: two options of a group that are each better
// at one point would otherwise replace each other for ever.
bool CoverSearch::cover_greedily(bool cap_at_need) {
  for (int point = worst_point(); point >= 0; point = worst_point()) {
    int best = -1;
    double best_price = std::numeric_limits<double>::infinity();
    int64_t best_bytes = 0;
    for (int o = 0; o < static_cast<int>(problem_->options.size()); ++o) {
      const CoverOption& spec = problem_->options[o];
      const int old = choice_[spec.group];
      if (taken_[o]) continue;
      const int64_t bytes = bytes_at(o, point) - bytes_at(old, point);
      if (bytes <= 0) continue;
      const int64_t old_host = old < 0 ? 0 : problem_->options[old].host_bytes;
      if (spec.host_bytes > host_left_ + old_host) continue;
      const auto cost = static_cast<double>(spec.cost_ns - option_cost(old));
      const int64_t counted = cap_at_need ? std::min(bytes, missing_[point]) : bytes;
      const double price = cost / static_cast<double>(counted);
      if (price < best_price || (price == best_price && bytes > best_bytes)) {
        best = o;
        best_price = price;
        best_bytes = bytes;
      }
    }
    if (best < 0) return false;
    taken_[best] = 1;
    set(problem_->options[best].group, best);
  }
  return host_left_ >= 0;
}

// Most expensive first: back to none, or to the cheapest option of the group that still covers.
bool CoverSearch::take_back() {
  order_.clear();
  for (int group = 0; group < problem_->groups(); ++group) {
    if (choice_[group] >= 0) order_.push_back(group);
  }
  std::stable_sort(order_.begin(), order_.end(), [this](int a, int b) {
    return option_cost(choice_[a]) > option_cost(choice_[b]);
  });
  bool changed = false;
  for (int group : order_) {
    const int old = choice_[group];
    int best = old;
    set(group, -1);
    if (covered()) {
      changed = true;
      continue;
    }
    for (int o = problem_->group_begin[group]; o < problem_->group_begin[group + 1]; ++o) {
      if (option_cost(o) >= option_cost(best)) continue;
      set(group, o);
      if (covered()) best = o;
    }
    set(group, best);
    changed = changed || best != old;
  }
  return changed;
}

bool CoverSearch::exchange() {
  order_.clear();
  for (int group = 0; group < problem_->groups(); ++group) {
    if (choice_[group] >= 0) order_.push_back(group);
  }
  std::stable_sort(order_.begin(), order_.end(), [this](int a, int b) {
    return option_cost(choice_[a]) > option_cost(choice_[b]);
  });
  bool changed = false;
  for (int group : order_) changed = exchange_group(group) || changed;
  return changed;
}

// Gives `group` back and takes one option elsewhere instead: the largest saving that still covers.
bool CoverSearch::exchange_group(int group) {
  const int old = choice_[group];
  if (old < 0) return false;
  set(group, -1);
  const int point = worst_point();
  int64_t best_gain = 0;
  int best = -1;
  for (int o = 0; point >= 0 && o < static_cast<int>(problem_->options.size()); ++o) {
    const int other = problem_->options[o].group;
    if (other == group) continue;
    const int replaced = choice_[other];
    const int64_t gain = option_cost(old) + option_cost(replaced) - option_cost(o);
    // The worst point alone rules out nearly all of them.
    if (gain <= best_gain || o == replaced ||
        bytes_at(o, point) - bytes_at(replaced, point) < missing_[point]) {
      continue;
    }
    set(other, o);
    if (covered()) {
      best_gain = gain;
      best = o;
    }
    set(other, replaced);
  }
  if (best < 0) {
    set(group, old);
    return false;
  }
  set(problem_->options[best].group, best);
  return true;
}

// Takes one more option and then back whatever it made superfluous: two for one.
bool CoverSearch::insert_and_drop() {
  const int point = tightest_point();
  if (point < 0) return false;
  std::vector<std::pair<double, int>>& tries = tries_;
  tries.clear();
  for (int o = 0; o < static_cast<int>(problem_->options.size()); ++o) {
    const int64_t bytes = bytes_at(o, point);
    if (bytes <= 0 || choice_[problem_->options[o].group] == o) continue;
    tries.emplace_back(static_cast<double>(option_cost(o)) / static_cast<double>(bytes), o);
  }
  std::sort(tries.begin(), tries.end());
  if (tries.size() > kMaxInsertions) tries.resize(kMaxInsertions);
  const CoverChoice before = choice_;
  const int64_t cost = cover_cost(*problem_, before);
  for (const auto& [price, o] : tries) {
    if (changes_left_ <= 0) break;
    set(problem_->options[o].group, o);
    if (covered()) take_back();
    if (covered() && cover_cost(*problem_, choice_) < cost) return true;
    for (int group = 0; group < problem_->groups(); ++group) set(group, before[group]);
  }
  return false;
}

// Gives one option back, covers the hole greedily without it, and keeps that if it is cheaper.
bool CoverSearch::repair() {
  const CoverChoice before = choice_;
  const int64_t cost = cover_cost(*problem_, before);
  std::vector<std::pair<int64_t, int>> groups;  // most expensive first
  for (int group = 0; group < problem_->groups(); ++group) {
    if (before[group] >= 0) groups.emplace_back(-option_cost(before[group]), group);
  }
  std::sort(groups.begin(), groups.end());
  if (groups.size() > kMaxRepairs) groups.resize(kMaxRepairs);
  for (const auto& [negative_cost, group] : groups) {
    if (changes_left_ <= 0) break;
    taken_.assign(problem_->options.size(), 0);
    taken_[before[group]] = 1;
    set(group, -1);
    if (cover_greedily(true)) {
      take_back();
      if (cover_cost(*problem_, choice_) < cost) return true;
    }
    for (int g = 0; g < problem_->groups(); ++g) set(g, before[g]);
  }
  return false;
}

void CoverSearch::settle() {
  for (int round = 0; round < kMaxExchangeRounds; ++round) {
    const bool taken = take_back();
    const bool exchanged = exchange();
    if (!taken && !exchanged) return;
  }
}

bool CoverSearch::improve(const CoverProblem& problem, CoverChoice& choice) {
  bool found = false;
  int64_t best_cost = std::numeric_limits<int64_t>::max();
  for (const bool cap_at_need : {true, false}) {
    load(problem, {});
    taken_.assign(problem.options.size(), 0);
    const bool covered = cover_greedily(cap_at_need);
    if (covered) settle();
    const int64_t cost = cover_cost(problem, choice_);
    if ((covered && cost < best_cost) || (!found && !covered)) choice = choice_;
    if (covered) best_cost = std::min(best_cost, cost);
    found = found || covered;
  }
  if (!found) return false;
  load(problem, choice);
  changes_left_ = kMaxChanges;
  while (changes_left_ > 0 && (insert_and_drop() || repair())) settle();
  choice = choice_;
  return true;
}

// Groups that pay best at the hardest point come first: good solutions early, and the fractional
// bound can be read off in order.
void CoverSearch::order_groups() {
  const int groups = problem_->groups();
  hardest_point_ = worst_point();
  std::vector<double> price(static_cast<size_t>(groups), std::numeric_limits<double>::infinity());
  std::vector<int64_t> most(static_cast<size_t>(groups), 0);
  sequence_.clear();
  for (int group = 0; group < groups; ++group) {
    sequence_.push_back(group);
    for (int o = problem_->group_begin[group]; o < problem_->group_begin[group + 1]; ++o) {
      const int64_t bytes = hardest_point_ < 0 ? 0 : bytes_at(o, hardest_point_);
      if (bytes <= 0) continue;
      most[group] = std::max(most[group], bytes);
      price[group] =
          std::min(price[group], static_cast<double>(option_cost(o)) / static_cast<double>(bytes));
    }
  }
  std::stable_sort(sequence_.begin(), sequence_.end(),
                   [&](int a, int b) { return price[a] < price[b]; });
  const size_t points = missing_.size();
  most_bytes_.assign((static_cast<size_t>(groups) + 1) * points, 0);
  ns_per_byte_.assign(static_cast<size_t>(groups), 0.0);
  hardest_bytes_.assign(static_cast<size_t>(groups), 0);
  for (int depth = groups - 1; depth >= 0; --depth) {
    const int group = sequence_[depth];
    ns_per_byte_[depth] = price[group];
    hardest_bytes_[depth] = most[group];
    for (size_t p = 0; p < points; ++p) {
      int64_t bytes = 0;
      for (int o = problem_->group_begin[group]; o < problem_->group_begin[group + 1]; ++o) {
        bytes = std::max(bytes, bytes_at(o, static_cast<int>(p)));
      }
      most_bytes_[depth * points + p] = most_bytes_[(depth + 1) * points + p] + bytes;
    }
  }
}

// Least cost of covering the hardest point if options could be taken in part.
int64_t CoverSearch::bound_ns(int depth) const {
  if (hardest_point_ < 0) return 0;
  int64_t left = missing_[hardest_point_];
  double cost = 0.0;
  for (size_t d = depth; d < sequence_.size() && left > 0 && hardest_bytes_[d] > 0; ++d) {
    const int64_t bytes = std::min(left, hardest_bytes_[d]);
    cost += ns_per_byte_[d] * static_cast<double>(bytes);
    left -= bytes;
  }
  return static_cast<int64_t>(cost);
}

bool CoverSearch::hopeless(int depth) const {
  const int64_t* most = most_bytes_.data() + static_cast<size_t>(depth) * missing_.size();
  for (size_t p = 0; p < missing_.size(); ++p) {
    if (missing_[p] > most[p]) return true;
  }
  return false;
}

// `fresh`: the choice differs from the parent's, so that it has not been offered to accept() yet.
void CoverSearch::descend(int depth, int64_t cost, bool fresh) {
  if (nodes_left_ <= 0 || host_left_ < 0) return;
  --nodes_left_;
  if (cost + bound_ns(depth) >= best_cost_ || hopeless(depth)) return;
  if (fresh && worst_point() < 0 && (*accept_)(choice_)) {
    best_cost_ = cost;
    best_ = choice_;
    return;
  }
  // A covered leaf that was not accepted goes on: more options may make it fit after all.
  if (depth == problem_->groups()) return;
  const int group = sequence_[depth];
  for (int o = problem_->group_begin[group]; o < problem_->group_begin[group + 1]; ++o) {
    set(group, o);
    descend(depth + 1, cost + option_cost(o), true);
  }
  set(group, -1);
  descend(depth + 1, cost, false);
}

bool CoverSearch::close(const CoverProblem& problem, int64_t max_nodes,
                        const std::function<bool(const CoverChoice&)>& accept, CoverChoice& choice,
                        int64_t& cost_ns) {
  load(problem, {});
  order_groups();
  accept_ = &accept;
  nodes_left_ = max_nodes;
  best_cost_ = cost_ns;
  best_.clear();
  descend(0, 0, true);
  if (best_.empty()) return false;
  choice = best_;
  cost_ns = best_cost_;
  return true;
}

}  // namespace bagualu
