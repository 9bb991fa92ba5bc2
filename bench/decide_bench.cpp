// How fast decisions are and how close to the optimum, on one core: the stage planner without any
// plan at hand, and the policy `adaptive` at every gate of whole micro-batches with recorded loads.
// Prints one JSON line per figure.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/base/json.h"
#include "decide_setup.h"
#include "figures.h"
#include "stage_cases.h"

namespace bagualu {
namespace {

const std::filesystem::path kRoot = BAGUALU_SOURCE_DIR;
constexpr int64_t kStageLayers = 8;
constexpr int kPasses = 15;

// --- the stage planner ---

struct StageTimes {
  std::vector<int64_t> ns;
  double largest_gap = 0;  ///< (cost - bound) / max(cost, 5 ms)
  int64_t feasible = 0;
  int64_t certified = 0;  ///< within max(1 %, 0.05 ms) of the bound
  int64_t closed = 0;
};

/// Every case once with loads that its warm planner has not seen: other rows in every layer. The
/// fastest of three planners in the same state, so that an interrupt is not counted.
StageTimes time_stages(int64_t microbatches, int64_t cases, const PoolTolerance& effort) {
  constexpr int kRepeats = 3;
  std::mt19937_64 random(static_cast<uint64_t>(microbatches));
  StageTimes times;
  const RealisticOptions options{kStageLayers, static_cast<int>(microbatches)};
  for (int64_t i = 0; i < cases; ++i) {
    const auto stage = realistic_case(kRoot / "configs", options, random);
    const auto fresh = stage->loads;
    auto before = fresh;
    for (auto& loads : before) {
      for (LayerLoad& load : loads) load = {load.rows + 1 + load.rows / 16, load.piece_rows + 1};
    }
    StagePlan plan;
    int64_t fastest = INT64_MAX;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      StagePlanner planner(stage->graph, stage->cost, stage->allow_quantise);
      planner.set_tolerance(effort);
      stage->loads = before;  // the problem points there
      planner.plan(stage->problem, plan);
      stage->loads = fresh;
      fastest = std::min(fastest, timed_ns([&] { planner.plan(stage->problem, plan); }));
    }
    times.ns.push_back(fastest);
    if (!plan.feasible) continue;
    ++times.feasible;
    times.closed += plan.closed ? 1 : 0;
    const auto cost = static_cast<double>(plan.exposed_ns);
    const double gap = cost - static_cast<double>(plan.bound_ns);
    times.largest_gap = std::max(times.largest_gap, gap / std::max(cost, 5e6));
    times.certified += gap <= std::max(0.01 * cost, 5e4) ? 1 : 0;
  }
  return times;
}

void bench_stages(int64_t cases) {
  const StageTimes one = time_stages(1, cases, PoolTolerance::at_gate());
  const StageTimes four = time_stages(4, cases, PoolTolerance::at_gate());
  const StageTimes full = time_stages(1, cases, {});
  const Json common = {{"cases", cases}, {"layers", kStageLayers}};
  const auto line = [&](const char* figure, double fraction) {
    Json more = common;
    more["four_microbatches"] = us(quantile(four.ns, fraction));
    more["full_effort"] = us(quantile(full.ns, fraction));
    print(figure, "us", us(quantile(one.ns, fraction)), more);
  };
  line("decide_uncached_p50", 0.5);
  line("decide_uncached_p99", 0.99);
  line("decide_uncached_max", 1.0);
  const auto share = [](const StageTimes& times) {
    return static_cast<double>(times.certified) / static_cast<double>(times.feasible);
  };
  Json more = common;
  more.update({{"feasible", one.feasible},
               {"certified_share", share(one)},
               {"full_effort", full.largest_gap},
               {"full_effort_certified_share", share(full)},
               {"four_microbatches", four.largest_gap},
               {"four_microbatches_certified_share", share(four)},
               {"gap", "(cost - bound) / max(cost, 5 ms)"},
               {"certified", "cost - bound within max(1 % of cost, 0.05 ms)"}});
  print("decide_gap_max", "ratio", one.largest_gap, more);
}

// --- the policy ---

struct Decisions {
  std::vector<int64_t> searched, calm, hit;  ///< ns
  int64_t total_ns = 0;
  int64_t count = 0;

