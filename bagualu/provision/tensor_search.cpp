#include "bagualu/provision/tensor_search.h"

#include <algorithm>
#include <cmath>

namespace bagualu {

void TensorSearch::unset(int group) {
  if (choice_[group] < 0) return;
  const TensorOption& old = problem_->options[choice_[group]];
  Sums& sums = sums_[problem_->groups[group].microbatch];
  device_ -= old.device_bytes;
  host_ -= old.link_bytes;
  sums.link -= old.link_bytes;
  sums.ns -= old.ns;
  choice_[group] = -1;
}

void TensorSearch::set(int group, int option) {
  unset(group);
  const TensorOption& now = problem_->options[option];
  Sums& sums = sums_[problem_->groups[group].microbatch];
  device_ += now.device_bytes;
  host_ += now.link_bytes;
  sums.link += now.link_bytes;
  sums.ns += now.ns;
  choice_[group] = option;
}

// A choice that does not fit counts by how far it is from fitting, above every one that does.
TensorSearch::Standing TensorSearch::standing() const {
  int64_t cost = 0, broken = std::max<int64_t>(0, device_ - problem_->budget_bytes) +
                             std::max<int64_t>(0, host_ - problem_->host_bytes);
  for (size_t m = 0; m < sums_.size(); ++m) {
    cost += std::max<int64_t>(0, sums_[m].ns - problem_->bubble_ns[m]);
    const int64_t past = sums_[m].link - problem_->window_bytes[m];
    if (past <= 0) continue;
    if (problem_->link_ns_per_byte <= 0) {
      broken += past;
    } else {
      cost +=
          static_cast<int64_t>(std::ceil(problem_->link_ns_per_byte * static_cast<double>(past)));
    }
  }
  return broken > 0 ? Standing{kInfeasible + broken, device_} : Standing{cost, device_};
}

bool TensorSearch::improve(const TensorProblem& problem, int64_t enough_ns,
                           std::vector<int>& choice) {
  problem_ = &problem;
  choice_.assign(problem.groups.size(), -1);
  sums_.assign(problem.window_bytes.size(), {});
  device_ = host_ = 0;
  for (size_t g = 0; g < choice.size(); ++g) set(static_cast<int>(g), choice[g]);
  best_standing_ = standing();
  best_ = choice_;
  const bool through = search_through();
  if (!through) {
    trials_left_ = kMaxTrials;
    while (best_standing_.cost > enough_ns && trials_left_ > 0 && improve_once()) {
    }
  }
  choice = best_;
  cost_ = best_standing_.cost;
  return through;
}

bool TensorSearch::search_through() {
  if (choice_.size() > kMaxSearchedGroups) return false;
  nodes_left_ = kMaxNodes;
  for (size_t g = 0; g < choice_.size(); ++g) unset(static_cast<int>(g));
  descend(0);
  for (size_t g = 0; g < choice_.size(); ++g) set(static_cast<int>(g), best_[g]);
  return nodes_left_ > 0;
}

// Everything only grows from group to group, so a part that is no better than the best is left.
void TensorSearch::descend(int group) {
  if (--nodes_left_ <= 0) return;
  const Standing now = standing();
  if (now.cost >= best_standing_.cost) return;
  if (group == static_cast<int>(problem_->groups.size())) {
    best_standing_ = now;
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

// The best change of one choice, else the first good change of two.
bool TensorSearch::improve_once() {
  const int groups = static_cast<int>(problem_->groups.size());
  int best_group = -1, best_option = -1;
  for (int g = 0; g < groups && trials_left_ > 0; ++g) {
    const int old = best_[g];
    for (int o = problem_->groups[g].first_option; o < problem_->groups[g].end_option; ++o) {
      if (o == old) continue;
      --trials_left_;
      set(g, o);
      const Standing now = standing();
      if (!(now < best_standing_)) continue;
      best_standing_ = now;
      best_group = g;
      best_option = o;
    }
    set(g, old);
  }
  if (best_group >= 0) {
    set(best_group, best_option);
    best_ = choice_;
    return true;
  }
  for (int g = 0; g < groups && trials_left_ > 0; ++g) {
    const int old = best_[g];
    for (int o = problem_->groups[g].first_option; o < problem_->groups[g].end_option; ++o) {
      if (o == old) continue;
      set(g, o);
      for (int h = g + 1; h < groups && trials_left_ > 0; ++h) {
        const int other = best_[h];
        for (int q = problem_->groups[h].first_option; q < problem_->groups[h].end_option; ++q) {
          if (q == other) continue;
          --trials_left_;
          set(h, q);
          if (standing() < best_standing_) {
            best_standing_ = standing();
            best_ = choice_;
            return true;
          }
        }
        set(h, other);
      }
    }
    set(g, old);
  }
  return false;
}

}  // namespace bagualu
