// kwai: the rule of Megatron-Kwai. On every layer alike the cheap operators (norms and activation
// functions) are recomputed, and of the other saved bytes a fixed fraction is offloaded, largest
// tensors first. Both are chosen once; budget and load of a micro-batch play no part. Without a
// given fraction every stage takes the smallest that fits at one load.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/provision/planning_policy.h"

namespace bagualu {
namespace {

bool is_cheap(const Graph& graph, const UnitSpec& unit) {
  constexpr std::array<std::string_view, 10> kCheap = {
      "attn_norm", "qk_norm",    "q_norm",  "k_norm",     "kv_norm",
      "mlp_norm",  "final_norm", "mlp_act", "shared_act", "moe_act"};
  return std::any_of(kCheap.begin(), kCheap.end(),
                     [&](std::string_view op) { return is_made_by(graph, unit, op); });
}

class Kwai final : public PlanningPolicy {
 public:
  Kwai(const ProvisionContext& context, const PolicyOptions& options) : PlanningPolicy(context) {
    const std::vector<LayerLoad> loads = loads_at(options.kwai_fit_imbalance);
    recompute_cheap_units();
    rank_by_size(loads);
    plan_ = options.kwai_offload_ratio ? with_ratio(*options.kwai_offload_ratio) : fitted(loads);
  }

  std::string_view name() const override { return "kwai"; }
  Decision decide(const GateInput& input) override { return describe(input, plan_); }

 private:
  struct Candidate {
    int unit = -1;
    int64_t bytes = 0;
  };

  void recompute_cheap_units() {
    const Plan recompute_all = uniform_plan(graph_, kRecompute);
    cheap_ = uniform_plan(graph_, kSave);
    for (size_t u = 0; u < graph_.units.size(); ++u) {
      if (is_cheap(graph_, graph_.units[u])) cheap_.residency[u] = recompute_all.residency[u];
    }
  }

  // Small tensors are not worth a copy: under 1 MiB, or 1/64 of all where models are small.
  void rank_by_size(const std::vector<LayerLoad>& loads) {
    const std::vector<int64_t> bytes = graph_.storage_bytes(loads);
    for (size_t u = 0; u < graph_.units.size(); ++u) {
      if (graph_.units[u].pinned || cheap_.residency[u] != kSave) continue;
      Candidate candidate{static_cast<int>(u), 0};
      for (int s : graph_.units[u].storages) candidate.bytes += bytes[static_cast<size_t>(s)];
      kept_bytes_ += candidate.bytes;
      largest_first_.push_back(candidate);
    }
    const int64_t least = std::min(kMiB, kept_bytes_ / 64);
    std::erase_if(largest_first_, [least](const Candidate& c) { return c.bytes < least; });
    std::stable_sort(largest_first_.begin(), largest_first_.end(),
                     [](const Candidate& a, const Candidate& b) { return a.bytes > b.bytes; });
  }

  Plan with_ratio(double ratio) const {
    const auto wanted = static_cast<int64_t>(std::ceil(ratio * static_cast<double>(kept_bytes_)));
    Plan plan = cheap_;
    int64_t offloaded = 0;
    for (const Candidate& candidate : largest_first_) {
      if (offloaded >= wanted) break;
      plan.residency[static_cast<size_t>(candidate.unit)] = kOffload;
      offloaded += candidate.bytes;
    }
    return plan;
  }

  // The smallest ratio that fits; the largest if none does.
  Plan fitted(const std::vector<LayerLoad>& loads) {
    Plan plan = cheap_;
    for (const Candidate& candidate : largest_first_) {
      if (describe_start(loads, plan).feasible) return plan;
      plan.residency[static_cast<size_t>(candidate.unit)] = kOffload;
    }
    return plan;
  }

  Plan cheap_;  ///< nothing offloaded
  std::vector<Candidate> largest_first_;
  int64_t kept_bytes_ = 0;  ///< neither recomputed nor pinned
  Plan plan_;
};

}  // namespace

std::unique_ptr<Policy> make_kwai(const ProvisionContext& context, const PolicyOptions& options) {
  check_factor("kwai_fit_imbalance", options.kwai_fit_imbalance);
  if (options.kwai_offload_ratio) {
    const double ratio = *options.kwai_offload_ratio;
    if (!(ratio >= 0.0 && ratio <= 1.0)) {
      throw InvalidInput("options", "kwai_offload_ratio", std::to_string(ratio), "0 to 1");
    }
  }
  return std::make_unique<Kwai>(context, options);
}

}  // namespace bagualu
