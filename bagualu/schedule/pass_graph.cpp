#include "bagualu/schedule/pass_graph.h"

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr size_t kKindCount = kPassLetters.size();

}  // namespace

PassGraph::PassGraph(const PipelineOrder& order, const std::vector<std::vector<bool>>* fused)
    : order_(order), fused_(fused) {
  place_passes();
  sort();
}

size_t PassGraph::slot_of(const PipelinePass& pass) const {
  const bool inside = pass.stage >= 0 && pass.stage < order_.stages && pass.microbatch >= 0 &&
                      pass.microbatch < order_.microbatches;
  BGL_CHECK(inside, pass_text(pass), order_.stages, order_.microbatches);
  return (static_cast<size_t>(pass.stage) * kKindCount + static_cast<size_t>(pass.kind)) *
             static_cast<size_t>(order_.microbatches) +
         static_cast<size_t>(pass.microbatch);
}

PassInputs PassGraph::inputs_of(const PipelinePass& pass) const {
  PassInputs inputs;
  const auto [stage, kind, microbatch] = pass;
  switch (kind) {
    case PassKind::kForward:
      if (stage > 0) inputs.add({stage - 1, kind, microbatch});
      return inputs;
    case PassKind::kWeightGrad:
      inputs.add({stage, PassKind::kInputGrad, microbatch});
      return inputs;
    case PassKind::kReload:
      inputs.add({stage, PassKind::kOffload, microbatch});
      return inputs;
    case PassKind::kRecompute:
    case PassKind::kOffload:
      inputs.add({stage, PassKind::kForward, microbatch});
      return inputs;
    case PassKind::kBackward:
    case PassKind::kInputGrad:
      break;
  }
  inputs.add({stage, PassKind::kForward, microbatch});
  if (has_extras_) {
    for (PassKind extra : {PassKind::kRecompute, PassKind::kReload}) {
      if (listed({stage, extra, microbatch})) inputs.add({stage, extra, microbatch});
    }
  }
  if (stage + 1 == order_.stages) return inputs;
  PipelinePass next = {stage + 1, PassKind::kInputGrad, microbatch};
  if (!listed(next)) next.kind = PassKind::kBackward;
  inputs.add(next);
  return inputs;
}

void PassGraph::place_passes() {
  const size_t slots =
      static_cast<size_t>(order_.stages) * kKindCount * static_cast<size_t>(order_.microbatches);
  nodes_.assign(slots, {});
  listed_.assign(slots, 0);
  before_.resize(order_.ranks.size());
  if (fused_ != nullptr) BGL_CHECK(fused_->size() == order_.ranks.size(), fused_->size());
  for (size_t r = 0; r < order_.ranks.size(); ++r) {
    const auto& list = order_.ranks[r];
    if (fused_ != nullptr) BGL_CHECK((*fused_)[r].size() == list.size(), r, (*fused_)[r].size());
    before_[r].resize(list.size());
    Before last;
    size_t last_reload = kNone;
    for (size_t i = 0, leader = 0; i < list.size(); ++i) {
      const PassKind kind = list[i].kind;
      const size_t slot = slot_of(list[i]);
      BGL_CHECK(!listed_[slot], pass_text(list[i]), "is listed twice");
      const bool second = i > 0 && leader + 1 == i && size_of({r, leader}) == 2;
      if (!second) leader = i;
      BGL_CHECK(size_of({r, i}) == 1 || (!second && i + 1 < list.size()), r, pass_text(list[i]));
      nodes_[slot] = {r, leader};
      listed_[slot] = 1;
      has_extras_ = has_extras_ || kind == PassKind::kRecompute || is_copy(kind);
      before_[r][i].compute = last.compute;
      if (!is_copy(kind)) {
        last.compute = leader;
        continue;
      }
      size_t& engine = kind == PassKind::kReload ? last_reload : last.engine;
      before_[r][i].engine = engine;
      engine = i;
    }
  }
}

// Advances every rank as far as its inputs allow; if none moves, the rest waits for ever.
void PassGraph::sort() {
  std::vector<size_t> next(order_.ranks.size(), 0);
  std::vector<char> done(listed_.size(), 0);
  size_t left = 0;
  for (const auto& list : order_.ranks) left += list.size();
  sorted_.reserve(left);
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t r = 0; r < next.size(); ++r) {
      while (next[r] < order_.ranks[r].size() && ready({r, next[r]}, done)) {
        const Node node = {r, next[r]};
        const size_t size = size_of(node);
        for (size_t part = 0; part < size; ++part) done[slot_of(pass_at(node, part))] = 1;
        sorted_.push_back(node);
        next[r] += size;
        left -= size;
        moved = true;
      }
    }
  }
  if (left > 0) throw InternalError(deadlock_text(next, done));
}

bool PassGraph::ready(const Node& node, const std::vector<char>& done) const {
  for (size_t part = 0; part < size_of(node); ++part) {
    if (waits(pass_at(node, part), done, nullptr)) return false;
  }
  return true;
}

// True if an input has not run; `first` gets it.
bool PassGraph::waits(const PipelinePass& pass, const std::vector<char>& done,
                      PipelinePass* first) const {
  const PassInputs inputs = inputs_of(pass);
  for (size_t i = 0; i < inputs.count; ++i) {
    if (done[slot_of(inputs.pass[i])]) continue;
    if (first != nullptr) *first = inputs.pass[i];
    return true;
  }
  return false;
}

std::string PassGraph::deadlock_text(const std::vector<size_t>& next,
                                     const std::vector<char>& done) const {
  std::string text = "pipeline order is stuck:";
  for (size_t r = 0; r < next.size(); ++r) {
    if (next[r] == order_.ranks[r].size()) continue;
    const Node node = {r, next[r]};
    PipelinePass input;
    size_t part = 0;
    while (!waits(pass_at(node, part), done, &input)) ++part;
    text += " rank " + std::to_string(r) + ": " + pass_text(pass_at(node, part)) + " waits for " +
            pass_text(input) + (listed(input) ? ";" : ", which no rank runs;");
  }
  text.pop_back();
  return text;
}

}  // namespace bagualu
