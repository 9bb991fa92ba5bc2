#include "bagualu/schedule/pipeline.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr std::array kKinds = {PassKind::kForward, PassKind::kBackward};

struct Inputs {
  std::array<PipelinePass, 2> pass;
  size_t count = 0;
  void add(const PipelinePass& input) { pass[count++] = input; }
};

// Passes whose results this one reads.
Inputs inputs_of(const PipelinePass& pass, int stages) {
  Inputs inputs;
  const auto [stage, kind, microbatch] = pass;
  if (kind == PassKind::kForward) {
    if (stage > 0) inputs.add({stage - 1, kind, microbatch});
    return inputs;
  }
  inputs.add({stage, PassKind::kForward, microbatch});
  if (stage + 1 < stages) inputs.add({stage + 1, kind, microbatch});
  return inputs;
}

void check_table(const PipelineOrder& order, const std::vector<std::vector<int64_t>>& table) {
  BGL_CHECK(table.size() == static_cast<size_t>(order.stages), table.size(), order.stages);
  for (const auto& row : table) {
    BGL_CHECK(row.size() == static_cast<size_t>(order.microbatches), row.size());
    for (int64_t value : row) BGL_CHECK(value >= 0, value);
  }
}

// The passes of an order as nodes of a graph, in an order in which every input comes first.
class PassGraph {
 public:
  PassGraph(const PipelineOrder& order, const PipelineTimes& times) : order_(order), times_(times) {
    check_table(order, times.forward_ns);
    check_table(order, times.backward_ns);
    BGL_CHECK(times.send_ns >= 0, times.send_ns);
    place_passes();
    sort();
  }

  PipelineRun run() const {
    PipelineRun result;
    for (const auto& list : order_.ranks) {
      result.start_ns.emplace_back(list.size(), 0);
      result.end_ns.emplace_back(list.size(), 0);
    }
    for (const Node& node : sorted_) {
      int64_t start = node.index == 0 ? 0 : result.end_ns[node.rank][node.index - 1];
      const Inputs inputs = inputs_of(pass_at(node), order_.stages);
      for (size_t i = 0; i < inputs.count; ++i) {
        const Node from = node_of(inputs.pass[i]);
        start = std::max(start, result.end_ns[from.rank][from.index] + send_ns(from, node));
      }
      result.start_ns[node.rank][node.index] = start;
      result.end_ns[node.rank][node.index] = start + duration_ns(node);
      result.makespan_ns = std::max(result.makespan_ns, start + duration_ns(node));
    }
    for (size_t r = 0; r < order_.ranks.size(); ++r) {
      int64_t busy = 0;
      for (size_t i = 0; i < order_.ranks[r].size(); ++i) {
        busy += result.end_ns[r][i] - result.start_ns[r][i];
      }
      result.bubble_ns.push_back(result.makespan_ns - busy);
    }
    return result;
  }

  std::vector<std::vector<int64_t>> slack() const {
    const PipelineRun at = run();
    // Longest path from the end of a pass to the end of the step.
    std::vector<std::vector<int64_t>> tail;
    for (const auto& list : order_.ranks) tail.emplace_back(list.size(), 0);
    for (auto node = sorted_.rbegin(); node != sorted_.rend(); ++node) {
      const int64_t through = duration_ns(*node) + tail[node->rank][node->index];
      const auto reach = [&tail](const Node& from, int64_t ns) {
        tail[from.rank][from.index] = std::max(tail[from.rank][from.index], ns);
      };
      if (node->index > 0) reach({node->rank, node->index - 1}, through);
      const Inputs inputs = inputs_of(pass_at(*node), order_.stages);
      for (size_t i = 0; i < inputs.count; ++i) {
        const Node from = node_of(inputs.pass[i]);
        reach(from, through + send_ns(from, *node));
      }
    }
    for (size_t r = 0; r < tail.size(); ++r) {
      for (size_t i = 0; i < tail[r].size(); ++i) {
        tail[r][i] = at.makespan_ns - at.end_ns[r][i] - tail[r][i];
      }
    }
    return tail;
  }

 private:
  struct Node {
    size_t rank = 0;
    size_t index = 0;
  };

