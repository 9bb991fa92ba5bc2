#include "bagualu/schedule/pipeline_dual.h"

#include <algorithm>

namespace bagualu {

void dual_pipe_rank(int depth, int half, int microbatches, BackwardSplit split, TwoPhases out) {
  const bool all = split == BackwardSplit::kAll;
  const auto backward = [&](int phase) {
    out.backward(phase, all);
    if (all) out.weight();
  };
  const auto pair = [&](int forward_phase) {
    out.pair(forward_phase, all);
    if (all) out.weight();
  };
  const int beyond = half - depth - 1;
  for (int i = 0; i < 2 * beyond; ++i) out.forward(0);
  for (int i = 0; i <= depth; ++i) {
    out.forward(0);
    out.forward(1);
  }
  for (int i = 0; i < beyond; ++i) {
    out.backward(1, true);
    out.weight();
    out.forward(1);
  }
  for (int i = 0; i < microbatches - 2 * half + depth + 1; ++i) {
    if (i == 0 && beyond == 0 && half > 1) {
      // At the turning point the first backward's result is what the other ranks wait for.
      out.forward(0);
      backward(1);
    } else {
      pair(0);
    }
    pair(1);
  }
  for (int i = 0; i < beyond; ++i) {
    backward(1);
    pair(1);
  }
  // The later half of these backwards is split, to fill the gaps of the cool-down.
  const int turn = (depth + 1) / 2;
  const auto ending = [&](int phase, bool late) {
    if (late) {
      out.backward(phase, true);
    } else {
      backward(phase);
    }
  };
  for (int i = 0; i <= depth; ++i) {
    ending(1, i > turn || (i == turn && depth % 2 == 1));
    ending(0, i >= turn);
  }
  for (int i = 0; i < beyond; ++i) {
    out.weight();
    out.backward(0, true);
  }
  for (int i = 0; i <= depth; ++i) out.weight();
}

void dual_pipe_lists(PipelineOrder& order, std::vector<std::vector<bool>>* fused) {
  const auto pp = static_cast<int>(order.ranks.size());
  const int half = pp / 2;
  const int first_count = (order.microbatches + 1) / 2;
  for (int r = 0; r < pp; ++r) {
    TwoPhases::Phase down = {r, 0, first_count};
    TwoPhases::Phase up = {pp - 1 - r, first_count, order.microbatches - first_count};
    if (r >= half) std::swap(down, up);
    const auto at = static_cast<size_t>(r);
    dual_pipe_rank(
        std::min(r, pp - 1 - r), half, std::max(first_count, pp), BackwardSplit::kSome,
        TwoPhases(down, up, order.ranks[at], fused == nullptr ? nullptr : &(*fused)[at]));
  }
}

void dual_pipe_v_lists(PipelineOrder& order, BackwardSplit split,
                       std::vector<std::vector<bool>>* fused) {
  const auto pp = static_cast<int>(order.ranks.size());
  for (int r = 0; r < pp; ++r) {
    const auto at = static_cast<size_t>(r);
    dual_pipe_rank(r, pp, std::max(order.microbatches, 2 * pp), split,
                   TwoPhases({r, 0, order.microbatches}, {2 * pp - 1 - r, 0, order.microbatches},
                             order.ranks[at], fused == nullptr ? nullptr : &(*fused)[at]));
  }
}

}  // namespace bagualu
