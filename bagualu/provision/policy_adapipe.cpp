// adapipe: the recompute that a stage needs at one load, solved once and kept for the whole run.
// After the published description of AdaPipe (Sun et al., ASPLOS 2024): every unit of a stage is
// saved or recomputed, its bytes count once per micro-batch in flight, and a knapsack over memory
// finds the units whose saving avoids most recompute time. Its other half, moving layers between
// stages, has no place here. Layer outputs, routing and rows behind a collective are always kept.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/provision/planning_policy.h"
#include "bagualu/provision/quantised_knapsack.h"

namespace bagualu {
namespace {

// An item is rounded up by at most a cell, 1/8192 of the capacity; more cells make the bisection of
// largest_surviving_factor() slow on large graphs.
constexpr int64_t kMaxCells = 8192;

class AdaPipe final : public PlanningPolicy {
 public:
  AdaPipe(const ProvisionContext& context, const PolicyOptions& options)
      : PlanningPolicy(context), in_flight_(options.adapipe_in_flight) {
    plan_ = fitted(loads_at(options.adapipe_fit_imbalance));
  }

  std::string_view name() const override { return "adapipe"; }
  Decision decide(const GateInput& input) override { return describe(input, plan_); }

 private:
  Plan fitted(const std::vector<LayerLoad>& loads) {
    const Plan least = uniform_plan(graph_, kRecompute);
    const Plan most = uniform_plan(graph_, kSave);
    if (excess_bytes(loads, most) == 0) return most;
    std::vector<int> units;
    std::vector<KnapsackItem> items;
    const std::vector<int64_t> bytes = graph_.storage_bytes(loads);
    for (size_t u = 0; u < graph_.units.size(); ++u) {
      if (least.residency[u] != kRecompute) continue;
      const auto unit = static_cast<int>(u);
      KnapsackItem item;
      for (int s : graph_.units[u].storages) item.bytes += bytes[static_cast<size_t>(s)];
      item.bytes *= in_flight_;
      item.worth = context_.cost->residency_ns(graph_, unit, kRecompute,
                                               graph_.load_of(graph_.units[u].layer, loads));
      units.push_back(unit);
      items.push_back(item);
    }
    // The items know nothing of workspaces and of what a rebuild holds. The replay does: by what it
    // shows above the budget the items have to hold less, until a plan really fits.
    int64_t capacity = context_.activation_budget_bytes - in_flight_ * carried_bytes(loads, least);
    while (capacity >= 0) {
      const std::vector<char> saved = quantised_knapsack(items, capacity, kMaxCells);
      Plan plan = least;
      int64_t held = 0;
      for (size_t i = 0; i < items.size(); ++i) {
        if (saved[i] == 0) continue;
        plan.residency[static_cast<size_t>(units[i])] = kSave;
        held += items[i].bytes;
      }
      const int64_t excess = excess_bytes(loads, plan);
      if (excess == 0) return plan;
      capacity = held - excess;
    }
    return least;
  }

  // What stays on the device between forward and backward.
  int64_t carried_bytes(const std::vector<LayerLoad>& loads, const Plan& plan) const {
    MicrobatchState state = initial_state(graph_);
    Timeline timeline;
    while (append_forward(graph_, plan, state, timeline) >= 0) {
    }
    MemoryReplay replay;
    replay_memory(graph_, plan, memory_table(graph_, loads), timeline, 0, replay);
    return replay.live_bytes;
  }

  int64_t excess_bytes(const std::vector<LayerLoad>& loads, const Plan& plan) {
    if (context_.activation_budget_bytes == 0) return 0;
    const int64_t others = in_flight_ > 1 ? (in_flight_ - 1) * carried_bytes(loads, plan) : 0;
    const int64_t peak = describe_start(loads, plan).predicted_peak_bytes + others;
    return std::max<int64_t>(0, peak - context_.activation_budget_bytes);
  }

  const int64_t in_flight_;
  Plan plan_;
};

}  // namespace

std::unique_ptr<Policy> make_adapipe(const ProvisionContext& context,
                                     const PolicyOptions& options) {
  check_factor("adapipe_fit_imbalance", options.adapipe_fit_imbalance);
  if (options.adapipe_in_flight < 1) {
    throw InvalidInput("options", "adapipe_in_flight", std::to_string(options.adapipe_in_flight),
                       "at least 1");
  }
  return std::make_unique<AdaPipe>(context, options);
}

}  // namespace bagualu
