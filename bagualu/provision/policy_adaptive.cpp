// adaptive: nothing in calm; in a spike the plan of least exposed time that fits, for as long as
// the spike lasts. Later layers are forecast as balanced; if they are not, later gates demote.
#include <algorithm>
#include <memory>
#include <utility>

#include "bagualu/provision/plan_cache.h"
#include "bagualu/provision/planning_policy.h"
#include "bagualu/schedule/block_replay.h"

namespace bagualu {
namespace {

// Looks at every fate, without a branch: some hundred of them at every gate.
bool any_given_up(const std::vector<StorageFate>& fates) {
  unsigned given_up = 0;
  for (const StorageFate fate : fates) {
    given_up |= static_cast<unsigned>(fate == StorageFate::kDropped) |
                static_cast<unsigned>(fate == StorageFate::kDraining) |
                static_cast<unsigned>(fate == StorageFate::kHost) |
                static_cast<unsigned>(fate == StorageFate::kEncoded);
  }
  return given_up != 0;
}

class Adaptive final : public PlanningPolicy {
 public:
  explicit Adaptive(const ProvisionContext& context)
      : PlanningPolicy(context),
        calm_(graph_, predictor_.dependence(), uniform_plan(graph_, kSave),
              build_timeline(graph_, uniform_plan(graph_, kSave))),
        calm_loads_(predictor_.loads()),
        search_(context_, predictor_) {
    calm_.update_all(predictor_.table());
    balanced_spans_ = calm_.spans();
  }

  std::string_view name() const override { return "adaptive"; }

  Decision decide(const GateInput& input) override {
    predictor_.set_loads(*input.loads);
    return any_given_up(input.state->storage) ? from_mitigated(input) : from_calm(input);
  }

 private:
  // Nothing was given up so far: the calm plan's actions are known, and only the blocks of layers
  // with another load are replayed.
  Decision from_calm(const GateInput& input) {
    follow_loads(*input.loads);
    const BlockReplay::Peak peak = calm_.peak_from(
        calm_.first_block(input.gate), input.memory.live_bytes, input.memory.host_live_bytes,
        due_backward_bytes(input), input.backward_resting_bytes - input.resting_bytes);
    const Prediction prediction{peak.bytes, peak.host_bytes};
    if (!predictor_.fits(prediction)) return mitigate(input, calm_.plan(), prediction);
    Decision decision;
    decision.plan = calm_.plan();
    decision.predicted_peak_bytes = std::max(prediction.peak_bytes, input.memory.peak_bytes);
    decision.cache_hit = true;
    return decision;
  }

  void follow_loads(const std::vector<LayerLoad>& loads) {
    if (loads == calm_loads_) return;
    const bool all_balanced =
        std::all_of(loads.begin(), loads.end(),
                    [this](const LayerLoad& load) { return load == context_.balanced; });
    if (all_balanced) {
      calm_.set_spans(balanced_spans_);
    } else {
      for (size_t layer = 0; layer < loads.size(); ++layer) {
        if (loads[layer] == calm_loads_[layer]) continue;
        calm_.update_layer(predictor_.table(), static_cast<int>(layer));
      }
    }
    calm_loads_ = loads;
  }

  // Part of the way is gone: first ask whether the rest may be as light as in calm.
  Decision from_mitigated(const GateInput& input) {
    Plan light = calm_.plan();
    keep_past_choices(graph_, *input.state, light);
    const Prediction prediction = predictor_.predict(input, light);
    if (!predictor_.fits(prediction)) return mitigate(input, light, prediction);
    Decision decision = describe(input, std::move(light), prediction);
    decision.cache_hit = true;
    return decision;
  }

  Decision mitigate(const GateInput& input, const Plan& light, const Prediction& without) {
    const int64_t needed = predictor_.excess_bytes(without);
    Decision decision = cached_or_solved(input, light);
    decision.needed_bytes = needed;
    decision.mitigated = true;
    return decision;
  }

