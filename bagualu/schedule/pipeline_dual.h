// Orders in which a rank serves two ways through the model; parts that the generators share.
#pragma once

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "bagualu/schedule/pipeline.h"

namespace bagualu {

/// Lists the passes of one rank by phase: phase 0 is the way that enters the pipeline near it.
/// Micro-batches beyond a phase's count are left out, which keeps any order valid. Weight gradients
/// that were put off run first in, first out.
class TwoPhases {
 public:
  struct Phase {
    int stage = 0;
    int first = 0;  ///< number of its micro-batch 0
    int count = 0;
    int forwards = 0;
    int backwards = 0;
  };

  /// Appends to `list`; with `fused`, also whether a pass and the next are one slot.
  TwoPhases(Phase zero, Phase one, std::vector<PipelinePass>& list,
            std::vector<bool>* fused = nullptr)
      : phases_{zero, one}, list_(list), fused_(fused) {}

  bool forward(int phase) {
    return add(phases_[phase], PassKind::kForward, phases_[phase].forwards++);
  }

  bool backward(int phase, bool split = false) {
    Phase& at = phases_[phase];
    if (split) put_off_.push_back({phase, at.backwards});
    return add(at, split ? PassKind::kInputGrad : PassKind::kBackward, at.backwards++);
  }

  /// A forward and a backward of the other phase that may run as one slot.
  void pair(int forward_phase, bool split) {
    const bool first = forward(forward_phase);
    const bool second = backward(1 - forward_phase, split);
    if (first && second && fused_ != nullptr) (*fused_)[list_.size() - 2] = true;
  }

  void weight() {
    const auto [phase, microbatch] = put_off_[weights_++];
    add(phases_[phase], PassKind::kWeightGrad, microbatch);
  }

 private:
  bool add(const Phase& phase, PassKind kind, int microbatch) {
    if (microbatch >= phase.count) return false;
    list_.push_back({phase.stage, kind, phase.first + microbatch});
    if (fused_ != nullptr) fused_->push_back(false);
    return true;
  }

  std::array<Phase, 2> phases_;
  std::vector<PipelinePass>& list_;
  std::vector<bool>* fused_;
  std::vector<std::pair<int, int>> put_off_;
  size_t weights_ = 0;
};

enum class BackwardSplit : uint8_t {
  kSome,  ///< as DualPipe: where it fills a gap
  kAll,   ///< every one, its weight gradient next where DualPipe has a whole backward
};

/// DualPipe's order of the rank that stands `depth` ranks from where its phase 0 enters, of `half`
/// ranks to the turning point, with at least 2 * half micro-batches of each phase. The pairs are
/// those that the published order runs overlapped; the forward stands first.
/// Source: DeepSeek-AI DualPipe (its public repository).
void dual_pipe_rank(int depth, int half, int microbatches, BackwardSplit split, TwoPhases out);

/// DualPipe's lists of all ranks, appended to order.ranks; with `fused`, also its pairs.
/// Requires: order.ranks (and fused) have an empty list per rank.
void dual_pipe_lists(PipelineOrder& order, std::vector<std::vector<bool>>* fused = nullptr);
/// As above on the V, where rank r holds the stages r and 2 pp - 1 - r.
void dual_pipe_v_lists(PipelineOrder& order, BackwardSplit split,
                       std::vector<std::vector<bool>>* fused = nullptr);

}  // namespace bagualu
