#include "bagualu/schedule/dual_batch_bounds.h"

#include <algorithm>
#include <array>

namespace bagualu {

int64_t lower_bound_ns(const DualBatchInstance& instance) {
  std::array<int64_t, kResourceCount> load_ns{};
  int64_t bound = 0;
  for (const auto* chain : {&instance.forward, &instance.backward}) {
    int64_t path_ns = 0;
    for (const ChainOp& op : *chain) {
      path_ns += op.ns;
      load_ns[static_cast<size_t>(op.resource)] += op.ns;
    }
    bound = std::max(bound, path_ns);
  }
  int64_t& compute_ns = load_ns[static_cast<size_t>(Resource::kCompute)];
  for (const WeightGradFiller& grad : instance.weight_grads) compute_ns += grad.ns;
  for (const RebuildFiller& rebuild : instance.rebuilds) compute_ns += rebuild.ns;
  for (const CopyOut& copy : instance.copies_out) {
    load_ns[static_cast<size_t>(Resource::kD2h)] += copy.ns;
  }
  for (const CopyIn& copy : instance.copies_in) {
    load_ns[static_cast<size_t>(Resource::kH2d)] += copy.ns;
  }
  for (int64_t load : load_ns) bound = std::max(bound, load);
  return bound;
}

}  // namespace bagualu