  const PipelinePass& pass_at(const Node& node) const {
    return order_.ranks[node.rank][node.index];
  }

  size_t slot_of(const PipelinePass& pass) const {
    const bool inside = pass.stage >= 0 && pass.stage < order_.stages && pass.microbatch >= 0 &&
                        pass.microbatch < order_.microbatches;
    BGL_CHECK(inside, pass_text(pass), order_.stages, order_.microbatches);
    return (static_cast<size_t>(pass.stage) * kKinds.size() + static_cast<size_t>(pass.kind)) *
               static_cast<size_t>(order_.microbatches) +
           static_cast<size_t>(pass.microbatch);
  }

  Node node_of(const PipelinePass& pass) const { return nodes_[slot_of(pass)]; }

  int64_t duration_ns(const Node& node) const {
    const PipelinePass& pass = pass_at(node);
    const auto& table = pass.kind == PassKind::kForward ? times_.forward_ns : times_.backward_ns;
    return table[static_cast<size_t>(pass.stage)][static_cast<size_t>(pass.microbatch)];
  }

  int64_t send_ns(const Node& from, const Node& to) const {
    return from.rank == to.rank ? 0 : times_.send_ns;
  }

  void place_passes() {
    const size_t slots = static_cast<size_t>(order_.stages) * kKinds.size() *
                         static_cast<size_t>(order_.microbatches);
    nodes_.assign(slots, {});
    listed_.assign(slots, 0);
    for (size_t r = 0; r < order_.ranks.size(); ++r) {
      for (size_t i = 0; i < order_.ranks[r].size(); ++i) {
        const size_t slot = slot_of(order_.ranks[r][i]);
        BGL_CHECK(!listed_[slot], pass_text(order_.ranks[r][i]), "is listed twice");
        nodes_[slot] = {r, i};
        listed_[slot] = 1;
      }
    }
  }

  // Advances every rank as far as its inputs allow; if none moves, the rest waits for ever.
  void sort() {
    std::vector<size_t> next(order_.ranks.size(), 0);
    std::vector<char> done(listed_.size(), 0);
    size_t total = 0;
    for (const auto& list : order_.ranks) total += list.size();
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < next.size(); ++r) {
        while (next[r] < order_.ranks[r].size() && missing(order_.ranks[r][next[r]], done) == 0) {
          done[slot_of(order_.ranks[r][next[r]])] = 1;
          sorted_.push_back({r, next[r]++});
          moved = true;
        }
      }
    }
    if (sorted_.size() != total) throw InternalError(deadlock_text(next, done));
  }

  // Number of inputs that have not run; `first` gets one of them.
  size_t missing(const PipelinePass& pass, const std::vector<char>& done,
                 PipelinePass* first = nullptr) const {
    const Inputs inputs = inputs_of(pass, order_.stages);
    size_t count = 0;
    for (size_t i = 0; i < inputs.count; ++i) {
      if (done[slot_of(inputs.pass[i])]) continue;
      if (count++ == 0 && first != nullptr) *first = inputs.pass[i];
    }
    return count;
  }

  std::string deadlock_text(const std::vector<size_t>& next, const std::vector<char>& done) const {
    std::string text = "pipeline order is stuck:";
    for (size_t r = 0; r < next.size(); ++r) {
      if (next[r] == order_.ranks[r].size()) continue;
      const PipelinePass& waiting = order_.ranks[r][next[r]];
      PipelinePass input;
      missing(waiting, done, &input);
      text += " rank " + std::to_string(r) + ": " + pass_text(waiting) + " waits for " +
              pass_text(input) + (listed_[slot_of(input)] ? ";" : ", which no rank runs;");
    }
    text.pop_back();
    return text;
  }

  const PipelineOrder& order_;
  const PipelineTimes& times_;
  std::vector<Node> nodes_;   ///< by slot_of()
  std::vector<char> listed_;  ///< by slot_of()
  std::vector<Node> sorted_;
};

}  // namespace

std::string pass_text(const PipelinePass& pass) {
  const char* kind = pass.kind == PassKind::kForward ? "F" : "B";
  return std::to_string(pass.stage) + kind + std::to_string(pass.microbatch);
}

