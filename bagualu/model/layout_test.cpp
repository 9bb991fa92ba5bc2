#include "bagualu/model/layout.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

ModelSpec tiny() {
  return model_from_file(std::string(BAGUALU_SOURCE_DIR) + "/configs/models/tiny.json");
}

TEST(Dtype, HasNamesAndBytes) {
  EXPECT_EQ(dtype_bytes(Dtype::kFp32), 4);
  EXPECT_EQ(dtype_bytes(Dtype::kBf16), 2);
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    EXPECT_EQ(parse_dtype(dtype_name(dtype), "test", "dtype"), dtype);
  }
  EXPECT_THROW(parse_dtype("fp16", "test", "dtype"), InvalidInput);
}

TEST(Layout, DerivesGroups) {
  const ParallelLayout layout{8, 4};
  EXPECT_EQ(layout.expert_dp_size(), 2);
  EXPECT_EQ(layout.ep_rank(6), 2);
  EXPECT_EQ(layout.experts_local(tiny()), 2);
}

TEST(Layout, MaxRowsIsBoundedByTopKAndByLocalExperts) {
  const TrainShape shape{2, 32, 1, Dtype::kFp32};
  EXPECT_EQ(max_rows(tiny(), shape, {4, 4}), 4 * 64 * 2);  // 2 local experts, top 2
  EXPECT_EQ(max_rows(tiny(), shape, {8, 8}), 8 * 64 * 1);  // 1 local expert takes a token once
  EXPECT_EQ(max_rows(tiny(), shape, {1, 1}), 64 * 2);
}

TEST(Layout, AcceptsWhatDivides) {
  EXPECT_NO_THROW(validate(tiny(), {2, 32, 4, Dtype::kFp32}, {8, 4}, "test"));
}

TEST(Layout, RefusesBadSizesNamingTheField) {
  struct Case {
    TrainShape shape;
    ParallelLayout layout;
    const char* field;
  };
  const std::vector<Case> cases = {
      {{0, 32, 1, Dtype::kFp32}, {4, 4}, "micro_batch_size"},
      {{1, 0, 1, Dtype::kFp32}, {4, 4}, "seq"},
      {{1, 32, -1, Dtype::kFp32}, {4, 4}, "microbatches"},
      {{1, 32, 1, Dtype::kFp32}, {0, 1}, "world_size"},
      {{1, 32, 1, Dtype::kFp32}, {4, 0}, "ep"},
      {{1, 32, 1, Dtype::kFp32}, {3, 3}, "ep"},  // 8 experts % 3
      {{1, 32, 1, Dtype::kFp32}, {6, 4}, "ep"},  // 6 ranks % 4
      {{1 << 12, 1 << 20, 1, Dtype::kFp32}, {4, 4}, "micro_batch_size * seq"},
  };
  for (const Case& c : cases) {
    try {
      validate(tiny(), c.shape, c.layout, "test");
      ADD_FAILURE() << "accepted a bad " << c.field;
    } catch (const InvalidInput& error) {
      EXPECT_EQ(error.field(), c.field) << error.what();
    }
  }
}

TEST(Layout, NumbersRanksStageByStage) {
  // 12 ranks in 3 stages of 4, experts over pairs: rank 9 is the second of stage 2.
  ParallelLayout layout{12, 2};
  layout.pp_size = 3;
  EXPECT_EQ(layout.dp_size(), 4);
  EXPECT_EQ(layout.expert_dp_size(), 2);
  EXPECT_EQ(layout.pp_rank(9), 2);
  EXPECT_EQ(layout.dp_rank(9), 1);
  EXPECT_EQ(layout.ep_rank(9), 1);
  EXPECT_EQ(layout.expert_dp_rank(9), 0);
  EXPECT_EQ(layout.expert_dp_rank(11), 1);
}

TEST(StageSlices, AreTheGivenLayersInOrder) {
  ParallelLayout layout{2, 1};
  layout.pp_size = 2;
  layout.stage_layers = {3, 1};
  const std::vector<StageSlice> expected = {{0, 3, true, false}, {3, 1, false, true}};
  EXPECT_EQ(stage_slices(tiny(), layout), expected);
  EXPECT_EQ(rank_slices(tiny(), layout, 1), std::vector<StageSlice>{expected[1]});
}

