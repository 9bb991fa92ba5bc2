#include "bagualu/schedule/communicator_order.h"

#include <fmt/core.h>

#include <algorithm>

#include "bagualu/schedule/verify_schedule.h"

namespace bagualu {
namespace {

std::string at(const std::vector<std::string>& sequence, size_t place) {
  return place < sequence.size() ? sequence[place] : "nothing";
}

}  // namespace

std::string communicator_order_fault(const std::vector<std::vector<std::string>>& by_rank) {
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    const auto &first = by_rank[0], &own = by_rank[rank];
    const size_t most = std::max(first.size(), own.size());
    for (size_t place = 0; place < most; ++place) {
      if (place < first.size() && place < own.size() && first[place] == own[place]) continue;
      return fmt::format("communication {}: rank 0 issues {}, rank {} issues {}", place,
                         at(first, place), rank, at(own, place));
    }
  }
  return "";
}

std::vector<std::string> communications(const DualBatchInstance& instance,
                                        const std::vector<ScheduleItem>& order) {
  std::vector<std::string> names;
  for (const ScheduleItem& item : order) {
    if (item.kind != ItemKind::kForward && item.kind != ItemKind::kBackward) continue;
    const auto& chain = item.kind == ItemKind::kForward ? instance.forward : instance.backward;
    if (chain[item.index].resource == Resource::kComm) names.push_back(schedule_item_text(item));
  }
  return names;
}

}  // namespace bagualu
