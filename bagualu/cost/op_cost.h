#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/residency.h"
#include "bagualu/graph/graph.h"
#include "bagualu/model/layout.h"
#include "bagualu/model/model_spec.h"

namespace bagualu {

/// Time of one operator as a function of its load x (tokens for token operators, received rows for
/// the experts): measured points, piecewise linear between them, extended by the last slope.
struct OpTime {
  std::vector<std::pair<int64_t, int64_t>> points;  ///< (x, ns), rising x, at least one
  bool measured = false;                            ///< false: roofline
  int64_t eval(int64_t x) const;
};

/// Nanoseconds and bandwidths of a graph on one machine.
struct CostTable {
  std::vector<OpTime> forward;   ///< by op
  std::vector<OpTime> backward;  ///< by op
  /// kInPieces units only: time of rebuilding this unit's storages alone (by unit; empty
  /// otherwise).
  std::vector<OpTime> rebuild;
  double d2h_bytes_per_s = 0;
  double h2d_bytes_per_s = 0;
  double copy_hidden_fraction = 0;  ///< share of a copy that runs beside compute
  double encode_bytes_per_s = 0;
  int64_t exchange_post_ns = 0;  ///< of an exchange's time: on the compute thread, never hidden

  int64_t forward_ns(const Graph& graph, int op, const LayerLoad& load) const;
  int64_t backward_ns(const Graph& graph, int op, const LayerLoad& load) const;
  /// Exposed time of giving `unit` this residency, as its ResidencySpec prices it.
  int64_t residency_ns(const Graph& graph, int unit, ResidencyId residency,
                       const LayerLoad& load) const;
};

}  // namespace bagualu
