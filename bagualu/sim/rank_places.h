#pragma once

#include <cstdint>

#include "bagualu/model/job.h"

namespace bagualu {

/// Where a rank of a job lies among replicas, pipeline ranks and members.
struct RankPlace {
  int64_t replica = 0;
  int pp_rank = 0;
  int member = 0;
  bool operator==(const RankPlace&) const = default;
};

/// `members`: of a simulated expert group. Ranks of an expert's tensor parallel group are alike
/// and share one; its number is that of the first.
/// Source: Megatron's order of ranks, tp-cp-ep-dp-pp.
int64_t rank_of_place(const Job& job, int64_t members, const RankPlace& place);
/// Requires: 0 <= rank < job.layout.world_size.
RankPlace place_of_rank(const Job& job, int64_t members, int64_t rank);

}  // namespace bagualu
