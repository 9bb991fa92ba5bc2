#include "bagualu/sim/rank_places.h"

#include <gtest/gtest.h>

namespace bagualu {
namespace {

Job job_of(int64_t world, int64_t pp, int64_t ep, int64_t etp) {
  Job job;
  job.layout.world_size = world;
  job.layout.pp = pp;
  job.layout.ep = ep;
  job.layout.etp = etp;
  return job;
}

TEST(RankPlaces, ExpertGroupsAreNeighboursAndStagesAreFarApart) {
  // 32 ranks, two stages of 16: rank 22 is the 6th of the second stage, in its 2nd group of 4.
  const Job job = job_of(32, 2, 4, 1);
  EXPECT_EQ(place_of_rank(job, 4, 22), (RankPlace{1, 1, 2}));
  for (int64_t rank = 0; rank < 32; ++rank) {
    EXPECT_EQ(rank_of_place(job, 4, place_of_rank(job, 4, rank)), rank);
  }
}

TEST(RankPlaces, RanksOfOneExpertsTensorGroupShareAMember) {
  // Groups of ep 4 * etp 2 = 8 ranks, 4 members: ranks 6 and 7 are member 3, told as rank 6.
  const Job job = job_of(16, 1, 4, 2);
  EXPECT_EQ(place_of_rank(job, 4, 6), (RankPlace{0, 0, 3}));
  EXPECT_EQ(place_of_rank(job, 4, 7), (RankPlace{0, 0, 3}));
  EXPECT_EQ(place_of_rank(job, 4, 8), (RankPlace{1, 0, 0}));
  EXPECT_EQ(rank_of_place(job, 4, {1, 0, 3}), 14);
}

}  // namespace
}  // namespace bagualu
