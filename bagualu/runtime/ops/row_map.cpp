#include "bagualu/runtime/ops/row_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu::ops {
namespace {

template <class Id>
void counting_sort(std::span<const Id> topk_ids, int64_t experts, std::span<int32_t> row_map,
                   std::span<int64_t> tokens_per_expert) {
  BGL_CHECK(row_map.size() == topk_ids.size(), row_map.size(), topk_ids.size());
  BGL_CHECK(static_cast<int64_t>(tokens_per_expert.size()) == experts, tokens_per_expert.size());
  std::fill(tokens_per_expert.begin(), tokens_per_expert.end(), 0);
  for (size_t i = 0; i < topk_ids.size(); ++i) {
    if (topk_ids[i] < 0 || topk_ids[i] >= experts) {
      throw InvalidInput("routing", fmt::format("assignment {}", i),
                         fmt::format("expert {}", topk_ids[i]),
                         fmt::format("experts 0 to {}", experts - 1));
    }
    ++tokens_per_expert[topk_ids[i]];
  }
  std::vector<int32_t> next(experts, 0);
  for (int64_t e = 1; e < experts; ++e) {
    next[e] = next[e - 1] + static_cast<int32_t>(tokens_per_expert[e - 1]);
  }
  for (size_t i = 0; i < topk_ids.size(); ++i) row_map[i] = next[topk_ids[i]]++;
}

}  // namespace

void build_row_map(std::span<const int32_t> topk_ids, int64_t experts, std::span<int32_t> row_map,
                   std::span<int64_t> tokens_per_expert) {
  counting_sort(topk_ids, experts, row_map, tokens_per_expert);
}

void build_row_map(std::span<const int16_t> topk_ids, int64_t experts, std::span<int32_t> row_map,
                   std::span<int64_t> tokens_per_expert) {
  counting_sort(topk_ids, experts, row_map, tokens_per_expert);
}

WireLayout::WireLayout(std::vector<int64_t> peer_rows, int64_t row_bytes, bool with_probs)
    : peer_rows_(std::move(peer_rows)),
      first_row_(peer_rows_.size() + 1, 0),
      row_bytes_(row_bytes),
      bytes_per_row_(row_bytes + (with_probs ? 4 : 0)),
      with_probs_(with_probs) {
  BGL_CHECK(row_bytes > 0 && row_bytes % 4 == 0, row_bytes);
  for (size_t peer = 0; peer < peer_rows_.size(); ++peer) {
    BGL_CHECK(peer_rows_[peer] >= 0, peer, peer_rows_[peer]);
    first_row_[peer + 1] = first_row_[peer] + peer_rows_[peer];
  }
}

int64_t WireLayout::peer_of_row(int64_t row) const {
  const auto after = std::upper_bound(first_row_.begin() + 1, first_row_.end(), row);
  return after - first_row_.begin() - 1;
}

ReceivedRows::ReceivedRows(std::span<const int64_t> counts, int64_t sources, int64_t experts_local)
    : runs_(experts_local),
      expert_rows_(experts_local, 0),
      expert_begin_(experts_local + 1, 0),
      source_rows_(sources, 0) {
  BGL_CHECK(static_cast<int64_t>(counts.size()) == sources * experts_local, counts.size(), sources,
            experts_local);
  for (int64_t source = 0; source < sources; ++source) {
    for (int64_t expert = 0; expert < experts_local; ++expert) {
      const int64_t rows = counts[source * experts_local + expert];
      BGL_CHECK(rows >= 0, source, expert, rows);
      if (rows == 0) continue;
      runs_[expert].push_back({source, source_rows_[source], expert_rows_[expert], rows});
      source_rows_[source] += rows;
      expert_rows_[expert] += rows;
    }
  }
  for (int64_t expert = 0; expert < experts_local; ++expert) {
    expert_begin_[expert + 1] = expert_begin_[expert] + expert_rows_[expert];
  }
}

}  // namespace bagualu::ops