  void add(const TimedDecision& decision) {
    total_ns += decision.ns;
    ++count;
    if (decision.gate < 0) return;
    if (!decision.cache_hit) searched.push_back(decision.ns);
    if (decision.cache_hit && decision.mitigated) hit.push_back(decision.ns);
    if (decision.cache_hit && !decision.mitigated) calm.push_back(decision.ns);
  }
  double hit_share() const {
    return 1.0 - static_cast<double>(searched.size()) / static_cast<double>(count);
  }
};

Decisions decide_all(const PolicySetup& setup, Policy& policy,
                     const std::vector<std::vector<LayerLoad>>& microbatches) {
  Decisions decisions;
  for (const auto& loads : microbatches) {
    drive_timed(setup.context, policy, loads,
                [&](const TimedDecision& decision) { decisions.add(decision); });
  }
  return decisions;
}

void bench_searches(const PolicySetup& setup, int64_t microbatches) {
  std::mt19937_64 random(5);
  const auto policy = make_policy("adaptive", setup.context, {});
  decide_all(setup, *policy, spiked_loads(setup, 20, random));  // warm
  const Decisions decisions = decide_all(setup, *policy, spiked_loads(setup, microbatches, random));
  const Json more = {{"searches", decisions.searched.size()},
                     {"decisions", decisions.count},
                     {"max_us", us(quantile(decisions.searched, 1.0))}};
  print("decide_policy_uncached_p50", "us", us(quantile(decisions.searched, 0.5)), more);
  print("decide_policy_uncached_p99", "us", us(quantile(decisions.searched, 0.99)), more);
}

/// One iteration, from an empty cache and again: medians over passes with a policy each. `least` of
/// the passes is the one that other programs disturbed least.
void bench_iteration(const PolicySetup& setup, const std::string& suffix, const char* source,
                     const std::vector<std::vector<LayerLoad>>& iteration) {
  std::vector<int64_t> cold, warm, calm, hit, searched;
  double cold_share = 0, warm_share = 0;
  int64_t count = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto policy = make_policy("adaptive", setup.context, {});
    const Decisions first = decide_all(setup, *policy, iteration);
    const Decisions again = decide_all(setup, *policy, iteration);
    cold.push_back(first.total_ns);
    warm.push_back(again.total_ns);
    calm.insert(calm.end(), first.calm.begin(), first.calm.end());
    searched.insert(searched.end(), first.searched.begin(), first.searched.end());
    hit.insert(hit.end(), again.hit.begin(), again.hit.end());
    cold_share = first.hit_share();
    warm_share = again.hit_share();
    count = first.count;
  }
  Json more = {{"loads", source},
               {"least", us(*std::min_element(cold.begin(), cold.end()))},
               {"microbatches", iteration.size()},
               {"decisions", count},
               {"searches", searched.size() / kPasses},
               {"hit_share", cold_share}};
  if (!searched.empty()) {
    more["search_p50_us"] = us(quantile(searched, 0.5));
    more["search_max_us"] = us(quantile(searched, 1.0));
  }
  print("decide_iteration_total" + suffix, "us", us(quantile(cold, 0.5)), more);
  Json warm_more = {{"loads", source},
                    {"least", us(*std::min_element(warm.begin(), warm.end()))},
                    {"decisions", count},
                    {"hit_share", warm_share}};
  if (!hit.empty()) warm_more["known_mitigation_p50_us"] = us(quantile(hit, 0.5));
  print("decide_iteration_total" + suffix + "_warm", "us", us(quantile(warm, 0.5)), warm_more);
  print("decide_cached_p50" + suffix, "us", us(quantile(calm, 0.5)),
        {{"loads", source}, {"gates", calm.size()}, {"p99_us", us(quantile(calm, 0.99))}});
}

void bench(bool quick) {
  bench_stages(quick ? 300 : 3000);
  const PolicySetup setup(kRoot / "configs");
  bench_searches(setup, quick ? 100 : 1000);
  bench_iteration(setup, "", "routing_trace.csv",
                  trace_iteration(setup, kRoot / "bench/data/routing_trace.csv"));
  bench_iteration(setup, "_train", "train_rows.csv",
                  train_iteration(setup, kRoot / "bench/data/train_rows.csv"));
}

}  // namespace
}  // namespace bagualu

int main(int argc, char** argv) {
  bagualu::bench(bagualu::is_quick(argc, argv, "decide_bench"));
  return 0;
}
