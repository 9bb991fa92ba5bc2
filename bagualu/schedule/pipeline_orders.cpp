#include <algorithm>
#include <array>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/schedule/pipeline.h"
#include "bagualu/schedule/pipeline_dual.h"

namespace bagualu {
namespace {

// Passes of one rank; micro-batches beyond the last are left out, which keeps any order valid.
class PassList {
 public:
  PassList(int microbatches, std::vector<PipelinePass>& list)
      : microbatches_(microbatches), list_(list) {}

  void add(int stage, PassKind kind, int microbatch) {
    if (microbatch < microbatches_) list_.push_back({stage, kind, microbatch});
  }

 private:
  int microbatches_;
  std::vector<PipelinePass>& list_;
};

PipelineOrder empty_order(int ranks, int stages, int microbatches) {
  PipelineOrder order;
  order.stages = stages;
  order.microbatches = microbatches;
  order.ranks.resize(static_cast<size_t>(ranks));
  return order;
}

// One stage per rank: `ahead` forwards, then forward and input gradient in turn; weight gradients
// follow `lag` micro-batches behind the input gradients.
void zero_bubble_rank(int rank, int ahead, int lag, int microbatches, PassList out) {
  int weights = 0;
  for (int m = 0; m < ahead; ++m) out.add(rank, PassKind::kForward, m);
  for (int m = 0; m < microbatches; ++m) {
    out.add(rank, PassKind::kForward, ahead + m);
    out.add(rank, PassKind::kInputGrad, m);
    if (m >= lag) out.add(rank, PassKind::kWeightGrad, weights++);
  }
  while (weights < microbatches) out.add(rank, PassKind::kWeightGrad, weights++);
}

PipelineOrder zb_h1(int pp, int microbatches) {
  PipelineOrder order = empty_order(pp, pp, microbatches);
  for (int r = 0; r < pp; ++r) {
    zero_bubble_rank(r, pp - 1 - r, r, microbatches,
                     PassList(microbatches, order.ranks[static_cast<size_t>(r)]));
  }
  return order;
}

PipelineOrder zb_h2(int pp, int microbatches) {
  PipelineOrder order = empty_order(pp, pp, microbatches);
  for (int r = 0; r < pp; ++r) {
    zero_bubble_rank(r, 2 * (pp - 1 - r), 2 * r, microbatches,
                     PassList(microbatches, order.ranks[static_cast<size_t>(r)]));
  }
  return order;
}

PipelineOrder dual_pipe(int pp, int microbatches) {
  PipelineOrder order = empty_order(pp, pp, microbatches);
  dual_pipe_lists(order);
  return order;
}

PipelineOrder dual_pipe_v(int pp, int microbatches) {
  PipelineOrder order = empty_order(pp, 2 * pp, microbatches);
  dual_pipe_v_lists(order, BackwardSplit::kSome);
  return order;
}

// Phase 0 is the way down, phase 1 the way back up. Fewer micro-batches than fill the pipeline are
// the same order with the others left out.
void zb_v_rank(int rank, int pp, int microbatches, TwoPhases out) {
  const int beyond = pp - 1 - rank;
  int ahead = 0;
  for (int i = 0; i <= 2 * beyond; ++i) out.forward(0), ++ahead;
  for (int i = 0; i < rank; ++i) {
    out.forward(1);
    out.forward(0);
    ++ahead;
  }
  for (int i = 0; i <= beyond; ++i) {
    out.forward(1);
    out.backward(1, true);
    out.weight();
  }
  int returned = pp;
  while (returned < microbatches) {
    if (ahead++ < microbatches) out.forward(0);
    out.backward(0, true);
    out.weight();
    out.forward(1);
    out.backward(1, true);
    out.weight();
    ++returned;
  }
  for (int i = 0; i < rank; ++i) {
    out.backward(0, true);
    out.backward(1, true);
  }
  for (int i = 0; i <= beyond; ++i) {
    out.backward(0, true);
    out.weight();
  }
  for (int i = 0; i < 2 * rank; ++i) out.weight();
}

PipelineOrder zb_v(int pp, int microbatches) {
  PipelineOrder order = empty_order(pp, 2 * pp, microbatches);
  for (int r = 0; r < pp; ++r) {
    zb_v_rank(r, pp, std::max(microbatches, 2 * pp - 1),
              TwoPhases({r, 0, microbatches}, {2 * pp - 1 - r, 0, microbatches},
                        order.ranks[static_cast<size_t>(r)]));
  }
  return order;
}

// The passes of micro-batch 0 on one rank at ticks of one pass each; those of micro-batch m come
// 6 m ticks later. Weight gradients take the ticks that are left.
struct VHalfPass {
  int tick = 0;
  int stage = 0;
  PassKind kind = PassKind::kForward;
};

void v_half_rank(const std::array<VHalfPass, 4>& block, int microbatches,
                 std::vector<PipelinePass>& list) {
  constexpr int kPeriod = 6;
  const int end = block.back().tick + kPeriod * microbatches;
  std::vector<PipelinePass> at(static_cast<size_t>(end), {-1, PassKind::kForward, 0});
  for (int m = 0; m < microbatches; ++m) {
    for (const VHalfPass& pass : block) {
      PipelinePass& slot = at[static_cast<size_t>(pass.tick + kPeriod * m)];
      BGL_CHECK(slot.stage < 0, pass.tick, m);
      slot = {pass.stage, pass.kind, m};
    }
  }
  std::vector<PipelinePass> put_off;
  size_t weights = 0;
  for (const PipelinePass& pass : at) {
    if (pass.stage >= 0) {
      list.push_back(pass);
      if (pass.kind != PassKind::kInputGrad) continue;
      put_off.push_back({pass.stage, PassKind::kWeightGrad, pass.microbatch});
    } else if (weights < put_off.size()) {
      list.push_back(put_off[weights++]);
    }
  }
  list.insert(list.end(), put_off.begin() + static_cast<std::ptrdiff_t>(weights), put_off.end());
}

PipelineOrder v_half(int pp, int microbatches) {
  PipelineOrder order = empty_order(pp, 2 * pp, microbatches);
  const int shift = pp % 2 == 0 ? 3 : 0;
  for (int r = 0; r < pp; ++r) {
    const int last = 2 * pp - 1 - r;
    const std::array<VHalfPass, 4> block = {
        {{2 * r, r, PassKind::kForward},
         {3 * pp - r - 2, last, PassKind::kForward},
         {3 * pp + shift + 2 * r - 1, last, PassKind::kInputGrad},
         {6 * pp + shift - r - 2, r, PassKind::kInputGrad}}};
    v_half_rank(block, microbatches, order.ranks[static_cast<size_t>(r)]);
  }
  return order;
}

}  // namespace

PipelineOrder one_f_one_b(int stages, int microbatches) {
  BGL_CHECK(stages >= 1 && microbatches >= 1, stages, microbatches);
  PipelineOrder order = empty_order(stages, stages, microbatches);
  for (int rank = 0; rank < stages; ++rank) {
    PassList out(microbatches, order.ranks[static_cast<size_t>(rank)]);
    const int ahead = stages - 1 - rank;
    for (int m = 0; m < ahead; ++m) out.add(rank, PassKind::kForward, m);
    for (int m = 0; m < microbatches; ++m) {
      out.add(rank, PassKind::kForward, ahead + m);
      out.add(rank, PassKind::kBackward, m);
    }
  }
  return order;
}

PipelineOrder interleaved(int pp, int chunks, int microbatches, int group) {
  if (group == 0) group = pp;
  BGL_CHECK(pp >= 1 && chunks >= 1 && microbatches >= 1 && group >= pp, pp, chunks, microbatches,
            group);
  const int last = microbatches % group;
  BGL_CHECK(chunks == 1 || microbatches < group || last == 0 || last >= pp, pp, chunks,
            microbatches, group);
  PipelineOrder order = empty_order(pp, pp * chunks, microbatches);
  // Chunk and micro-batch of the k-th forward of a rank; backwards take the chunks from behind.
  std::vector<std::pair<int, int>> turns;
  for (int first = 0; first < microbatches; first += group) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int m = first; m < std::min(first + group, microbatches); ++m)
        turns.push_back({chunk, m});
    }
  }
  for (int rank = 0; rank < pp; ++rank) {
    auto& list = order.ranks[static_cast<size_t>(rank)];
    const size_t ahead = static_cast<size_t>(
        chunks == 1 ? pp - 1 - rank : 2 * (pp - 1 - rank) + (chunks - 1) * group);
    const auto forward = [&](size_t k) {
      if (k >= turns.size()) return;
      list.push_back({turns[k].first * pp + rank, PassKind::kForward, turns[k].second});
    };
    for (size_t k = 0; k < std::min(ahead, turns.size()); ++k) forward(k);
    for (size_t k = 0; k < turns.size(); ++k) {
      forward(ahead + k);
      const int chunk = chunks - 1 - turns[k].first;
      list.push_back({chunk * pp + rank, PassKind::kBackward, turns[k].second});
    }
  }
  return order;
}

