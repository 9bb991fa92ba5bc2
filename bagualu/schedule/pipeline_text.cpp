#include "bagualu/schedule/pipeline_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <map>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int kMaxNumber = 1 << 20;

// "12" at the front of text, which it takes off; -1 if there is none or it is too large.
int take_number(std::string_view& text) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || value < 0 || value > kMaxNumber || text.front() == '-') return -1;
  // One text per pass: no leading zero.
  if (end - text.data() > 1 && text.front() == '0') return -1;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

std::optional<PipelinePass> parse_pass(std::string_view token) {
  PipelinePass pass;
  pass.stage = take_number(token);
  if (pass.stage < 0 || token.empty()) return std::nullopt;
  const size_t kind = kPassLetters.find(token.front());
  if (kind == std::string_view::npos) return std::nullopt;
  pass.kind = static_cast<PassKind>(kind);
  token.remove_prefix(1);
  pass.microbatch = token.empty() ? -1 : take_number(token);
  if (pass.microbatch < 0 || !token.empty()) return std::nullopt;
  return pass;
}

// What a rank runs of one micro-batch in one stage: the place of each kind in its list.
struct Visit {
  size_t rank = 0;
  std::array<std::ptrdiff_t, kPassLetters.size()> place = {-1, -1, -1, -1};

  std::ptrdiff_t& of(PassKind kind) { return place[static_cast<size_t>(kind)]; }
  bool has(PassKind kind) const { return place[static_cast<size_t>(kind)] >= 0; }
};

using Visits = std::map<std::pair<int, int>, Visit>;  // by stage and micro-batch

std::string at_rank(size_t rank, const PipelinePass& pass) {
  return fmt::format("rank {}: {}", rank, pass_text(pass));
}

std::optional<std::string> collect(const PipelineOrder& order, Visits& visits) {
  for (size_t r = 0; r < order.ranks.size(); ++r) {
    const auto& list = order.ranks[r];
    for (size_t i = 0; i < list.size(); ++i) {
      const auto [stage, kind, microbatch] = list[i];
      if (stage < 0 || stage >= order.stages || microbatch < 0 ||
          microbatch >= order.microbatches) {
        return fmt::format("{} is outside {} stages and {} micro-batches", at_rank(r, list[i]),
                           order.stages, order.microbatches);
      }
      const auto [entry, added] = visits.try_emplace({stage, microbatch});
      Visit& visit = entry->second;
      if (added) visit.rank = r;
      if (visit.rank != r) {
        return fmt::format("{} stands on another rank than the passes before it, on rank {}",
                           at_rank(r, list[i]), visit.rank);
      }
      if (visit.has(kind)) return at_rank(r, list[i]) + " is listed twice";
      visit.of(kind) = static_cast<std::ptrdiff_t>(i);
    }
  }
  return std::nullopt;
}

std::optional<std::string> incomplete(const PipelineOrder& order, const Visits& visits) {
  for (int stage = 0; stage < order.stages; ++stage) {
    for (int m = 0; m < order.microbatches; ++m) {
      const auto found = visits.find({stage, m});
      const PipelinePass forward = {stage, PassKind::kForward, m};
      if (found == visits.end() || !found->second.has(PassKind::kForward)) {
        return pass_text(forward) + " is missing";
      }
      const Visit& visit = found->second;
      const bool whole = visit.has(PassKind::kBackward);
      const bool input = visit.has(PassKind::kInputGrad);
      const bool weight = visit.has(PassKind::kWeightGrad);
      if (whole && (input || weight)) {
        return fmt::format("{} runs backward both whole and split",
                           at_rank(visit.rank, {stage, PassKind::kBackward, m}));
      }
      if (whole || (input && weight)) continue;
      const PassKind lacks = !input && !weight ? PassKind::kBackward
                             : input           ? PassKind::kWeightGrad
                                               : PassKind::kInputGrad;
      return at_rank(visit.rank, {stage, lacks, m}) + " is missing";
    }
  }
  return std::nullopt;
}

// Runs the order: each rank goes on while the pass before (in the model's order) has run.
class Progress {
 public:
  Progress(const PipelineOrder& order, const Visits& visits)
      : order_(order), visits_(visits), done_(order.ranks.size(), 0) {}

