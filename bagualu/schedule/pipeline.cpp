#include "bagualu/schedule/pipeline.h"

#include <algorithm>
#include <cstddef>

#include "bagualu/base/error.h"
#include "bagualu/schedule/overlap_order.h"
#include "bagualu/schedule/pass_graph.h"

namespace bagualu {
namespace {

bool splits(const PipelineOrder& order) {
  for (const auto& list : order.ranks) {
    for (const PipelinePass& pass : list) {
      if (pass.kind == PassKind::kInputGrad || pass.kind == PassKind::kWeightGrad) return true;
    }
  }
  return false;
}

void check_table(const PipelineOrder& order, const std::vector<std::vector<int64_t>>& table) {
  BGL_CHECK(table.size() == static_cast<size_t>(order.stages), table.size(), order.stages);
  for (const auto& row : table) {
    BGL_CHECK(row.size() == static_cast<size_t>(order.microbatches), row.size());
    for (int64_t value : row) BGL_CHECK(value >= 0, value);
  }
}

// Where bytes are after a recompute or a copy is a question of tensors, not of passes.
void check_held(const PipelinePass& pass) {
  const bool counts = pass.kind != PassKind::kRecompute && !is_copy(pass.kind);
  BGL_CHECK(counts, pass_text(pass), "recomputes or copies: its bytes are the timeline's");
}

// Start and end of the nodes of a graph.
class Timetable {
 public:
  Timetable(const PassGraph& graph, const PipelineTimes& times, const SlotNs& slot_ns)
      : graph_(graph), times_(times), slot_ns_(slot_ns) {
    const PipelineOrder& order = graph.order();
    check_table(order, times.forward_ns);
    check_table(order, times.backward_ns);
    BGL_CHECK(times.send_ns >= 0, times.send_ns);
    if (!times.weight_grad_ns.empty() || splits(order)) check_table(order, times.weight_grad_ns);
    for (const auto* table : {&times.recompute_ns, &times.offload_ns, &times.reload_ns}) {
      if (!table->empty()) check_table(order, *table);
    }
  }

  PipelineRun run() const {
    PipelineRun result;
    for (const auto& list : graph_.order().ranks) {
      result.start_ns.emplace_back(list.size(), 0);
      result.end_ns.emplace_back(list.size(), 0);
    }
    for (const Node& node : graph_.sorted()) {
      int64_t start = 0;
      each_input(node, [&](const Node& from, int64_t send_ns) {
        start = std::max(start, result.end_ns[from.rank][from.index] + send_ns);
      });
      const int64_t end = start + node_ns(node);
      for (size_t part = 0; part < graph_.size_of(node); ++part) {
        result.start_ns[node.rank][node.index + part] = start;
        result.end_ns[node.rank][node.index + part] = end;
      }
      result.makespan_ns = std::max(result.makespan_ns, end);
    }
    for (size_t r = 0; r < graph_.order().ranks.size(); ++r) add_rank(r, result);
    return result;
  }

  std::vector<std::vector<int64_t>> slack() const {
    const PipelineRun at = run();
    // Longest path from the end of a pass to the end of the step.
    std::vector<std::vector<int64_t>> tail;
    for (const auto& list : graph_.order().ranks) tail.emplace_back(list.size(), 0);
    for (auto node = graph_.sorted().rbegin(); node != graph_.sorted().rend(); ++node) {
      const int64_t through = node_ns(*node) + tail[node->rank][node->index];
      each_input(*node, [&](const Node& from, int64_t send_ns) {
        int64_t& longest = tail[from.rank][from.index];
        longest = std::max(longest, through + send_ns);
      });
    }
    for (size_t r = 0; r < tail.size(); ++r) {
      for (size_t i = 0; i < tail[r].size(); ++i) {
        tail[r][i] = at.makespan_ns - at.end_ns[r][i] - tail[r][i];
      }
    }
    return tail;
  }

 private:
  using Node = PassGraph::Node;

