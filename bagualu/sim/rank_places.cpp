#include "bagualu/sim/rank_places.h"

#include "bagualu/base/error.h"

namespace bagualu {
int64_t rank_of_place(const Job& job, int64_t members, const RankPlace& place) {
  const JobLayout& layout = job.layout;
  const int64_t group = layout.ep * layout.etp;
  BGL_CHECK(members > 0 && group % members == 0, group, members);
  return place.pp_rank * (layout.world_size / layout.pp) + place.replica * group +
         place.member * (group / members);
}

RankPlace place_of_rank(const Job& job, int64_t members, int64_t rank) {
  const JobLayout& layout = job.layout;
  BGL_CHECK(rank >= 0 && rank < layout.world_size, rank, layout.world_size);
  const int64_t slice = layout.world_size / layout.pp;
  const int64_t group = layout.ep * layout.etp;
  BGL_CHECK(members > 0 && group % members == 0, group, members);
  return {rank % slice / group, static_cast<int>(rank / slice),
          static_cast<int>(rank % group / (group / members))};
}

}  // namespace bagualu
