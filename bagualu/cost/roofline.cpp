#include "bagualu/cost/roofline.h"

#include <algorithm>
#include <cmath>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

// Sample points of a curve that is piecewise linear already (a maximum of affine functions):
// between two of them it is off only where a kink lies, by less than the kink's own change of
// slope.
constexpr int64_t kLargestLoad = int64_t{1} << 24;

template <class Work>
OpTime sample(const Work& work_at, Dtype dtype, const SystemSpec& system) {
  OpTime time;
  time.points.emplace_back(0, roofline_ns(work_at(0), dtype, system));
  for (int64_t x = 1; x <= kLargestLoad; x *= 2) {
    time.points.emplace_back(x, roofline_ns(work_at(x), dtype, system));
  }
  return time;
}

bool ends_with(const std::string& name, std::string_view tail) {
  return std::string_view(name).ends_with(tail);
}

}  // namespace

int64_t roofline_ns(const OpWork& work, Dtype dtype, const SystemSpec& system) {
  const double compute_s = static_cast<double>(work.flops) /
                           (system.flops_per_s(dtype) * system.compute_efficiency_fraction);
  const double memory_s = static_cast<double>(work.memory_bytes) / system.memory_bytes_per_s;
  const double link_s = static_cast<double>(work.link_bytes) / system.link_bytes_per_s;
  const double busy_s = std::max({compute_s, memory_s, link_s});
  return system.launch_ns + static_cast<int64_t>(std::ceil(busy_s * 1e9));
}

void set_copy_rates(const SystemSpec& system, CostTable& costs) {
  costs.d2h_bytes_per_s = system.d2h_bytes_per_s;
  costs.h2d_bytes_per_s = system.h2d_bytes_per_s;
  costs.copy_hidden_fraction = system.copy_hidden_fraction;
  costs.encode_bytes_per_s = system.encode_bytes_per_s;
}

CostTable roofline_costs(const Graph& graph, const ModelSpec& spec,
                         const NativeGraphOptions& options, const SystemSpec& system) {
  CostTable costs;
  for (const OpSpec& op : graph.ops) {
    const auto forward = [&](int64_t x) { return forward_work(op.kind, spec, options, x); };
    const auto backward = [&](int64_t x) { return backward_work(op.kind, spec, options, x); };
    costs.forward.push_back(sample(forward, options.dtype, system));
    costs.backward.push_back(op.has_backward ? sample(backward, options.dtype, system) : OpTime{});
  }
  costs.rebuild.resize(graph.units.size());
  for (size_t u = 0; u < graph.units.size(); ++u) {
    const UnitSpec& unit = graph.units[u];
    if (unit.rebuild != Rebuild::kInPieces) continue;
    const bool fc1 = ends_with(unit.name, "expert_fc1");
    BGL_CHECK(fc1 || ends_with(unit.name, "moe_act"), unit.name);
    const auto work = [&](int64_t x) {
      return fc1 ? rebuild_fc1_work(spec, options, x) : rebuild_act_work(spec, options, x);
    };
    costs.rebuild[u] = sample(work, options.dtype, system);
  }
  set_copy_rates(system, costs);
  return costs;
}

}  // namespace bagualu