  // Calls visit(node that ends before, time from its end to here).
  template <class Visit>
  void each_input(const Node& node, const Visit& visit) const {
    const PassGraph::Before& before = graph_.before(node);
    if (before.compute != PassGraph::kNone) visit(Node{node.rank, before.compute}, 0);
    if (before.engine != PassGraph::kNone) visit(Node{node.rank, before.engine}, 0);
    for (size_t part = 0; part < graph_.size_of(node); ++part) {
      const PassInputs inputs = graph_.inputs_of(graph_.pass_at(node, part));
      for (size_t i = 0; i < inputs.count; ++i) {
        const Node from = graph_.node_of(inputs.pass[i]);
        visit(from, from.rank == node.rank ? 0 : times_.send_ns);
      }
    }
  }

  // Idle time and span of a rank's compute stream; a slot counts once.
  void add_rank(size_t r, PipelineRun& result) const {
    const auto& list = graph_.order().ranks[r];
    int64_t busy = 0;
    int64_t first = result.makespan_ns;
    int64_t last = 0;
    for (size_t i = 0; i < list.size(); i += graph_.size_of({r, i})) {
      if (is_copy(list[i].kind)) continue;
      busy += result.end_ns[r][i] - result.start_ns[r][i];
      first = std::min(first, result.start_ns[r][i]);
      last = result.end_ns[r][i];
    }
    result.bubble_ns.push_back(result.makespan_ns - busy);
    result.span_ns.push_back(std::max<int64_t>(0, last - first));
  }

  int64_t node_ns(const Node& node) const {
    const int64_t own = pass_ns(graph_.pass_at(node));
    if (graph_.size_of(node) == 1) return own;
    const int64_t other = pass_ns(graph_.pass_at(node, 1));
    if (!slot_ns_) return own + other;
    const int64_t ns = slot_ns_(node.rank, node.index, own, other);
    BGL_CHECK(ns >= 0, pass_text(graph_.pass_at(node)), ns);
    return ns;
  }

  int64_t pass_ns(const PipelinePass& pass) const {
    const auto at = [s = static_cast<size_t>(pass.stage), m = static_cast<size_t>(pass.microbatch),
                     &pass](const std::vector<std::vector<int64_t>>& table) {
      BGL_CHECK(!table.empty(), pass_text(pass), "has no time");
      return table[s][m];
    };
    switch (pass.kind) {
      case PassKind::kForward:
        return at(times_.forward_ns);
      case PassKind::kBackward:
        return at(times_.backward_ns);
      case PassKind::kWeightGrad:
        return at(times_.weight_grad_ns);
      case PassKind::kRecompute:
        return at(times_.recompute_ns);
      case PassKind::kOffload:
        return at(times_.offload_ns);
      case PassKind::kReload:
        return at(times_.reload_ns);
      case PassKind::kInputGrad:
        break;
    }
    const int64_t ns = at(times_.backward_ns) - at(times_.weight_grad_ns);
    BGL_CHECK(ns >= 0, pass_text(pass), ns);
    return ns;
  }

