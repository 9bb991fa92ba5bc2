#include "bagualu/sim/hottest_rank.h"

#include <memory>
#include <vector>

namespace bagualu {
namespace {

/// By layer with experts.
std::vector<int> pp_rank_by_layer(const Scenario& scenario, const StageModel& model) {
  std::vector<int> ranks(static_cast<size_t>(model.moe_layers()), 0);
  for (int rank = 0; rank < scenario.job.layout.pp; ++rank) {
    for (const SimCell& cell : model.cell_places(rank)) {
      ranks.at(static_cast<size_t>(cell.moe_layer)) = rank;
    }
  }
  return ranks;
}

}  // namespace

HottestRank hottest_rank(const Scenario& scenario, const StageModel& model, int64_t draw) {
  const RoutingGroup group = model.routing_group();
  HottestRank hottest;
  if (group.layers == 0) return hottest;
  const std::vector<int> pp_ranks = pp_rank_by_layer(scenario, model);
  const std::unique_ptr<RoutingSource> source = routing_of(scenario);
  const double mean = static_cast<double>(group.balanced_rows * group.microbatches);
  std::vector<int32_t> rows;
  std::vector<int64_t> sums(static_cast<size_t>(group.layers * group.ranks));
  for (int64_t replica = 0; replica < group.replicas; ++replica) {
    source->rows(draw, replica, group, &rows);
    sums.assign(sums.size(), 0);
    for (size_t i = 0; i < rows.size(); ++i) sums[i % sums.size()] += rows[i];
    for (size_t i = 0; i < sums.size(); ++i) {
      const double imbalance = static_cast<double>(sums[i]) / mean;
      if (hottest.moe_layer >= 0 && imbalance < hottest.imbalance) continue;
      const auto layer = static_cast<int64_t>(i) / group.ranks;
      const auto member = static_cast<int>(static_cast<int64_t>(i) % group.ranks);
      const int pp_rank = pp_ranks[static_cast<size_t>(layer)];
      if (hottest.moe_layer < 0 || imbalance > hottest.imbalance) {
        hottest = {{replica, pp_rank, member}, layer, imbalance, {pp_rank}};
      } else if (hottest.place.replica == replica && hottest.place.member == member) {
        hottest.as_hot.insert(pp_rank);
      }
    }
  }
  return hottest;
}

}  // namespace bagualu
