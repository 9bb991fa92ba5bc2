#include "bagualu/schedule/overlap_order.h"

#include <algorithm>
#include <string>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/schedule/pipeline_dual.h"

namespace bagualu {
namespace {

OverlapOrder empty_order(int ranks, int stages, int microbatches) {
  OverlapOrder order;
  order.order.stages = stages;
  order.order.microbatches = microbatches;
  order.order.ranks.resize(static_cast<size_t>(ranks));
  order.fused.resize(static_cast<size_t>(ranks));
  return order;
}

// Passes of one rank.
class SlotList {
 public:
  SlotList(OverlapOrder& order, int rank)
      : list_(order.order.ranks[static_cast<size_t>(rank)]),
        fused_(order.fused[static_cast<size_t>(rank)]) {}

  void add(const PipelinePass& pass) {
    list_.push_back(pass);
    fused_.push_back(false);
  }

  void add_slot(const PipelinePass& forward, const PipelinePass& backward) {
    add(forward);
    fused_.back() = true;
    add(backward);
  }

 private:
  std::vector<PipelinePass>& list_;
  std::vector<bool>& fused_;
};

// One stage per rank; with `lag`, backwards are split and weight gradients follow that many
// micro-batches behind, on rank r `lag` * r.
OverlapOrder plain_slots(int pp, int microbatches, std::optional<int> lag) {
  OverlapOrder order = empty_order(pp, pp, microbatches);
  const PassKind kind = lag ? PassKind::kInputGrad : PassKind::kBackward;
  for (int r = 0; r < pp; ++r) {
    SlotList out(order, r);
    const int ahead = std::min(2 * (pp - 1 - r) + 1, microbatches);
    for (int m = 0; m < ahead; ++m) out.add({r, PassKind::kForward, m});
    int weights = 0;
    for (int m = 0; m < microbatches; ++m) {
      if (ahead + m < microbatches) {
        out.add_slot({r, PassKind::kForward, ahead + m}, {r, kind, m});
      } else {
        out.add({r, kind, m});
      }
      if (lag && m >= *lag * r) out.add({r, PassKind::kWeightGrad, weights++});
    }
    while (lag && weights < microbatches) out.add({r, PassKind::kWeightGrad, weights++});
  }
  return order;
}

// Megatron's turns, groups of pp micro-batches; the first group takes what pp leaves over, so that
// no group is smaller than pp and none larger than the one the warm-up is made for.
OverlapOrder interleaved_slots(int pp, int chunks, int microbatches, bool overlap) {
  OverlapOrder order = empty_order(pp, pp * chunks, microbatches);
  const int first_group = microbatches < pp ? microbatches : pp + microbatches % pp;
  std::vector<std::pair<int, int>> turns;  // chunk and micro-batch of the k-th forward of a rank
  for (int first = 0, group = first_group; first < microbatches; first += group, group = pp) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int m = first; m < first + group; ++m) turns.push_back({chunk, m});
    }
  }
  const auto count = static_cast<int>(turns.size());
  for (int r = 0; r < pp; ++r) {
    SlotList out(order, r);
    int ahead = (chunks == 1 ? pp - 1 - r : 2 * (pp - 1 - r)) + (chunks - 1) * first_group;
    if (overlap) ahead = 2 * (pp - 1 - r) + (chunks - 1) * first_group + 1;
    const auto forward = [&](int k) -> PipelinePass {
      const auto [chunk, m] = turns[static_cast<size_t>(k)];
      return {chunk * pp + r, PassKind::kForward, m};
    };
    for (int k = 0; k < std::min(ahead, count); ++k) out.add(forward(k));
    for (int k = 0; k < count; ++k) {
      const auto [chunk, m] = turns[static_cast<size_t>(k)];
      const PipelinePass backward = {(chunks - 1 - chunk) * pp + r, PassKind::kBackward, m};
      if (ahead + k >= count) {
        out.add(backward);
      } else if (overlap) {
        out.add_slot(forward(ahead + k), backward);
      } else {
        out.add(forward(ahead + k));
        out.add(backward);
      }
    }
  }
  return order;
}

OverlapOrder v_slots(int pp, int microbatches, BackwardSplit split) {
  OverlapOrder order = empty_order(pp, 2 * pp, microbatches);
  dual_pipe_v_lists(order.order, split, &order.fused);
  return order;
}

OverlapOrder dual_pipe_slots(int pp, int microbatches) {
  OverlapOrder order = empty_order(pp, pp, microbatches);
  dual_pipe_lists(order.order, &order.fused);
  return order;
}

}  // namespace

void check_overlap_shape(PipelineKind kind, int pp, int virtual_per_rank, int microbatches,
                         bool overlap, const std::string& where) {
  // Any number of micro-batches is one that interleaving takes; 1 stands for it.
  const bool any = kind == PipelineKind::kInterleaved && microbatches >= 1;
  check_order_shape(kind, pp, virtual_per_rank, any ? 1 : microbatches, where);
  if (overlap && kind == PipelineKind::kVHalf) {
    throw InvalidInput(where, "pipeline", "v-half with overlap",
                       "another order, or no overlap: v-half holds too few micro-batches to run "
                       "two at once");
  }
}

OverlapOrder without_slots(PipelineOrder order) {
  OverlapOrder result;
  for (const auto& list : order.ranks) result.fused.emplace_back(list.size(), false);
  result.order = std::move(order);
  return result;
}

OverlapOrder make_overlap_order(PipelineKind kind, int pp, int virtual_per_rank, int microbatches,
                                bool overlap) {
  check_overlap_shape(kind, pp, virtual_per_rank, microbatches, overlap, "pipeline");
  if (!overlap) {
    if (kind == PipelineKind::kInterleaved && microbatches % pp != 0 && microbatches > pp) {
      return interleaved_slots(pp, virtual_per_rank, microbatches, false);
    }
    return without_slots(make_order(kind, pp, virtual_per_rank, microbatches));
  }
  switch (kind) {
    case PipelineKind::k1F1B:
      return plain_slots(pp, microbatches, std::nullopt);
    case PipelineKind::kInterleaved:
      return interleaved_slots(pp, virtual_per_rank, microbatches, true);
    case PipelineKind::kZbH1:
      return plain_slots(pp, microbatches, 1);
    case PipelineKind::kZbH2:
      return plain_slots(pp, microbatches, 2);
    case PipelineKind::kZbV:
      return v_slots(pp, microbatches, BackwardSplit::kAll);
    case PipelineKind::kDualPipe:
      return dual_pipe_slots(pp, microbatches);
    case PipelineKind::kDualPipeV:
      return v_slots(pp, microbatches, BackwardSplit::kSome);
    case PipelineKind::kVHalf:
      break;
  }
  BGL_CHECK(false, static_cast<int>(kind));
  return {};
}

std::vector<int> in_flight(const OverlapOrder& order) { return in_flight(order.order); }

}  // namespace bagualu
