#include "bagualu/runtime/layer_routing.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

// Rows that this rank sends to every peer, from its own counts per expert.
std::vector<int64_t> rows_to_peers(const std::vector<int64_t>& all_counts, int64_t ep_size,
                                   int64_t ep_rank) {
  const int64_t experts = static_cast<int64_t>(all_counts.size()) / ep_size;
  const int64_t local = experts / ep_size;
  std::vector<int64_t> rows(ep_size, 0);
  for (int64_t e = 0; e < experts; ++e) rows[e / local] += all_counts[ep_rank * experts + e];
  return rows;
}

// Counts of the local experts by source, [source, local expert].
std::vector<int64_t> local_counts(const std::vector<int64_t>& all_counts, int64_t ep_size,
                                  int64_t ep_rank) {
  const int64_t experts = static_cast<int64_t>(all_counts.size()) / ep_size;
  const int64_t local = experts / ep_size;
  std::vector<int64_t> counts;
  for (int64_t source = 0; source < ep_size; ++source) {
    const auto begin = all_counts.begin() + source * experts + ep_rank * local;
    counts.insert(counts.end(), begin, begin + local);
  }
  return counts;
}

ops::ReceivedRows received_rows(const std::vector<int64_t>& all_counts, int64_t ep_size,
                                int64_t ep_rank) {
  const int64_t local = static_cast<int64_t>(all_counts.size()) / ep_size / ep_size;
  return {local_counts(all_counts, ep_size, ep_rank), ep_size, local};
}

std::vector<int64_t> expert_rows(const ops::ReceivedRows& received) {
  std::vector<int64_t> rows(received.experts_local());
  for (int64_t e = 0; e < received.experts_local(); ++e) rows[e] = received.expert_rows(e);
  return rows;
}

}  // namespace

LayerRouting::LayerRouting(const std::vector<int64_t>& all_counts, int64_t ep_size,
                           int64_t ep_rank, int64_t row_bytes, int64_t chunk_rows)
    : received(received_rows(all_counts, ep_size, ep_rank)),
      send(rows_to_peers(all_counts, ep_size, ep_rank), row_bytes, true),
      send_plain(rows_to_peers(all_counts, ep_size, ep_rank), row_bytes, false),
      recv(received.source_rows(), row_bytes, true),
      recv_plain(received.source_rows(), row_bytes, false),
      pieces(piece_grid(expert_rows(received), chunk_rows)),
      load(layer_load(expert_rows(received), chunk_rows)),
      rows_per_rank(ep_size, 0) {
  const int64_t experts = static_cast<int64_t>(all_counts.size()) / ep_size;
  const int64_t local = experts / ep_size;
  tokens_per_expert.assign(experts, 0);
  for (int64_t i = 0; i < static_cast<int64_t>(all_counts.size()); ++i) {
    tokens_per_expert[i % experts] += all_counts[i];
    rows_per_rank[i % experts / local] += all_counts[i];
  }
  const int64_t total = std::accumulate(rows_per_rank.begin(), rows_per_rank.end(), int64_t{0});
  const int64_t hottest = *std::max_element(rows_per_rank.begin(), rows_per_rank.end());
  load_imbalance =
      total == 0 ? 1.0 : static_cast<double>(hottest) * static_cast<double>(ep_size) / total;
}

namespace {

// Top-k assignments that fall on experts [begin, end) when those get `bias`.
int64_t assignments_to(const at::Tensor& logits, int64_t top_k, int64_t begin, int64_t end,
                       float bias) {
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  const float* row = logits.const_data_ptr<float>();
  std::vector<std::pair<float, int64_t>> scores(experts);
  int64_t hits = 0;
  for (int64_t t = 0; t < tokens; ++t, row += experts) {
    for (int64_t e = 0; e < experts; ++e) {
      scores[e] = {-(row[e] + (e >= begin && e < end ? bias : 0.0f)), e};
    }
    std::partial_sort(scores.begin(), scores.begin() + top_k, scores.end());
    for (int64_t s = 0; s < top_k; ++s) {
      hits += scores[s].second >= begin && scores[s].second < end ? 1 : 0;
    }
  }
  return hits;
}

float spike_bias(const at::Tensor& logits, int64_t top_k, int64_t ep_size, const Spike& spike) {
  constexpr float kLargestBias = 64.0f;  // beyond any difference of trained router logits
  constexpr int kBisections = 24;
  const int64_t local = logits.size(1) / ep_size;
  const int64_t begin = spike.hot_rank * local;
  const double share = std::min(spike.factor / static_cast<double>(ep_size), 1.0);
  const auto wanted = static_cast<int64_t>(share * static_cast<double>(logits.size(0) * top_k));
  float low = 0.0f, high = kLargestBias;
  for (int i = 0; i < kBisections; ++i) {
    const float middle = 0.5f * (low + high);
    if (assignments_to(logits, top_k, begin, begin + local, middle) < wanted) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return high;
}

}  // namespace

// A loop, not add_(): a scalar operand of ATen is a tensor, whose 64 bytes no workspace knows.
void add_spike(const Spike& spike, int64_t top_k, int64_t ep_size, at::Tensor& logits) {
  const float bias = spike_bias(logits, top_k, ep_size, spike);
  const int64_t experts = logits.size(1), local = experts / ep_size;
  float* row = logits.mutable_data_ptr<float>() + spike.hot_rank * local;
  for (int64_t t = 0; t < logits.size(0); ++t, row += experts) {
    for (int64_t e = 0; e < local; ++e) row[e] += bias;
  }
}

void assign_recorded_routing(const std::vector<int64_t>& counts, int64_t ep_size, int64_t ep_rank,
                             at::Tensor& topk_ids) {
  const int64_t tokens = topk_ids.size(0), top_k = topk_ids.size(1);
  const int64_t all_tokens = tokens * ep_size;
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (total != all_tokens * top_k) {
    throw InvalidInput("routing trace", "tokens per expert", std::to_string(total) + " in total",
                       std::to_string(all_tokens * top_k) + " (ranks x tokens x top_k)");
  }
  // Slot i of the list "expert 0 counts[0] times, expert 1 counts[1] times, ..." goes to token
  // i mod all_tokens. An expert's slots are consecutive and at most all_tokens, so no token gets it
  // twice; neighbouring tokens lie on different ranks, so every source gets an even share.
  std::vector<int64_t> first(counts.size() + 1, 0);
  for (size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] < 0 || counts[e] > all_tokens) {
      throw InvalidInput("routing trace", "expert " + std::to_string(e), std::to_string(counts[e]),
                         "0 to " + std::to_string(all_tokens) + " (one per token)");
    }
    first[e + 1] = first[e] + counts[e];
  }
  auto* ids = topk_ids.data_ptr<int16_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t s = 0; s < top_k; ++s) {
      const int64_t slot = s * all_tokens + t * ep_size + ep_rank;
      const auto after = std::upper_bound(first.begin(), first.end(), slot);
      ids[t * top_k + s] = static_cast<int16_t>(after - first.begin() - 1);
    }
  }
}

}  // namespace bagualu
