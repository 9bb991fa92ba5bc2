// Check of an order that came from outside; shares no code with simulate().
#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/schedule/overlap_order.h"
#include "bagualu/schedule/pipeline_text.h"

namespace bagualu {
namespace {

// What a rank runs of one micro-batch in one stage: the place of each kind in its list.
struct Visit {
  size_t rank = 0;
  std::array<std::ptrdiff_t, kPassLetters.size()> place;

  Visit() { place.fill(-1); }

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

// What is wrong with the passes that one micro-batch's visit to a stage may do without.
std::optional<std::string> odd_copy(const Visit& visit, int stage, int m) {
  const bool offload = visit.has(PassKind::kOffload);
  const bool reload = visit.has(PassKind::kReload);
  if (offload == reload) return std::nullopt;
  const PassKind lacks = offload ? PassKind::kReload : PassKind::kOffload;
  return at_rank(visit.rank, {stage, lacks, m}) + " is missing";
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
      if (auto fault = odd_copy(visit, stage, m)) return fault;
      if (whole || (input && weight)) continue;
      const PassKind lacks = !input && !weight ? PassKind::kBackward
                             : input           ? PassKind::kWeightGrad
                                               : PassKind::kInputGrad;
      return at_rank(visit.rank, {stage, lacks, m}) + " is missing";
    }
  }
  return std::nullopt;
}

using Fused = std::vector<std::vector<bool>>;

// Runs the order: each rank goes on while the pass before (in the model's order) has run, a slot
// while both of its passes can.
class Progress {
 public:
  Progress(const PipelineOrder& order, const Visits& visits, const Fused* fused)
      : order_(order), visits_(visits), fused_(fused), done_(order.ranks.size(), 0) {}

  std::optional<std::string> stuck() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < done_.size(); ++r) {
        while (static_cast<size_t>(done_[r]) < order_.ranks[r].size() && !next_wait(r)) {
          done_[r] += in_slot(r) ? 2 : 1;
          moved = true;
        }
      }
    }
    std::string text;
    for (size_t r = 0; r < done_.size(); ++r) {
      if (static_cast<size_t>(done_[r]) == order_.ranks[r].size()) continue;
      if (!text.empty()) text += "; ";
      const auto [pass, input] = *next_wait(r);
      text += fmt::format("{} waits for {}", at_rank(r, pass), pass_text(input));
    }
    if (text.empty()) return std::nullopt;
    return "for ever, " + text;
  }

 private:
  using Wait = std::pair<PipelinePass, PipelinePass>;  // a pass and what it waits for

  bool in_slot(size_t rank) const {
    return fused_ != nullptr && (*fused_)[rank][static_cast<size_t>(done_[rank])];
  }

  std::optional<Wait> next_wait(size_t rank) const {
    const auto first = static_cast<size_t>(done_[rank]);
    for (size_t i = first; i <= first + (in_slot(rank) ? 1 : 0); ++i) {
      const PipelinePass& pass = order_.ranks[rank][i];
      if (const auto input = waits_for(pass)) return Wait{pass, *input};
    }
    return std::nullopt;
  }

  bool ran(const PipelinePass& pass) const {
    const Visit& visit = visits_.at({pass.stage, pass.microbatch});
    return visit.place[static_cast<size_t>(pass.kind)] < done_[visit.rank];
  }

  std::optional<PipelinePass> waits_for(const PipelinePass& pass) const {
    const auto [stage, kind, microbatch] = pass;
    const auto unless_ran = [this](const PipelinePass& input) {
      return ran(input) ? std::nullopt : std::optional(input);
    };
    switch (kind) {
      case PassKind::kForward:
        if (stage == 0) return std::nullopt;
        return unless_ran({stage - 1, kind, microbatch});
      case PassKind::kWeightGrad:
        return unless_ran({stage, PassKind::kInputGrad, microbatch});
      case PassKind::kReload:
        return unless_ran({stage, PassKind::kOffload, microbatch});
      case PassKind::kRecompute:
      case PassKind::kOffload:
        return unless_ran({stage, PassKind::kForward, microbatch});
      case PassKind::kBackward:
      case PassKind::kInputGrad:
        break;
    }
    // What a visit does not list has run, as it were: its place is -1.
    for (PassKind before : {PassKind::kForward, PassKind::kRecompute, PassKind::kReload}) {
      if (auto input = unless_ran({stage, before, microbatch})) return input;
    }
    if (stage + 1 == order_.stages) return std::nullopt;
    const bool whole = visits_.at({stage + 1, microbatch}).has(PassKind::kBackward);
    return unless_ran({stage + 1, whole ? PassKind::kBackward : PassKind::kInputGrad, microbatch});
  }

  const PipelineOrder& order_;
  const Visits& visits_;
  const Fused* fused_;
  std::vector<std::ptrdiff_t> done_;
};

// Slots that are not a forward and a backward of two micro-batches.
std::optional<std::string> odd_slot(const PipelineOrder& order, const Fused& fused) {
  BGL_CHECK(fused.size() == order.ranks.size(), fused.size());
  for (size_t r = 0; r < fused.size(); ++r) {
    const auto& list = order.ranks[r];
    BGL_CHECK(fused[r].size() == list.size(), r, fused[r].size());
    for (size_t i = 0; i < list.size(); ++i) {
      if (!fused[r][i]) continue;
      if (i + 1 == list.size()) return at_rank(r, list[i]) + " is fused with nothing";
      const PipelinePass& next = list[i + 1];
      const bool backward = next.kind == PassKind::kBackward || next.kind == PassKind::kInputGrad;
      if (list[i].kind == PassKind::kForward && backward && !fused[r][i + 1] &&
          next.microbatch != list[i].microbatch) {
        continue;
      }
      return fmt::format(
          "{} and {} are no slot, a forward and then a backward of another "
          "micro-batch",
          at_rank(r, list[i]), pass_text(next));
    }
  }
  return std::nullopt;
}

std::optional<std::string> fault_of(const PipelineOrder& order, const Fused* fused) {
  Visits visits;
  if (auto fault = collect(order, visits)) return fault;
  if (auto fault = incomplete(order, visits)) return fault;
  if (fused != nullptr) {
    if (auto fault = odd_slot(order, *fused)) return fault;
  }
  return Progress(order, visits, fused).stuck();
}

std::optional<std::string> misplaced(const PipelineOrder& order, PipelineKind kind) {
  const int pp = static_cast<int>(order.ranks.size());
  for (size_t r = 0; r < order.ranks.size(); ++r) {
    for (const PipelinePass& pass : order.ranks[r]) {
      const int holder = rank_of_pass(kind, pp, order.microbatches, pass);
      if (holder == static_cast<int>(r)) continue;
      return fmt::format("{} belongs on rank {}", at_rank(r, pass), holder);
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> order_fault(const PipelineOrder& order) {
  return fault_of(order, nullptr);
}

std::optional<std::string> order_fault(const PipelineOrder& order, PipelineKind kind) {
  if (auto fault = misplaced(order, kind)) return fault;
  return order_fault(order);
}

std::optional<std::string> order_fault(const OverlapOrder& order) {
  return fault_of(order.order, &order.fused);
}

std::optional<std::string> order_fault(const OverlapOrder& order, PipelineKind kind) {
  if (auto fault = misplaced(order.order, kind)) return fault;
  return order_fault(order);
}

}  // namespace bagualu
