#include "bagualu/schedule/pipeline.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr size_t kKindCount = kPassLetters.size();

struct Inputs {
  std::array<PipelinePass, 2> pass;
  size_t count = 0;
  void add(const PipelinePass& input) { pass[count++] = input; }
};

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

// The passes of an order as nodes of a graph, in an order in which every input comes first.
class PassGraph {
 public:
  PassGraph(const PipelineOrder& order, const PipelineTimes& times) : order_(order), times_(times) {
    check_table(order, times.forward_ns);
    check_table(order, times.backward_ns);
    BGL_CHECK(times.send_ns >= 0, times.send_ns);
    if (!times.weight_grad_ns.empty() || splits(order)) check_table(order, times.weight_grad_ns);
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
      const Inputs inputs = inputs_of(pass_at(node));
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
      const bool idle = order_.ranks[r].empty();
      result.span_ns.push_back(idle ? 0 : result.end_ns[r].back() - result.start_ns[r].front());
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
      const Inputs inputs = inputs_of(pass_at(*node));
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
    return (static_cast<size_t>(pass.stage) * kKindCount + static_cast<size_t>(pass.kind)) *
               static_cast<size_t>(order_.microbatches) +
           static_cast<size_t>(pass.microbatch);
  }

  Node node_of(const PipelinePass& pass) const { return nodes_[slot_of(pass)]; }

  // Passes whose results this one reads. A missing backward of the next stage is named as a whole
  // one.
  Inputs inputs_of(const PipelinePass& pass) const {
    Inputs inputs;
    const auto [stage, kind, microbatch] = pass;
    if (kind == PassKind::kForward) {
      if (stage > 0) inputs.add({stage - 1, kind, microbatch});
      return inputs;
    }
    if (kind == PassKind::kWeightGrad) {
      inputs.add({stage, PassKind::kInputGrad, microbatch});
      return inputs;
    }
    inputs.add({stage, PassKind::kForward, microbatch});
    if (stage + 1 == order_.stages) return inputs;
    PipelinePass next = {stage + 1, PassKind::kInputGrad, microbatch};
    if (!listed_[slot_of(next)]) next.kind = PassKind::kBackward;
    inputs.add(next);
    return inputs;
  }

  int64_t duration_ns(const Node& node) const {
    const auto [stage, kind, microbatch] = pass_at(node);
    const auto at = [s = static_cast<size_t>(stage), m = static_cast<size_t>(microbatch)](
                        const std::vector<std::vector<int64_t>>& table) { return table[s][m]; };
    switch (kind) {
      case PassKind::kForward:
        return at(times_.forward_ns);
      case PassKind::kBackward:
        return at(times_.backward_ns);
      case PassKind::kWeightGrad:
        return at(times_.weight_grad_ns);
      case PassKind::kInputGrad:
        break;
    }
    const int64_t ns = at(times_.backward_ns) - at(times_.weight_grad_ns);
    BGL_CHECK(ns >= 0, pass_text(pass_at(node)), ns);
    return ns;
  }

  int64_t send_ns(const Node& from, const Node& to) const {
    return from.rank == to.rank ? 0 : times_.send_ns;
  }

  void place_passes() {
    const size_t slots =
        static_cast<size_t>(order_.stages) * kKindCount * static_cast<size_t>(order_.microbatches);
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
    const Inputs inputs = inputs_of(pass);
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
    const bool inside = pass.stage >= 0 && pass.stage < order.stages && pass.microbatch >= 0 &&
                        pass.microbatch < order.microbatches;
    BGL_CHECK(inside, pass_text(pass), order.stages, order.microbatches);
    const auto lengthen = [&](std::vector<std::vector<int64_t>>& table) {
      table[static_cast<size_t>(pass.stage)][static_cast<size_t>(pass.microbatch)] += delay.ns;
    };
    lengthen(pass.kind == PassKind::kForward ? longer.forward_ns : longer.backward_ns);
    if (pass.kind == PassKind::kWeightGrad) lengthen(longer.weight_grad_ns);
  }
  return simulate(order, longer).makespan_ns - simulate(order, times).makespan_ns;
}

}  // namespace bagualu
