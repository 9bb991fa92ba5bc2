#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/provision/pool.h"

namespace bagualu {

/// The linear relaxation of a pool problem: options may be mixed.
///
/// Every group starts at its cheapest option and steps along the lower convex hull of its (bytes,
/// ns) options; the steps of all groups are taken by rising ns per byte until the need is met or
/// the link is cheaper. The cost of a micro-batch past its bubble is a convex function of the bytes
/// it gives up, so this is the optimum (docs/design.md, "Cost and search").
///
/// The bound is not read off the steps taken but evaluated as the dual function at their
/// multipliers, so that it holds whatever the steps were.
class PoolRelaxation {
 public:
  void solve(const PoolProblem& problem);

  bool feasible() const { return missing_ <= 0; }
  int64_t missing_bytes() const { return missing_; }
  /// Every step that was taken in part is taken in full: feasible if the relaxation is.
  const std::vector<int>& rounded() const { return choice_; }
  int64_t bound_ns() const { return static_cast<int64_t>(bound_); }
  double bound() const { return bound_; }

  /// theta_m ns + mu_m bytes + lambda fixed bytes of the option, above the least one of its group:
  /// what choosing it adds to the bound.
  double reduced_cost(int group, int option) const { return priced(group, option) - least_[group]; }
  int least_option(int group) const { return least_option_[group]; }
  /// True if the micro-batch is past its window and its bubble, so that bytes and time have their
  /// full prices.
  bool is_linear(int microbatch) const {
    return duals_[microbatch].theta == 1 && duals_[microbatch].mu == lambda_;
  }
  /// Price of a byte on the device, ns.
  double lambda() const { return lambda_; }

 private:
  struct Step {
    double slope = 0;
    int64_t bytes = 0;
    int64_t ns = 0;
    int group = 0;
    int to = 0;
    int64_t bytes_left = 0;
  };
  struct Dual {
    double theta = 1;  // of time
    double mu = 0;     // of retained bytes
    double least = 0;  // sum over the groups
  };
  struct Progress {  // of one micro-batch
    int64_t excess = 0;
    int64_t ns = 0;
    double last_slope = -1;        // of the last step that was paid for
    double bubble_end_slope = -1;  // of the step at which the bubble was used up
    bool bubble_covers_all = false;
  };

  void solve_weighted();
  void weigh_windows();
  int64_t retained_bytes(int microbatch) const;
  int64_t weighted(int microbatch, int64_t bytes) const;
  void start();
  void add_steps(int group);
  void take_hidden(int microbatch);
  void take_paid();
  void use(Step& step, int64_t bytes);
  void set_duals();
  void evaluate_bound();
  double priced(int group, int option) const {
    const PoolOption& o = problem_->options[option];
    const Dual& dual = duals_[problem_->groups[group].microbatch];
    return dual.theta * static_cast<double>(o.ns) + dual.mu * static_cast<double>(o.bytes) +
           lambda_ * static_cast<double>(o.fixed_bytes);
  }

  const PoolProblem* problem_ = nullptr;
  std::vector<Step> steps_;
  std::vector<std::pair<double, int>> order_;
  std::vector<int> choice_;
  std::vector<Progress> progress_;
  std::vector<Dual> duals_;
  std::vector<double> least_;
  std::vector<int> least_option_;
  std::vector<double> weight_;  // by micro-batch, of retained bytes and the window
  double lambda_ = 0;
  int64_t need_at_start_ = 0;
  int64_t need_ = 0;
  int64_t missing_ = 0;
  double bound_ = 0;
};

}  // namespace bagualu