TEST(StageSlices, AreLighterAtTheEndsByDefault) {
  ModelSpec spec = tiny();
  spec.layers = 10;
  spec.moe_layer.assign(10, 1);
  ParallelLayout layout{4, 1};
  layout.pp_size = 4;  // 3 each would be 12: two are missing, from the last and the first
  std::vector<int64_t> layers;
  for (const StageSlice& slice : stage_slices(spec, layout)) layers.push_back(slice.layers);
  EXPECT_EQ(layers, (std::vector<int64_t>{2, 3, 3, 2}));
}

TEST(StageSlices, OfOneStageAreTheModel) {
  EXPECT_EQ(stage_slices(tiny(), {1, 1}), std::vector<StageSlice>{whole_model(tiny())});
}

TEST(StageSlices, LieOnRanksAsTheOrderSays) {
  ParallelLayout layout{2, 1};
  layout.pp_size = 2;
  layout.pipeline = PipelineKind::kInterleaved;
  layout.virtual_per_rank = 2;  // stages 0 1 2 3 on ranks 0 1 0 1
  EXPECT_EQ(layout.stages_of_rank(0), (std::vector<int64_t>{0, 2}));
  layout.pipeline = PipelineKind::kDualPipeV;  // 0 1 1 0
  EXPECT_EQ(layout.stages_of_rank(0), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(layout.stages_of_rank(1), (std::vector<int64_t>{1, 2}));
  layout.virtual_per_rank = 1;  // two all the same
  EXPECT_EQ(layout.stage_count(), 4);
}

ParallelLayout stages(int64_t world, int64_t ep, int64_t pp, std::vector<int64_t> layers = {}) {
  ParallelLayout layout{world, ep, pp};
  layout.stage_layers = std::move(layers);
  return layout;
}

ParallelLayout ordered(PipelineKind kind, int64_t pp, int64_t vpp) {
  ParallelLayout layout{pp, 1, pp, vpp, kind, {}};
  return layout;
}

TEST(Layout, RefusesStagesThatDoNotFit) {
  const TrainShape shape{2, 32, 4, Dtype::kFp32};
  struct Case {
    ParallelLayout layout;
    const char* field;
    const char* text;  ///< a part of the message
  };
  const std::vector<Case> cases = {
      {stages(6, 1, 4), "pp", "divisor of world_size = 6"},
      {stages(4, 4, 2), "ep", "world_size / pp = 2"},
      {stages(2, 1, 2, {3, 2}), "stages", "4 layers together"},
      {stages(2, 1, 2, {1, 2, 1}), "stages", "2 numbers of layers"},
      {stages(2, 1, 2, {5, -1}), "stages", "from 0 to 4"},
      {stages(3, 1, 3, {4, 0, 0}), "stages", "virtual stage 1"},
      {stages(8, 1, 8), "pp", "a layer in each"},  // 4 layers, 8 stages
      {ordered(PipelineKind::k1F1B, 2, 2), "vpp", "one stage per rank"},
      {ordered(PipelineKind::kDualPipeV, 2, 3), "vpp", "two stages per rank"},
      {ordered(PipelineKind::kDualPipe, 2, 1), "pipeline", "one copy of the model"},
      {ordered(PipelineKind::k1F1B, 2, 0), "vpp", "from 1"},
      {stages(4, 1, 0), "pp", "from 1"},
  };
  for (const Case& c : cases) {
    try {
      validate(tiny(), shape, c.layout, "test");
      ADD_FAILURE() << "accepted: " << c.text;
    } catch (const InvalidInput& error) {
      EXPECT_EQ(error.field(), c.field) << error.what();
      EXPECT_NE(std::string(error.what()).find(c.text), std::string::npos) << error.what();
    }
  }
}

TEST(Layout, AcceptsUnevenStagesAndEmptyEnds) {
  const TrainShape shape{2, 32, 4, Dtype::kFp32};
  EXPECT_NO_THROW(validate(tiny(), shape, stages(8, 2, 2, {3, 1}), "test"));
  EXPECT_NO_THROW(validate(tiny(), shape, stages(8, 4, 2, {4, 0}), "test"));  // the head alone
  EXPECT_NO_THROW(validate(tiny(), shape, ordered(PipelineKind::kInterleaved, 2, 2), "test"));
  EXPECT_NO_THROW(validate(tiny(), shape, ordered(PipelineKind::kDualPipeV, 2, 1), "test"));
}

TEST(Layout, RefusesAnotherNumberOfRanks) {
  EXPECT_NO_THROW(check_world_size({4, 2}, 4, "test"));
  EXPECT_THROW(check_world_size({4, 2}, 3, "test"), InvalidInput);
}

}  // namespace
}  // namespace bagualu