PipelineOrder one_f_one_b(int stages, int microbatches) {
  BGL_CHECK(stages >= 1 && microbatches >= 1, stages, microbatches);
  PipelineOrder order;
  order.stages = stages;
  order.microbatches = microbatches;
  for (int rank = 0; rank < stages; ++rank) {
    const int warmup = std::min(stages - 1 - rank, microbatches);
    std::vector<PipelinePass> list;
    for (int m = 0; m < warmup; ++m) list.push_back({rank, PassKind::kForward, m});
    for (int m = 0; m < microbatches; ++m) {
      if (warmup + m < microbatches) list.push_back({rank, PassKind::kForward, warmup + m});
      list.push_back({rank, PassKind::kBackward, m});
    }
    order.ranks.push_back(std::move(list));
  }
  return order;
}

std::vector<ResidentPeak> resident_peaks(const PipelineOrder& order,
                                         const std::vector<std::vector<int64_t>>& bytes) {
  check_table(order, bytes);
  std::vector<ResidentPeak> peaks;
  for (const auto& list : order.ranks) {
    ResidentPeak peak;
    std::vector<PipelinePass> resident;
    int64_t sum = 0;
    for (const PipelinePass& pass : list) {
      const int64_t own =
          bytes[static_cast<size_t>(pass.stage)][static_cast<size_t>(pass.microbatch)];
      if (pass.kind == PassKind::kBackward) {
        const auto held = std::find(resident.begin(), resident.end(),
                                    PipelinePass{pass.stage, PassKind::kForward, pass.microbatch});
        BGL_CHECK(held != resident.end(), pass_text(pass), "has no forward before it");
        resident.erase(held);
        sum -= own;
        continue;
      }
      resident.push_back(pass);
      sum += own;
      if (sum < peak.bytes) continue;
      if (sum > peak.bytes) peak.moments.clear();
      peak.bytes = sum;
      peak.moments.push_back({pass, resident});
    }
    peaks.push_back(std::move(peak));
  }
  return peaks;
}

std::vector<int> in_flight(const PipelineOrder& order) {
  const std::vector<std::vector<int64_t>> ones(
      static_cast<size_t>(order.stages),
      std::vector<int64_t>(static_cast<size_t>(order.microbatches), 1));
  std::vector<int> result;
  for (const ResidentPeak& peak : resident_peaks(order, ones)) {
    result.push_back(static_cast<int>(peak.bytes));
  }
  return result;
}

PipelineTimes equal_times(const PipelineOrder& order, int64_t forward_ns, int64_t backward_ns,
                          int64_t send_ns) {
  const auto stages = static_cast<size_t>(order.stages);
  const auto microbatches = static_cast<size_t>(order.microbatches);
  PipelineTimes times;
  times.forward_ns.assign(stages, std::vector<int64_t>(microbatches, forward_ns));
  times.backward_ns.assign(stages, std::vector<int64_t>(microbatches, backward_ns));
  times.send_ns = send_ns;
  return times;
}

PipelineRun simulate(const PipelineOrder& order, const PipelineTimes& times) {
  return PassGraph(order, times).run();
}

std::vector<std::vector<int64_t>> slack(const PipelineOrder& order, const PipelineTimes& times) {
  return PassGraph(order, times).slack();
}

int64_t exposed_ns(const PipelineOrder& order, const PipelineTimes& times,
                   const std::vector<PassDelay>& delays) {
  PipelineTimes longer = times;
  for (const PassDelay& delay : delays) {
    const PipelinePass& pass = delay.pass;
    auto& table = pass.kind == PassKind::kForward ? longer.forward_ns : longer.backward_ns;
    const bool inside = pass.stage >= 0 && pass.stage < order.stages && pass.microbatch >= 0 &&
                        pass.microbatch < order.microbatches;
    BGL_CHECK(inside, pass_text(pass), order.stages, order.microbatches);
    table[static_cast<size_t>(pass.stage)][static_cast<size_t>(pass.microbatch)] += delay.ns;
  }
  return simulate(order, longer).makespan_ns - simulate(order, times).makespan_ns;
}

}  // namespace bagualu