PipelineOrder make_order(PipelineKind kind, int pp, int virtual_per_rank, int microbatches) {
  check_order_shape(kind, pp, virtual_per_rank, microbatches, "pipeline");
  switch (kind) {
    case PipelineKind::k1F1B:
      return one_f_one_b(pp, microbatches);
    case PipelineKind::kInterleaved:
      return interleaved(pp, virtual_per_rank, microbatches);
    case PipelineKind::kZbH1:
      return zb_h1(pp, microbatches);
    case PipelineKind::kZbH2:
      return zb_h2(pp, microbatches);
    case PipelineKind::kZbV:
      return zb_v(pp, microbatches);
    case PipelineKind::kDualPipe:
      return dual_pipe(pp, microbatches);
    case PipelineKind::kDualPipeV:
      return dual_pipe_v(pp, microbatches);
    case PipelineKind::kVHalf:
      return v_half(pp, microbatches);
  }
  BGL_CHECK(false, static_cast<int>(kind));
  return {};
}

void check_order_shape(PipelineKind kind, int pp, int virtual_per_rank, int microbatches,
                       const std::string& where) {
  const auto needs = [&where](bool ok, const char* field, int found, const char* allowed) {
    if (!ok) throw InvalidInput(where, field, std::to_string(found), allowed);
  };
  needs(pp >= 1, "pp", pp, "1 or more");
  needs(microbatches >= 1, "micro_batches", microbatches, "1 or more");
  if (kind == PipelineKind::kInterleaved) {
    needs(virtual_per_rank >= 1, "virtual", virtual_per_rank, "1 or more");
    needs(virtual_per_rank == 1 || microbatches < pp || microbatches % pp == 0, "micro_batches",
          microbatches, "a multiple of pp, or fewer than pp, with interleaved virtual stages");
  }
  if (kind == PipelineKind::kDualPipe) {
    needs(pp % 2 == 0, "pp", pp, "an even number, since DualPipe's ranks work in mirrored pairs");
  }
}

int rank_of_pass(PipelineKind kind, int pp, int microbatches, const PipelinePass& pass) {
  if (kind == PipelineKind::kDualPipe && pass.microbatch >= (microbatches + 1) / 2) {
    return pp - 1 - pass.stage;
  }
  return static_cast<int>(rank_of_stage(kind, pp, pass.stage));
}

}  // namespace bagualu