  const PassGraph& graph_;
  const PipelineTimes& times_;
  const SlotNs& slot_ns_;
};

const SlotNs kNoSlots;

}  // namespace

std::string pass_text(const PipelinePass& pass) {
  return std::to_string(pass.stage) + kPassLetters[static_cast<size_t>(pass.kind)] +
         std::to_string(pass.microbatch);
}

std::vector<ResidentPeak> resident_peaks(const PipelineOrder& order,
                                         const std::vector<std::vector<int64_t>>& bytes) {
  return resident_peaks(order, bytes, bytes);
}

std::vector<ResidentPeak> resident_peaks(
    const PipelineOrder& order, const std::vector<std::vector<int64_t>>& bytes,
    const std::vector<std::vector<int64_t>>& weight_grad_bytes) {
  check_table(order, bytes);
  check_table(order, weight_grad_bytes);
  std::vector<ResidentPeak> peaks;
  for (const auto& list : order.ranks) {
    ResidentPeak peak;
    std::vector<PipelinePass> resident;
    int64_t sum = 0;
    for (const PipelinePass& pass : list) {
      const auto [stage, kind, microbatch] = pass;
      check_held(pass);
      const int64_t own = bytes[static_cast<size_t>(stage)][static_cast<size_t>(microbatch)];
      const int64_t kept =
          weight_grad_bytes[static_cast<size_t>(stage)][static_cast<size_t>(microbatch)];
      const PipelinePass forward = {stage, PassKind::kForward, microbatch};
      if (kind == PassKind::kForward) {
        resident.push_back(pass);
        sum += own;
      } else {
        const auto held = std::find(resident.begin(), resident.end(), forward);
        BGL_CHECK(held != resident.end(), pass_text(pass), "has no forward before it");
        if (kind != PassKind::kInputGrad) resident.erase(held);
        if (kind != PassKind::kWeightGrad) sum -= own;
        if (kind == PassKind::kInputGrad) sum += kept;
        if (kind == PassKind::kWeightGrad) sum -= kept;
        // Gradients kept for the weight gradient may be more than what the input gradient frees.
        if (kind != PassKind::kInputGrad || kept <= own) continue;
      }
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
  std::vector<int> result;
  std::vector<char> held(static_cast<size_t>(order.stages) *
                         static_cast<size_t>(order.microbatches));
  for (const auto& list : order.ranks) {
    int now = 0;
    int most = 0;
    for (const PipelinePass& pass : list) {
      check_held(pass);
      char& own = held[static_cast<size_t>(pass.stage) * static_cast<size_t>(order.microbatches) +
                       static_cast<size_t>(pass.microbatch)];
      if (pass.kind == PassKind::kForward) {
        own = 1;
        most = std::max(most, ++now);
        continue;
      }
      BGL_CHECK(own, pass_text(pass), "has no forward before it");
      if (pass.kind == PassKind::kInputGrad) continue;
      own = 0;
      --now;
    }
    result.push_back(most);
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

PipelineTimes equal_times(const PipelineOrder& order, const PassTimes& times) {
  PipelineTimes all = equal_times(order, times.forward_ns,
                                  times.input_grad_ns + times.weight_grad_ns, times.send_ns);
  all.weight_grad_ns = equal_times(order, times.weight_grad_ns, times.weight_grad_ns).backward_ns;
  return all;
}

PipelineRun simulate(const PipelineOrder& order, const PipelineTimes& times) {
  const PassGraph graph(order);
  return Timetable(graph, times, kNoSlots).run();
}

PipelineRun simulate(const OverlapOrder& order, const PipelineTimes& times, const SlotNs& slot_ns) {
  const PassGraph graph(order.order, &order.fused);
  return Timetable(graph, times, slot_ns).run();
}

std::vector<std::vector<int64_t>> slack(const PipelineOrder& order, const PipelineTimes& times) {
  const PassGraph graph(order);
  return Timetable(graph, times, kNoSlots).slack();
}

int64_t exposed_ns(const PipelineOrder& order, const PipelineTimes& times,
                   const std::vector<PassDelay>& delays) {
  PipelineTimes longer = times;
  for (const PassDelay& delay : delays) {
    const PipelinePass& pass = delay.pass;
    const bool inside = pass.stage >= 0 && pass.stage < order.stages && pass.microbatch >= 0 &&
                        pass.microbatch < order.microbatches;
    BGL_CHECK(inside, pass_text(pass), order.stages, order.microbatches);
    const auto lengthen = [&](std::vector<std::vector<int64_t>>& table) {
      table[static_cast<size_t>(pass.stage)][static_cast<size_t>(pass.microbatch)] += delay.ns;
    };
    switch (pass.kind) {
      case PassKind::kForward:
        lengthen(longer.forward_ns);
        break;
      case PassKind::kWeightGrad:
        lengthen(longer.weight_grad_ns);
        lengthen(longer.backward_ns);
        break;
      case PassKind::kRecompute:
        lengthen(longer.recompute_ns);
        break;
      case PassKind::kOffload:
        lengthen(longer.offload_ns);
        break;
      case PassKind::kReload:
        lengthen(longer.reload_ns);
        break;
      case PassKind::kBackward:
      case PassKind::kInputGrad:
        lengthen(longer.backward_ns);
        break;
    }
  }
  return simulate(order, longer).makespan_ns - simulate(order, times).makespan_ns;
}

}  // namespace bagualu
