#include "bagualu/provision/search_options.h"

#include "bagualu/provision/floor.h"
#include "bagualu/provision/plan_cost.h"

namespace bagualu {

SearchOptions::SearchOptions(const ProvisionContext& context)
    : context_(context),
      graph_(*context.graph),
      lifetimes_(graph_),
      survival_(survival_plan(graph_)) {}

bool SearchOptions::allowed(int unit, ResidencyId residency, const SearchScope& scope) const {
  const UnitSpec& spec = graph_.units[unit];
  const ResidencySpec& choice = residencies()[residency];
  if (choice.retire == Retire::kKeep) return false;
  if (choice.changes_numerics && !context_.allow_quantise) return false;
  if (choice.needs_rebuild && (spec.rebuild == Rebuild::kNever || !scope.recompute)) return false;
  return !scope.survival_only || survival_.residency[unit] == residency;
}

void SearchOptions::collect(const GateInput& input, const Plan& base, const SearchScope& scope,
                            const Predictor& predictor) {
  options_.clear();
  segments_.clear();
  const MemoryTable& table = predictor.table();
  for (int u = 0; u < static_cast<int>(graph_.units.size()); ++u) {
    if (graph_.units[u].pinned || base.residency[u] != kSave) continue;
    if (lifetimes_.decided(u, *input.state)) continue;
    const bool drains_now = base.eager_drain || lifetimes_.retired(u, *input.state);
    for (size_t r = 1; r < residencies().size(); ++r) {
      const auto residency = static_cast<ResidencyId>(r);
      if (!allowed(u, residency, scope)) continue;
      SearchOption option;
      option.unit = u;
      option.residency = residency;
      option.first_segment = static_cast<int>(segments_.size());
      lifetimes_.append_segments(u, residency, *input.state, table, base.eager_drain, base.prefetch,
                                 segments_);
      option.end_segment = static_cast<int>(segments_.size());
      if (option.first_segment == option.end_segment) continue;
      if (residencies()[r].retire == Retire::kOffload) {
        for (int s : graph_.units[u].storages) option.host_bytes += table.storage_bytes[s];
      }
      option.cost_ns =
          unit_cost_ns(context_, predictor.loads(), u, residency, drains_now, base.prefetch);
      options_.push_back(option);
    }
  }
  for (int m = 0; m < static_cast<int>(input.resting.size()); ++m) {
    if (input.resting[m].bytes.rest_bytes > scope.spared_rest_bytes) collect_resting(input, m);
  }
}

// Its bytes come back at once; by the time of our backward it is gone, so it saves in forward only.
void SearchOptions::collect_resting(const GateInput& input, int index) {
  const RestingMicrobatch& resting = input.resting[index];
  const int end_of_forward = static_cast<int>(graph_.ops.size());
  for (int u = 0; u < static_cast<int>(graph_.units.size()); ++u) {
    const ResidencyId residency = survival_.residency[u];
    if (residency == kSave || resting.plan->residency[u] != kSave) continue;
    if (lifetimes_.decided(u, *resting.state) || !lifetimes_.retired(u, *resting.state)) continue;
    SearchOption option;
    option.microbatch = index;
    option.unit = u;
    option.residency = residency;
    const LayerLoad& load = graph_.load_of(graph_.units[u].layer, *resting.loads);
    option.freed_bytes = graph_.unit_bytes(u, load);
    if (option.freed_bytes == 0) continue;
    if (residencies()[residency].retire == Retire::kOffload) {
      option.host_bytes = option.freed_bytes;
    }
    option.cost_ns = unit_cost_ns(context_, *resting.loads, u, residency, /*drains_now=*/true,
                                  resting.plan->prefetch);
    option.first_segment = static_cast<int>(segments_.size());
    segments_.push_back({input.state->next_op, end_of_forward, option.freed_bytes});
    option.end_segment = static_cast<int>(segments_.size());
    options_.push_back(option);
  }
}

int64_t SearchOptions::saving_at(const SearchOption& option, int point) const {
  int64_t bytes = 0;
  for (int i = option.first_segment; i < option.end_segment; ++i) {
    if (segments_[i].begin <= point && point < segments_[i].end) bytes += segments_[i].bytes;
  }
  return bytes;
}

}  // namespace bagualu
