#pragma once

#include <vector>

#include "bagualu/schedule/pipeline.h"

namespace bagualu {

/// A moment of a rank that may be its highest if every micro-batch is alike: what it runs and how
/// many micro-batches of each virtual stage it holds.
struct RankMoment {
  PipelinePass pass;
  bool backward_seen = false;  ///< some backward has run before
  int last_forward = -1;       ///< stage of the forward before this pass; -1: none
  std::vector<int> resident;   ///< [virtual stages] held when the pass begins
  bool operator==(const RankMoment&) const = default;
};

/// The moments of a rank's passes that no other exceeds: with bytes that depend on the stage alone
/// and are not negative, one of them is the highest, so that thousands of passes need not be walked
/// again for other bytes.
/// Ensures: for every pass that is not a weight gradient, a moment of the same stage, kind,
///          backward_seen and last_forward that holds at least as many of every stage.
/// Source:  ours.
std::vector<RankMoment> rank_moments(const std::vector<PipelinePass>& passes, int stages);

}  // namespace bagualu
