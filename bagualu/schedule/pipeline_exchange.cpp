#include "bagualu/schedule/pipeline_exchange.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <random>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

// Of a few passes; farther ones are reached step by step.
constexpr size_t kFarthest = 6;
// As a share of the step: at first a longer step by so much is still taken one time in e.
constexpr double kHeat = 0.02;

class Annealing {
 public:
  Annealing(const PipelineOrder& order, const PipelineTimes& times, const ExchangeSearch& search)
      : times_(times), search_(search), now_(order), best_(order) {
    now_ns_ = best_ns_ = simulate(order, times).makespan_ns;
  }

  PipelineOrder run() {
    const double heat = kHeat * static_cast<double>(best_ns_);
    for (int i = 0; i < search_.tries && best_ns_ > search_.goal_ns; ++i) {
      const double left = static_cast<double>(search_.tries - i) / search_.tries;
      try_one(std::max(heat * left, 1e-9));
    }
    return std::move(best_);
  }

 private:
  // minstd_rand's own range, so that every library draws the same.
  size_t drawn(size_t count) { return random_() % count; }

  void try_one(double heat) {
    auto& list = now_.ranks[drawn(now_.ranks.size())];
    const size_t from = drawn(list.size());
    const size_t far = 1 + drawn(kFarthest);
    size_t to = from;
    if (drawn(2) == 0) {
      to = std::min(list.size() - 1, from + far);
    } else {
      to = from < far ? 0 : from - far;
    }
    if (to == from || crosses_own(list, from, to)) return;
    move(list, from, to);
    const std::optional<int64_t> ns = step_ns();
    const bool keep =
        ns && (*ns <= now_ns_ || std::exp(static_cast<double>(now_ns_ - *ns) / heat) > chance());
    if (!keep) {
      move(list, to, from);
      return;
    }
    now_ns_ = *ns;
    if (now_ns_ >= best_ns_) return;
    best_ns_ = now_ns_;
    best_ = now_;
  }

  double chance() {
    return static_cast<double>(random_() - std::minstd_rand::min()) /
           static_cast<double>(std::minstd_rand::max());
  }

  // Passes of one micro-batch on one rank wait for each other, most of them directly.
  static bool crosses_own(const std::vector<PipelinePass>& list, size_t from, size_t to) {
    const PipelinePass& pass = list[from];
    for (size_t i = std::min(from, to); i <= std::max(from, to); ++i) {
      if (i != from && list[i].microbatch == pass.microbatch && list[i].stage == pass.stage) {
        return true;
      }
    }
    return false;
  }

  static void move(std::vector<PipelinePass>& list, size_t from, size_t to) {
    const auto at = [&list](size_t i) { return list.begin() + static_cast<std::ptrdiff_t>(i); };
    if (from < to) {
      std::rotate(at(from), at(from + 1), at(to + 1));
    } else {
      std::rotate(at(to), at(from), at(from + 1));
    }
  }

  // Nothing if the order holds too much or waits for itself.
  std::optional<int64_t> step_ns() const {
    const std::vector<int> held = in_flight(now_);
    if (*std::max_element(held.begin(), held.end()) > search_.limit) return std::nullopt;
    try {
      return simulate(now_, times_).makespan_ns;
    } catch (const InternalError&) {
      return std::nullopt;
    }
  }

  const PipelineTimes& times_;
  const ExchangeSearch& search_;
  PipelineOrder now_, best_;
  int64_t now_ns_ = 0;
  int64_t best_ns_ = 0;
  std::minstd_rand random_;
};

}  // namespace

PipelineOrder exchange_passes(const PipelineOrder& order, const PipelineTimes& times,
                              const ExchangeSearch& search) {
  return Annealing(order, times, search).run();
}

}  // namespace bagualu
