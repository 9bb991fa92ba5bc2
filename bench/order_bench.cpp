// How fast a pipeline order is made for given times, and whether ZB-V is ever longer than 1F1B with
// the same work on every rank. Prints one JSON line per figure; medians of CPU time.
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/base/json.h"
#include "bagualu/schedule/pipeline_figures.h"
#include "bagualu/schedule/pipeline_fit.h"
#include "figures.h"

namespace bagualu {
namespace {

constexpr PipelineKind kZbV = PipelineKind::kZbV;

PipelineTimes v_times(int pp, int m, const std::function<PassTimes(int stage)>& draw) {
  PipelineTimes times;
  for (int s = 0; s < 2 * pp; ++s) {
    const PassTimes at = draw(s);
    const auto count = static_cast<size_t>(m);
    times.forward_ns.emplace_back(count, at.forward_ns);
    times.backward_ns.emplace_back(count, at.input_grad_ns + at.weight_grad_ns);
    times.weight_grad_ns.emplace_back(count, at.weight_grad_ns);
  }
  return times;
}

// The rival takes equal stages. Stages that differ by up to two fifths let no bound end ours early.
void making(int pp, int m, int repeats, double rival_ms) {
  const PipelineTimes equal = v_times(pp, m, [](int) { return PassTimes{}; });
  const PipelineTimes unequal = v_times(pp, m, [](int stage) {
    return PassTimes{10 + stage % 5 * 2, 11, 8, 0};
  });
  PipelineOrder order;
  const Spread time =
      measure(repeats, cpu_ns, [&] { order = fitted_order(kZbV, pp, 2, m, equal); });
  const Spread unequal_time =
      measure(repeats, cpu_ns, [&] { fitted_order(kZbV, pp, 2, m, unequal); });
  const int64_t step = simulate(order, equal).makespan_ns;
  const auto closed = closed_makespan_ns(kZbV, pp, 2, m, PassTimes{});
  BGL_CHECK(closed && *closed == step, step, "is not the closed form");
  print("order_zbv_p" + std::to_string(pp) + "_m" + std::to_string(m), "ms", 1e3 * time.median,
        {{"least", 1e3 * time.least},
         {"worst", 1e3 * time.worst},
         {"unequal_stages_ms", 1e3 * unequal_time.median},
         {"bubbles", "as the closed form"},
         {"rival", "sail-sg zero-bubble, ZB-V scheduler (Python), same machine"},
         {"rival_ms", rival_ms}});
}

// 1F1B with the work of both of a rank's stages.
int64_t one_f_one_b_ns(int pp, int m, const PipelineTimes& halves) {
  const PipelineOrder plain = one_f_one_b(pp, m);
  PipelineTimes times = equal_times(plain, 0, 0);
  for (size_t r = 0; r < static_cast<size_t>(pp); ++r) {
    const size_t mirrored = static_cast<size_t>(2 * pp) - 1 - r;
    for (size_t i = 0; i < static_cast<size_t>(m); ++i) {
      times.forward_ns[r][i] = halves.forward_ns[r][i] + halves.forward_ns[mirrored][i];
      times.backward_ns[r][i] = halves.backward_ns[r][i] + halves.backward_ns[mirrored][i];
    }
  }
  return simulate(plain, times).makespan_ns;
}

struct Race {
  int worse = 0;      ///< longer than 1F1B
  int forbidden = 0;  ///< of these, as short as any order on a V with this memory can be
  double mean_ratio = 0;
};

Race race(int instances, bool like_stages) {
  std::mt19937 random(20261130);
  const auto between = [&random](int64_t least, int64_t most) {
    return least + static_cast<int64_t>(random() % static_cast<uint32_t>(most - least + 1));
  };
  Race result;
  for (int i = 0; i < instances; ++i) {
    const int pp = static_cast<int>(between(1, 6));
    const int m = static_cast<int>(between(1, 12));
    const PipelineTimes times = v_times(pp, m, [&](int) {
      const int64_t forward = like_stages ? between(50, 200) : between(1, 20);
      const int64_t input = like_stages ? forward * between(8, 16) / 10 : between(1, 20);
      const int64_t weight = like_stages ? forward * between(5, 12) / 10 : between(1, 20);
      return PassTimes{forward, input, weight, 0};
    });
    const int64_t step = simulate(fitted_order(kZbV, pp, 2, m, times), times).makespan_ns;
    const int64_t plain = one_f_one_b_ns(pp, m, times);
    result.mean_ratio += static_cast<double>(step) / static_cast<double>(plain) / instances;
    if (step <= plain) continue;
    ++result.worse;
    if (step == least_v_step_ns(pp, m, times)) ++result.forbidden;
  }
  return result;
}

void bench(bool quick) {
  making(16, 64, 51, 417);
  making(32, 128, 21, 1614);
  const int instances = quick ? 3'000 : 30'000;
  for (bool like_stages : {true, false}) {
    const Race at = race(instances, like_stages);
    print(like_stages ? "order_zbv_worse_stage_times" : "order_zbv_worse_any_times", "instances",
          at.worse,
          {{"of", instances},
           {"worse_where_memory_allows_better", at.worse - at.forbidden},
           {"mean_step_over_1f1b", at.mean_ratio}});
  }
}

}  // namespace
}  // namespace bagualu

int main(int argc, char** argv) {
  bagualu::bench(bagualu::is_quick(argc, argv, "order_bench"));
  return 0;
}