  std::optional<std::string> stuck() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < done_.size(); ++r) {
        while (static_cast<size_t>(done_[r]) < order_.ranks[r].size() && !waits_for(r)) {
          ++done_[r];
          moved = true;
        }
      }
    }
    std::string text;
    for (size_t r = 0; r < done_.size(); ++r) {
      if (static_cast<size_t>(done_[r]) == order_.ranks[r].size()) continue;
      if (!text.empty()) text += "; ";
      text += fmt::format("{} waits for {}", at_rank(r, next(r)), pass_text(*waits_for(r)));
    }
    if (text.empty()) return std::nullopt;
    return "for ever, " + text;
  }

 private:
  const PipelinePass& next(size_t rank) const {
    return order_.ranks[rank][static_cast<size_t>(done_[rank])];
  }

  bool ran(const Visit& visit, PassKind kind) const {
    return visit.place[static_cast<size_t>(kind)] < done_[visit.rank];
  }

  std::optional<PipelinePass> waits_for(size_t rank) const {
    const auto [stage, kind, microbatch] = next(rank);
    const Visit& own = visits_.at({stage, microbatch});
    if (kind == PassKind::kForward) {
      if (stage == 0 || ran(visits_.at({stage - 1, microbatch}), kind)) return std::nullopt;
      return PipelinePass{stage - 1, kind, microbatch};
    }
    const PassKind before =
        kind == PassKind::kWeightGrad ? PassKind::kInputGrad : PassKind::kForward;
    if (!ran(own, before)) return PipelinePass{stage, before, microbatch};
    if (kind == PassKind::kWeightGrad || stage + 1 == order_.stages) return std::nullopt;
    const Visit& behind = visits_.at({stage + 1, microbatch});
    const PassKind gradient =
        behind.has(PassKind::kBackward) ? PassKind::kBackward : PassKind::kInputGrad;
    if (ran(behind, gradient)) return std::nullopt;
    return PipelinePass{stage + 1, gradient, microbatch};
  }

  const PipelineOrder& order_;
  const Visits& visits_;
  std::vector<std::ptrdiff_t> done_;
};

}  // namespace

std::string order_text(const PipelineOrder& order) {
  std::string text;
  for (const auto& list : order.ranks) {
    for (size_t i = 0; i < list.size(); ++i) {
      if (i > 0) text += ' ';
      text += pass_text(list[i]);
    }
    text += '\n';
  }
  return text;
}

PipelineOrder parse_order(std::string_view text, const std::string& where) {
  PipelineOrder order;
  int line_number = 0;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    ++line_number;
    std::vector<PipelinePass> list;
    for (size_t begin = 0; begin < line.size();) {
      const size_t end = std::min(line.find(' ', begin), line.size());
      const std::string_view token = line.substr(begin, end - begin);
      begin = end + 1;
      if (token.empty()) continue;
      const std::optional<PipelinePass> pass = parse_pass(token);
      if (!pass) {
        throw InvalidInput(where, fmt::format("line {}, token {}", line_number, list.size() + 1),
                           std::string(token.substr(0, 40)),
                           "stage, one of F B I W, micro-batch, as 2F0");
      }
      order.stages = std::max(order.stages, pass->stage + 1);
      order.microbatches = std::max(order.microbatches, pass->microbatch + 1);
      list.push_back(*pass);
    }
    order.ranks.push_back(std::move(list));
  }
  if (order.stages == 0) {
    throw InvalidInput(where, "line 1, token 1", "nothing", "passes of rank 0, as 0F0 0B0");
  }
  return order;
}

std::optional<std::string> order_fault(const PipelineOrder& order) {
  Visits visits;
  if (auto fault = collect(order, visits)) return fault;
  if (auto fault = incomplete(order, visits)) return fault;
  return Progress(order, visits).stuck();
}

std::optional<std::string> order_fault(const PipelineOrder& order, PipelineKind kind) {
  const int pp = static_cast<int>(order.ranks.size());
  for (size_t r = 0; r < order.ranks.size(); ++r) {
    for (const PipelinePass& pass : order.ranks[r]) {
      const int holder = rank_of_pass(kind, pp, order.microbatches, pass);
      if (holder == static_cast<int>(r)) continue;
      return fmt::format("{} belongs on rank {}", at_rank(r, pass), holder);
    }
  }
  return order_fault(order);
}

}  // namespace bagualu
