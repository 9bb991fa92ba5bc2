#include "bagualu/schedule/rank_moments.h"

#include <gtest/gtest.h>

#include <string>

#include "bagualu/schedule/job_memory.h"

namespace bagualu {
namespace {

TEST(RankMoments, OneForwardAndOneBackwardNeedFew) {
  // Rank 0 of 4: the forward of the fourth micro-batch holds three; the first backward four. Before
  // the first backward nothing is seen, behind it a forward holds three again.
  const PipelineOrder order = one_f_one_b(4, 8);
  const std::vector<RankMoment> moments = rank_moments(order.ranks[0], 4);
  int most_forward = 0;
  int most_backward = 0;
  for (const RankMoment& moment : moments) {
    int& most = moment.pass.kind == PassKind::kForward ? most_forward : most_backward;
    most = std::max(most, moment.resident[0]);
  }
  EXPECT_EQ(most_forward, 3);
  EXPECT_EQ(most_backward, 4);
  EXPECT_LE(moments.size(), 5u);
}

TEST(RankMoments, ExceedEveryPassOfEveryOrder) {
  for (int kind = 0; kind < 8; ++kind) {
    for (const int microbatches : {4, 8, 20}) {
      const auto which = static_cast<PipelineKind>(kind);
      const PipelineOrder order = make_order(which, 4, 2, microbatches);
      for (const auto& passes : order.ranks) {
        const std::vector<RankMoment> moments = rank_moments(passes, order.stages);
        std::vector<int> resident(static_cast<size_t>(order.stages), 0);
        for (const PipelinePass& pass : passes) {
          bool exceeded = pass.kind == PassKind::kWeightGrad;
          for (const RankMoment& moment : moments) {
            bool holds = moment.pass.stage == pass.stage && moment.pass.kind == pass.kind;
            for (size_t s = 0; s < resident.size(); ++s) {
              holds = holds && moment.resident[s] >= resident[s];
            }
            exceeded = exceeded || holds;
          }
          EXPECT_TRUE(exceeded) << kind << " " << pass_text(pass);
          int& held = resident[static_cast<size_t>(pass.stage)];
          if (pass.kind == PassKind::kForward) ++held;
          if (pass.kind == PassKind::kBackward || pass.kind == PassKind::kWeightGrad) --held;
        }
      }
    }
  }
}

// The fast path asks the moments, the description walks every pass.
TEST(RankMoments, GiveThePeakThatTheWalkFinds) {
  const ModelSpec moe = model_from_file(BAGUALU_SOURCE_DIR "/configs/models/mixtral-8x7b.json");
  const ModelSpec dense = model_from_file(BAGUALU_SOURCE_DIR "/configs/models/llama-2-70b.json");
  int compared = 0;
  for (int kind = 0; kind < 8; ++kind) {
    Job job;
    job.pipeline = static_cast<PipelineKind>(kind);
    const bool interleaved = job.pipeline == PipelineKind::kInterleaved;
    const std::string layout = interleaved ? "tp=2,pp=4,vpp=2,dp=8" : "tp=2,pp=4,dp=8";
    for (const int64_t microbatches : {4, 12, 32}) {
      job.microbatches = microbatches;
      for (const char* offload : {"", "moe_act", "all"}) {
        job.model = *offload == 'a' ? dense : moe;
        job.layout = parse_layout(layout + (*offload == 'a' ? "" : ",ep=8"), "test", "layout");
        job.stages = default_stages(job.model, 4, is_v_shaped(job.pipeline) || interleaved ? 2 : 1);
        job.offload.modules.clear();
        if (*offload != 0) job.offload.modules = {offload};
        job.offload.fraction = *offload == 'a' ? 0.37 : 1.0;
        validate(job, "test");
        const JobMemory memory(job);
        for (int64_t rank = 0; rank < 4; ++rank) {
          for (const double factor : {0.0, 1.0, 2.6}) {
            EXPECT_EQ(memory.peak_bytes(rank, {.factor = factor}),
                      memory.describe(rank, {.factor = factor}).peak_bytes)
                << pipeline_kind_name(job.pipeline) << " " << microbatches << " " << offload << " "
                << rank;
            ++compared;
          }
        }
      }
    }
  }
  EXPECT_EQ(compared, 8 * 3 * 3 * 4 * 3);
}

}  // namespace
}  // namespace bagualu