  Decision cached_or_solved(const GateInput& input, const Plan& light) {
    const bool cacheable = input.resting.empty();
    if (cacheable) {
      mitigation_key(input, key_);
      if (const Plan* cached = cache_.find(key_)) {
        Decision decision = describe(input, *cached);
        decision.cache_hit = decision.feasible;
        if (decision.feasible) return decision;
      }
    }
    SearchResult result = solve(input, light);
    Decision decision = describe(input, result.plan, result.prediction);
    decision.exposed_ns = result.cost_ns;
    decision.bound_ns = result.bound_ns;
    decision.resting_plans = std::move(result.resting_plans);
    if (result.found && cacheable) cache_.insert(key_, std::move(result.plan));
    return decision;
  }

  // Those to come are forecast to hold what they hold in calm. Where the budget does not allow
  // that, they will be held down as well: in the end to what the survival plan leaves them.
  SearchResult solve(const GateInput& input, const Plan& light) {
    const int64_t held_down_bytes =
        std::min(input.backward_resting_bytes, input.least_backward_resting_bytes);
    if (input.backward_resting_bytes > held_down_bytes) {
      const SearchResult survival = search_.survival(input);
      bool safe = false;
      if (survival.found) {
        SearchResult result = solve_for(input, light, safe);
        if (safe) return result;
      }
    }
    GateInput held_down = input;
    held_down.backward_resting_bytes = held_down_bytes;
    bool safe = false;
    return solve_for(held_down, light, safe);
  }

  // A plan must fit the forecast and leave the way to the survival plan open: what it offloads has
  // to come back at once in backward, and encoded copies stay. The first plan that does both wins.
  // Resting micro-batches within their share of the budget pay only where that is needed.
  SearchResult solve_for(const GateInput& input, const Plan& light, bool& is_safe) {
    Plan in_force = *input.plan;
    keep_past_choices(graph_, *input.state, in_force);
    const Plan* incumbent = input.gate >= 0 ? &in_force : nullptr;
    is_safe = true;
    const int64_t share = context_.activation_budget_bytes / most_in_flight(input);
    SearchResult cheapest = search_.cheapest(input, light, {.spared_rest_bytes = share}, incumbent);
    if (survives(input, cheapest)) return cheapest;
    if (any_within(input, share)) {
      cheapest = search_.cheapest(input, light, {}, incumbent);
      if (survives(input, cheapest)) return cheapest;
    }
    SearchResult safe = search_.cheapest(input, light, {.survival_only = true});
    if (survives(input, safe)) return safe;
    SearchResult last = search_.last_resort(input, light);
    if (survives(input, last)) return last;
    // The budget is below the floor, or the forecast is. Forecast loads may still go well.
    is_safe = false;
    if (cheapest.found) return cheapest;
    return safe.found ? safe : last;
  }

  // Now, or when this micro-batch's backward begins.
  static int64_t most_in_flight(const GateInput& input) {
    const auto later = std::count(input.ahead.begin(), input.ahead.end(), PassKind::kForward);
    return 1 + std::max<int64_t>(later, static_cast<int64_t>(input.resting.size()));
  }

  static bool any_within(const GateInput& input, int64_t share) {
    return std::any_of(
        input.resting.begin(), input.resting.end(),
        [share](const RestingMicrobatch& one) { return one.bytes.rest_bytes <= share; });
  }

  bool survives(const GateInput& input, const SearchResult& result) {
    return result.found &&
           predictor_.survives_worst_case(search_.after_demotion(input, result), result.plan);
  }

  BlockReplay calm_;
  std::vector<ReplaySpan> balanced_spans_;
  std::vector<LayerLoad> calm_loads_;  ///< of calm_'s blocks
  PlanSearch search_;
  PlanCache cache_;
  PlanKey key_;
};

}  // namespace

std::unique_ptr<Policy> make_adaptive(const ProvisionContext& context) {
  return std::make_unique<Adaptive>(context);
}

}  // namespace bagualu
