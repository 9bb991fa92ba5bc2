#include "bagualu/sim/run_timing.h"

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

// Between ranks that never exchange anything.
constexpr double kUnused = 1e12;

/// The profile's times of exchanges, at rows of the hottest rank.
struct Exchanges {
  double ns(int64_t rows) const {
    double sum = 0;
    for (const OpTime* time : times) sum += static_cast<double>(time->eval(rows));
    return sum / static_cast<double>(times.size());
  }
  std::vector<const OpTime*> times;
  int64_t bytes_per_row = 0;
};

Exchanges exchanges_of(const RunReplay& replay, const TrainingSetup& setup) {
  Exchanges found;
  for (int rank = 0; rank < setup.layout.world_size; ++rank) {
    for (const auto& stage : replay.stages(rank)) {
      for (size_t i = 0; i < stage->graph.ops.size(); ++i) {
        const OpSpec& op = stage->graph.ops[i];
        if (op.kind != OpKind::kDispatch && op.kind != OpKind::kCombine) continue;
        found.times.push_back(&stage->cost.forward[i]);
        found.times.push_back(&stage->cost.backward[i]);
        for (const int s : op.creates) {
          const ByteFormula& bytes = stage->graph.storages[static_cast<size_t>(s)].bytes;
          found.bytes_per_row = std::max(found.bytes_per_row, bytes.per_row);
        }
      }
      if (!found.times.empty()) return found;
    }
  }
  return found;
}

// Bytes of the busiest member where one rank receives `hottest` rows and the others the rest.
double busiest_bytes(const Exchanges& exchanges, int64_t hottest, int64_t balanced,
                     int64_t members) {
  SimLinks one_byte_per_ns;
  one_byte_per_ns.node_size = members;
  one_byte_per_ns.node_bytes_per_s = one_byte_per_ns.network_bytes_per_s = 1e9;
  const int64_t rest = (balanced * members - hottest) / std::max<int64_t>(members - 1, 1);
  std::vector<int32_t> rows(static_cast<size_t>(members), static_cast<int32_t>(rest));
  rows[0] = static_cast<int32_t>(hottest);
  return static_cast<double>(
      exchange_ns(one_byte_per_ns, exchanges.bytes_per_row, rows.data(), members));
}

}  // namespace

SimLinks run_links(const LoggedStart& start, const RunReplay& replay) {
  const TrainingSetup& setup = start.setup;
  const int64_t members = setup.layout.ep_size;
  SimLinks links;
  links.node_size = std::max<int64_t>(members, 1);
  links.node_bytes_per_s = links.network_bytes_per_s = links.message_bytes_per_s = kUnused;
  const CostTable& cost = replay.stages(0).front()->cost;
  links.d2h_bytes_per_s = cost.d2h_bytes_per_s;
  links.h2d_bytes_per_s = cost.h2d_bytes_per_s;
  const Exchanges exchanges = exchanges_of(replay, setup);
  if (members == 1 || exchanges.times.empty()) return links;

  const int64_t balanced = replay.stages(0).front()->context.balanced.rows;
  const int64_t most = replay.stages(0).front()->context.worst_case.rows;
  const double even_bytes = busiest_bytes(exchanges, balanced, balanced, members);
  const double most_bytes = busiest_bytes(exchanges, most, balanced, members);
  const double even_ns = exchanges.ns(balanced), most_ns = exchanges.ns(most);
  if (most_bytes > even_bytes && most_ns > even_ns) {
    links.node_bytes_per_s = (most_bytes - even_bytes) / (most_ns - even_ns) * 1e9;
  }
  const double moving_ns = even_bytes / links.node_bytes_per_s * 1e9;
  const auto post_ns = static_cast<double>(cost.exchange_post_ns);
  links.latency_ns = static_cast<int64_t>(std::max(even_ns - moving_ns - post_ns, 0.0));
  links.network_bytes_per_s = links.message_bytes_per_s = links.node_bytes_per_s;
  links.message_latency_ns = links.latency_ns;
  return links;
}

int64_t RunTiming::passes_ns(const ReplayedStep& simulated, const LoggedStep& logged) {
  const ParallelLayout& layout = start_.setup.layout;
  const int64_t members = layout.ep_size;
  int64_t slowest_ns = 0;
  for (int64_t replica = 0; replica < layout.expert_dp_size(); ++replica) {
    std::vector<SimGroup> groups(static_cast<size_t>(layout.pp_size));
    std::vector<std::vector<int32_t>> rows(groups.size()), piece_rows(groups.size());
    for (size_t p = 0; p < groups.size(); ++p) {
      const auto first =
          static_cast<size_t>(static_cast<int64_t>(p) * layout.dp_size() + replica * members);
      const size_t cells = static_cast<size_t>(simulated.ranks[first].program.cells);
      rows[p].resize(cells * static_cast<size_t>(members));
      piece_rows[p].resize(rows[p].size());
      for (size_t m = 0; m < static_cast<size_t>(members); ++m) {
        groups[p].programs.push_back(&simulated.ranks[first + m].program);
        size_t cell = 0;
        for (const std::vector<LayerLoad>& entry : logged.ranks[first + m].loads) {
          for (const LayerLoad& load : entry) {
            const size_t at = cell++ * static_cast<size_t>(members) + m;
            rows[p].at(at) = static_cast<int32_t>(load.rows);
            piece_rows[p].at(at) = static_cast<int32_t>(load.piece_rows);
          }
        }
        BGL_CHECK(cell == cells, cell, cells);
      }
      groups[p].rows = rows[p].data();
      groups[p].piece_rows = piece_rows[p].data();
    }
    slowest_ns = std::max(slowest_ns, engine_.run(groups).end_ns);
  }
  return slowest_ns;
}

}  // namespace bagualu
