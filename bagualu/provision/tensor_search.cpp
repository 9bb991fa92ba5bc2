#include "bagualu/provision/tensor_search.h"

#include <algorithm>
#include <cmath>

#include "bagualu/provision/pool.h"

namespace bagualu {
namespace {

constexpr double kPenalty = 3.0;  // a byte too many costs this many times what it is worth
constexpr uint64_t kSeed = 0x9e3779b97f4a7c15;

}  // namespace
bool TensorSearch::improve(const TensorProblem& problem, int64_t enough_ns, int64_t max_trials,
                           std::vector<int>& choice) {
  problem_ = &problem;
  load(choice);
  best_ = choice_;
  best_standing_ = now();
  const bool through = search_through();
  if (!through) {
    find_twins();
    trials_left_ = max_trials;
    random_ = kSeed;
    load(best_);
    descend_from_here(/*by_two=*/false);
    if (best_standing_.cost > enough_ns) {
      const bool fits = best_standing_.cost < kInfeasible;
      anneal(fits ? best_standing_.cost - enough_ns : kInfeasible, max_trials / 2);
    }
    load(best_);
    descend_from_here(/*by_two=*/best_standing_.cost > enough_ns);
  }
  choice = best_;
  cost_ = best_standing_.cost;
  return through;
}

// Changes that help, until none does; the best choice seen stays.
void TensorSearch::descend_from_here(bool by_two) {
  here_ = now();
  next_move_ = 0;
  while (trials_left_ > 0 && (change_one() || (by_two && change_two()))) {
  }
  if (!(here_ < best_standing_)) return;
  best_standing_ = here_;
  best_ = choice_;
}

double TensorSearch::energy(const Change& change) const {
  const int64_t broken = std::max<int64_t>(0, device_ + change.device - problem_->budget_bytes) +
                         std::max<int64_t>(0, host_ + change.host - problem_->host_bytes) + past_ +
                         change.past;
  return static_cast<double>(exposed_ + change.exposed) +
         kPenalty * problem_->ns_per_byte * static_cast<double>(broken);
}

// From a temperature at which steps of the size of the gap are taken to one at which hardly any is.
void TensorSearch::anneal(int64_t gap_ns, int64_t steps) {
  if (problem_->ns_per_byte <= 0 || steps <= 0) return;
  double at = energy({});
  double heat = std::min(static_cast<double>(gap_ns), 0.3 * at + 1.0) / 2;
  const double cooling = std::pow(0.003, 1.0 / static_cast<double>(steps));
  for (int64_t step = 0; step < steps; ++step, heat *= cooling) {
    random_ ^= random_ << 13;  // xorshift64
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    const int g = static_cast<int>((random_ >> 32) % choice_.size());
    const TensorGroup& group = problem_->groups[g];
    const auto others = static_cast<uint64_t>(group.end_option - group.first_option - 1);
    if (others < 1) continue;
    int o = group.first_option + static_cast<int>((random_ & 0xffff) % others);
    if (o >= choice_[g]) ++o;
    const double then = energy(change_of({g, o}));
    const double chance = static_cast<double>(random_ >> 16 & 0xffff) / 65536.0;
    if (then > at && chance > std::exp((at - then) / heat)) continue;
    set(g, o);
    at = then;
    if (!(now() < best_standing_)) continue;
    best_standing_ = now();
    best_ = choice_;
  }
}

void TensorSearch::load(const std::vector<int>& choice) {
  choice_.assign(problem_->groups.size(), -1);
  sums_.assign(problem_->window_bytes.size(), {});
  device_ = host_ = exposed_ = past_ = 0;
  for (size_t g = 0; g < choice.size(); ++g) set(static_cast<int>(g), choice[g]);
}

int64_t TensorSearch::past_window(int microbatch, const Sums& sums) const {
  const int64_t past = sums.link - problem_->window_bytes[microbatch];
  return problem_->link_ns_per_byte > 0 || past < 0 ? 0 : past;
}

int64_t TensorSearch::exposed_ns(int microbatch, const Sums& sums) const {
  const int64_t past = sums.link - problem_->window_bytes[microbatch];
  return link_ns(problem_->link_ns_per_byte, past) +
         std::max<int64_t>(0, sums.ns - problem_->bubble_ns[microbatch]);
}

// A choice that does not fit counts by how far it is from fitting, above every one that does.
TensorSearch::Standing TensorSearch::standing(int64_t device, int64_t host, int64_t exposed,
                                              int64_t past) const {
  const int64_t broken = std::max<int64_t>(0, device - problem_->budget_bytes) +
                         std::max<int64_t>(0, host - problem_->host_bytes) + past;
  return {broken > 0 ? kInfeasible + broken : exposed, device};
}

void TensorSearch::unset(int group) {
  if (choice_[group] < 0) return;
  const TensorOption& old = problem_->options[choice_[group]];
  const int m = problem_->groups[group].microbatch;
  Sums& sums = sums_[m];
  exposed_ -= exposed_ns(m, sums);
  past_ -= past_window(m, sums);
  sums.add(old, -1);
  exposed_ += exposed_ns(m, sums);
  past_ += past_window(m, sums);
  device_ -= old.device_bytes;
  host_ -= old.link_bytes;
  choice_[group] = -1;
}

void TensorSearch::set(int group, int option) {
  unset(group);
  const TensorOption& now = problem_->options[option];
  const int m = problem_->groups[group].microbatch;
  Sums& sums = sums_[m];
  exposed_ -= exposed_ns(m, sums);
  past_ -= past_window(m, sums);
  sums.add(now, 1);
  exposed_ += exposed_ns(m, sums);
  past_ += past_window(m, sums);
  device_ += now.device_bytes;
  host_ += now.link_bytes;
  choice_[group] = option;
}

TensorSearch::Change TensorSearch::change_of(const Move& move) const {
  const int m = problem_->groups[move.group].microbatch;
  const TensorOption& old = problem_->options[choice_[move.group]];
  const TensorOption& now = problem_->options[move.option];
  Sums sums = sums_[m];
  sums.add(old, -1);
  sums.add(now, 1);
  return {now.device_bytes - old.device_bytes, now.link_bytes - old.link_bytes,
          exposed_ns(m, sums) - exposed_ns(m, sums_[m]),
          past_window(m, sums) - past_window(m, sums_[m])};
}

TensorSearch::Standing TensorSearch::with(const Move& move) const {
  const Change change = change_of(move);
  return standing(device_ + change.device, host_ + change.host, exposed_ + change.exposed,
                  past_ + change.past);
}

TensorSearch::Standing TensorSearch::with(const Move& move, const Move& other) const {
  const int m = problem_->groups[move.group].microbatch;
  const int n = problem_->groups[other.group].microbatch;
  const auto& options = problem_->options;
  Sums sums[2] = {sums_[m], sums_[n]};
  Sums& of_other = m == n ? sums[0] : sums[1];
  int64_t device = device_, host = host_, exposed = exposed_, past = past_;
  const auto change = [&](const Move& change, Sums& target) {
    const TensorOption& old = options[choice_[change.group]];
    const TensorOption& now = options[change.option];
    target.add(old, -1);
    target.add(now, 1);
    device += now.device_bytes - old.device_bytes;
    host += now.link_bytes - old.link_bytes;
  };
  change(move, sums[0]);
  change(other, of_other);
  const int touched[2] = {m, n};
  for (int i = 0; i < (m == n ? 1 : 2); ++i) {
    exposed += exposed_ns(touched[i], sums[i]) - exposed_ns(touched[i], sums_[touched[i]]);
    past += past_window(touched[i], sums[i]) - past_window(touched[i], sums_[touched[i]]);
  }
  return standing(device, host, exposed, past);
}

bool TensorSearch::search_through() {
  if (choice_.size() > kMaxSearchedGroups) return false;
  nodes_left_ = kMaxNodes;
  for (size_t g = 0; g < choice_.size(); ++g) unset(static_cast<int>(g));
  descend(0);
  return nodes_left_ > 0;
}

// Everything only grows from group to group, so a part that is no better than the best is left.
void TensorSearch::descend(int group) {
  if (--nodes_left_ <= 0) return;
  const Standing part = now();
  if (part.cost >= best_standing_.cost) return;
  if (group == static_cast<int>(problem_->groups.size())) {
    best_standing_ = part;
    best_ = choice_;
    return;
  }
  const TensorGroup& spec = problem_->groups[group];
  for (int o = spec.first_option; o < spec.end_option; ++o) {
    set(group, o);
    descend(group + 1);
  }
  unset(group);
}

void TensorSearch::find_twins() {
  const auto& groups = problem_->groups;
  const auto& options = problem_->options;
  std::vector<int> firsts;
  twin_.resize(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    if (g > 0 && groups[g].microbatch != groups[g - 1].microbatch) firsts.clear();
    twin_[g] = static_cast<int>(g);
    for (int f : firsts) {
      if (std::equal(
              options.begin() + groups[g].first_option, options.begin() + groups[g].end_option,
              options.begin() + groups[f].first_option, options.begin() + groups[f].end_option)) {
        twin_[g] = f;
        break;
      }
    }
    if (twin_[g] == static_cast<int>(g)) firsts.push_back(static_cast<int>(g));
  }
}

// Of groups that offer the same and do the same, two: a change of two of them may be what is
// needed.
void TensorSearch::list_moves() {
  moves_.clear();
  listed_.assign(problem_->options.size(), 0);
  for (int g = 0; g < static_cast<int>(choice_.size()); ++g) {
    const TensorGroup& group = problem_->groups[g];
    const int same = problem_->groups[twin_[g]].first_option + choice_[g] - group.first_option;
    if (listed_[same] >= 2) continue;
    ++listed_[same];
    for (int o = group.first_option; o < group.end_option; ++o) {
      if (o != choice_[g]) moves_.push_back({g, o});
    }
  }
}

bool TensorSearch::change_one() {
  list_moves();
  const Move* best = nullptr;
  for (const Move& move : moves_) {
    const Standing standing = with(move);
    if (!(standing < here_)) continue;
    here_ = standing;
    best = &move;
  }
  trials_left_ -= static_cast<int64_t>(moves_.size());
  if (best == nullptr) return false;
  set(best->group, best->option);
  return true;
}

// The best partner of the first change that has a good one, from where the last search stopped.
bool TensorSearch::change_two() {
  const size_t count = moves_.size();
  for (size_t i = 0; i < count && trials_left_ > 0; ++i) {
    const Move& move = moves_[(next_move_ + i) % count];
    const Move* best = nullptr;
    for (const Move& other : moves_) {
      if (other.group == move.group) continue;
      const Standing standing = with(move, other);
      if (!(standing < here_)) continue;
      here_ = standing;
      best = &other;
    }
    trials_left_ -= static_cast<int64_t>(count);
    if (best == nullptr) continue;
    next_move_ = (next_move_ + i) % count;
    set(move.group, move.option);
    set(best->group, best->option);
    return true;
  }
  return false;
}

}  // namespace bagualu
