#include "bagualu/cost/op_cost.h"

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/cost/op_flops.h"

namespace bagualu {
namespace {

int64_t load_of_op(const Graph& graph, int op, const LayerLoad& load) {
  return scales_with_rows(graph.ops[op].kind) ? load.rows : graph.tokens;
}

int64_t rebuild_ns(const CostTable& costs, const Graph& graph, const UnitSpec& unit, int id,
                   const LayerLoad& load) {
  switch (unit.rebuild) {
    case Rebuild::kNever:
      return 0;
    case Rebuild::kOp:
      return costs.forward_ns(graph, unit.producer, load);
    case Rebuild::kInPieces:
      return costs.rebuild[id].eval(load.rows);
  }
  throw InternalError("unknown rebuild");
}

}  // namespace

int64_t OpTime::eval(int64_t x) const {
  BGL_CHECK(!points.empty());
  if (points.size() == 1) return points.front().second;
  // The segment that holds x; the first or last one for an x outside.
  auto right = std::lower_bound(points.begin() + 1, points.end() - 1, x,
                                [](const auto& point, int64_t at) { return point.first < at; });
  const auto& [x0, y0] = *(right - 1);
  const auto& [x1, y1] = *right;
  const double slope = static_cast<double>(y1 - y0) / static_cast<double>(x1 - x0);
  const double ns = static_cast<double>(y0) + slope * static_cast<double>(x - x0);
  return std::max<int64_t>(0, static_cast<int64_t>(ns + 0.5));
}

int64_t CostTable::forward_ns(const Graph& graph, int op, const LayerLoad& load) const {
  return forward[op].eval(load_of_op(graph, op, load));
}

int64_t CostTable::backward_ns(const Graph& graph, int op, const LayerLoad& load) const {
  if (!graph.ops[op].has_backward) return 0;
  return backward[op].eval(load_of_op(graph, op, load));
}

int64_t CostTable::residency_ns(const Graph& graph, int unit, ResidencyId residency,
                                const LayerLoad& load) const {
  const UnitSpec& spec = graph.units[unit];
  ResidencyInput input;
  input.bytes = graph.unit_bytes(unit, load);
  if (input.bytes == 0) return 0;
  const ResidencySpec& chosen = residencies()[residency];
  if (chosen.needs_rebuild) {
    BGL_CHECK(spec.rebuild != Rebuild::kNever, spec.name, chosen.name);
    input.rebuild_ns = rebuild_ns(*this, graph, spec, unit, load);
  }
  input.d2h_bytes_per_s = d2h_bytes_per_s;
  input.h2d_bytes_per_s = h2d_bytes_per_s;
  input.hidden_fraction = copy_hidden_fraction;
  input.encode_bytes_per_s = encode_bytes_per_s;
  return chosen.exposed_ns(input);
}

}  // namespace bagualu
