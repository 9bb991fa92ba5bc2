#include "bagualu/provision/pool_relaxation.h"

#include <algorithm>
#include <cmath>

namespace bagualu {
namespace {

constexpr int kWeighings = 10;

}  // namespace

void PoolRelaxation::solve(const PoolProblem& problem) {
  problem_ = &problem;
  weight_.assign(problem.microbatches.size(), 1.0);
  solve_weighted();
  const bool has_codes =
      std::any_of(problem.options.begin(), problem.options.end(),
                  [](const PoolOption& option) { return option.fixed_bytes > 0; });
  if (has_codes && need_at_start_ > 0) weigh_windows();
}

// A window takes no encoded copies. That the excess of a micro-batch is at least its codes plus any
// share of (retained bytes - window) holds for every share in [0, 1]; the right one is where what
// is retained just fills the window. Bisection per micro-batch, all at once; the best bound stays.
void PoolRelaxation::weigh_windows() {
  const size_t count = weight_.size();
  std::vector<double> low(count, 0.0), high(count, 1.0), best = weight_;
  double best_bound = bound_;
  for (int round = 0; round < kWeighings; ++round) {
    bool changed = false;
    for (size_t m = 0; m < count; ++m) {
      if (problem_->microbatches[m].window_bytes == 0) continue;
      (retained_bytes(static_cast<int>(m)) < problem_->microbatches[m].window_bytes ? high[m]
                                                                                    : low[m]) =
          weight_[m];
      const double next = 0.5 * (low[m] + high[m]);
      changed = changed || std::abs(next - weight_[m]) > 1e-3;
      weight_[m] = low[m] == 1.0 ? 1.0 : next;
    }
    if (!changed) break;
    solve_weighted();
    if (bound_ <= best_bound) continue;
    best_bound = bound_;
    best = weight_;
  }
  weight_ = best;
  solve_weighted();
}

int64_t PoolRelaxation::retained_bytes(int microbatch) const {
  int64_t sum = 0;
  for (size_t g = 0; g < choice_.size(); ++g) {
    if (problem_->groups[g].microbatch != microbatch) continue;
    sum += problem_->options[choice_[g]].bytes;
  }
  return sum;
}

int64_t PoolRelaxation::weighted(int microbatch, int64_t bytes) const {
  const double weight = weight_[microbatch];
  return weight == 1.0 ? bytes : static_cast<int64_t>(weight * static_cast<double>(bytes));
}

void PoolRelaxation::solve_weighted() {
  start();
  need_at_start_ = need_;
  if (need_ > 0) {
    std::sort(order_.begin(), order_.end());
    for (int m = 0; m < static_cast<int>(progress_.size()); ++m) take_hidden(m);
    take_paid();
  }
  set_duals();
  evaluate_bound();
}

void PoolRelaxation::start() {
  const int groups = static_cast<int>(problem_->groups.size());
  steps_.clear();
  order_.clear();
  choice_.assign(static_cast<size_t>(groups), -1);
  progress_.assign(problem_->microbatches.size(), {});
  lambda_ = 0;
  for (int g = 0; g < groups; ++g) add_steps(g);
  need_ = -problem_->budget_bytes;
  for (size_t m = 0; m < progress_.size(); ++m) {
    progress_[m].excess = std::max<int64_t>(
        0, progress_[m].excess -
               weighted(static_cast<int>(m), problem_->microbatches[m].window_bytes));
    need_ += progress_[m].excess;
  }
  missing_ = 0;
}

// From the cheapest option along the hull: each step is the flattest one to fewer bytes.
void PoolRelaxation::add_steps(int group) {
  const PoolGroup& spec = problem_->groups[group];
  const PoolOption* options = problem_->options.data();
  const auto bytes_of = [&](int o) {
    return weighted(spec.microbatch, options[o].bytes) + options[o].fixed_bytes;
  };
  int at = spec.first_option;
  for (int o = at + 1; o < spec.end_option; ++o) {
    if (options[o].ns < options[at].ns ||
        (options[o].ns == options[at].ns && bytes_of(o) < bytes_of(at))) {
      at = o;
    }
  }
  choice_[group] = at;
  progress_[spec.microbatch].excess += bytes_of(at);
  progress_[spec.microbatch].ns += options[at].ns;
  for (;;) {
    int next = -1;
    double slope = 0;
    for (int o = spec.first_option; o < spec.end_option; ++o) {
      const int64_t bytes = bytes_of(at) - bytes_of(o);
      if (bytes <= 0) continue;
      const double s =
          static_cast<double>(options[o].ns - options[at].ns) / static_cast<double>(bytes);
      if (next < 0 || s < slope || (s == slope && bytes_of(o) < bytes_of(next))) {
        next = o;
        slope = s;
      }
    }
    if (next < 0) return;
    order_.emplace_back(slope, static_cast<int>(steps_.size()));
    const int64_t bytes = bytes_of(at) - bytes_of(next);
    steps_.push_back({slope, bytes, options[next].ns - options[at].ns, group, next, bytes});
    at = next;
  }
}

void PoolRelaxation::use(Step& step, int64_t bytes) {
  Progress& progress = progress_[problem_->groups[step.group].microbatch];
  step.bytes_left -= bytes;
  progress.excess -= bytes;
  need_ -= bytes;
  choice_[step.group] = step.to;
}

// What the bubble hides costs nothing, whatever its slope; the flattest steps hide most bytes.
void PoolRelaxation::take_hidden(int microbatch) {
  Progress& progress = progress_[microbatch];
  int64_t left = problem_->microbatches[microbatch].bubble_ns - progress.ns;
  if (left <= 0) return;
  for (const auto& [slope, index] : order_) {
    Step& step = steps_[index];
    if (problem_->groups[step.group].microbatch != microbatch) continue;
    if (progress.excess <= 0 || need_ <= 0) break;
    int64_t bytes = std::min(step.bytes, progress.excess);
    if (slope > 0) {
      bytes = std::min(bytes, static_cast<int64_t>(static_cast<double>(left) / slope));
    }
    left -= static_cast<int64_t>(std::ceil(slope * static_cast<double>(bytes)));
    if (bytes > 0) use(step, bytes);
    if (bytes < step.bytes && progress.excess > 0) {
      progress.bubble_end_slope = slope;
      return;
    }
  }
  progress.bubble_covers_all = true;
}

void PoolRelaxation::take_paid() {
  const bool has_link = problem_->overflow_limit_bytes > 0;
  const double link = problem_->link_ns_per_byte;
  int64_t link_left = has_link ? problem_->overflow_limit_bytes : 0;
  for (const auto& [slope, index] : order_) {
    if (need_ <= 0) return;
    if (link_left > 0 && slope >= link) {
      lambda_ = std::max(lambda_, link);
      const int64_t bytes = std::min(link_left, need_);
      link_left -= bytes;
      need_ -= bytes;
      if (need_ <= 0) return;
    }
    Step& step = steps_[index];
    Progress& progress = progress_[problem_->groups[step.group].microbatch];
    const int64_t bytes = std::min({step.bytes_left, progress.excess, need_});
    if (bytes <= 0) continue;
    use(step, bytes);
    lambda_ = slope;
    progress.last_slope = slope;
  }
  if (need_ > 0 && link_left > 0) {
    lambda_ = std::max(lambda_, link);
    need_ -= std::min(link_left, need_);
  }
  missing_ = std::max<int64_t>(0, need_);
}

void PoolRelaxation::set_duals() {
  duals_.assign(progress_.size(), {});
  for (size_t m = 0; m < progress_.size(); ++m) {
    const Progress& progress = progress_[m];
    Dual& dual = duals_[m];
    dual.theta = 1;
    if (progress.last_slope >= 0) {
      dual.mu = progress.excess > 0 ? lambda_ : progress.last_slope;
    } else if (progress.bubble_end_slope >= 0) {
      dual.mu = lambda_;
      dual.theta =
          progress.bubble_end_slope > 0 ? std::min(1.0, lambda_ / progress.bubble_end_slope) : 1.0;
    } else if (progress.bubble_covers_all) {
      dual.theta = 0;
      dual.mu = progress.excess > 0 ? lambda_ : 0.0;
    } else if (progress.excess > 0) {
      dual.mu = lambda_;
    }
    dual.mu *= weight_[m];
    // Nothing was taken and the bubble is not full: time has no price.
    if (progress.last_slope < 0 && lambda_ == 0 &&
        progress.ns <= problem_->microbatches[m].bubble_ns) {
      dual.theta = 0;
    }
  }
}

// sum_g min_o (theta ns + mu bytes + lambda fixed) - sum_m (theta bubble + mu window) - lambda
// budget, a lower bound for every 0 <= theta <= 1 and 0 <= mu <= lambda; past the link's price the
// overflow pays back.
void PoolRelaxation::evaluate_bound() {
  const int groups = static_cast<int>(problem_->groups.size());
  least_.resize(static_cast<size_t>(groups));
  least_option_.resize(static_cast<size_t>(groups));
  double bound = -lambda_ * static_cast<double>(problem_->budget_bytes);
  if (problem_->overflow_limit_bytes > 0) {
    bound -= std::max(0.0, lambda_ - problem_->link_ns_per_byte) *
             static_cast<double>(problem_->overflow_limit_bytes);
  }
  for (int g = 0; g < groups; ++g) {
    const PoolGroup& group = problem_->groups[g];
    int best = group.first_option;
    double least = priced(g, best);
    for (int o = best + 1; o < group.end_option; ++o) {
      const double value = priced(g, o);
      if (value < least) {
        least = value;
        best = o;
      }
    }
    least_[g] = least;
    least_option_[g] = best;
    duals_[group.microbatch].least += least;
  }
  for (size_t m = 0; m < duals_.size(); ++m) {
    bound += duals_[m].least -
             duals_[m].theta * static_cast<double>(problem_->microbatches[m].bubble_ns) -
             duals_[m].mu * static_cast<double>(problem_->microbatches[m].window_bytes);
  }
  // Sums of some hundred products: their rounding is far below 1e-9 of the largest term.
  bound_ = std::max(0.0, std::floor(bound * (1.0 - 1e-9)) - 1.0);
}

}  // namespace bagualu
