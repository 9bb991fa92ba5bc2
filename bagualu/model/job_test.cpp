#include "bagualu/model/job.h"

#include <gtest/gtest.h>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

std::filesystem::path preset(const char* name) {
  return std::filesystem::path(BAGUALU_SOURCE_DIR) / "configs/models" /
         (std::string(name) + ".json");
}

/// DeepSeek-V3 on 1,024 ranks, 16 stages, experts over 64.
Job deepseek() {
  Job job;
  job.model = model_from_file(preset("deepseek-v3"));
  job.layout = parse_layout("pp=16,ep=64,dp=64", "test", "layout");
  job.stages = default_stages(job.model, 16, 1);
  job.microbatches = 120;
  return job;
}

std::string refused_field(const Job& job) {
  try {
    validate(job, "job");
  } catch (const InvalidInput& error) {
    return error.field();
  }
  return "";
}

TEST(Job, DividesItsRanks) {
  const Job job = deepseek();
  validate(job, "job");
  EXPECT_EQ(job.layout.world_size, 1024);
  EXPECT_EQ(job.layout.dp(), 64);
  EXPECT_EQ(job.layout.expert_dp(), 1);
  EXPECT_EQ(job.balanced_rows(), 4096 * 8);
}

TEST(Job, BalancedRowsFollowTheTokensOfARank) {
  Job job = deepseek();
  job.layout = parse_layout("tp=2,cp=2,pp=16,ep=8,etp=2,dp=16", "test", "layout");
  // 4096 / (cp * tp) tokens a rank, 8 copies, those of two etp ranks gathered.
  EXPECT_EQ(job.balanced_rows(), 4096 / 4 * 8 * 2);
  EXPECT_EQ(job.tokens(), 2048);
  EXPECT_EQ(job.sequence_tokens(), 1024);
}

TEST(Job, PadsTheVocabularyToTheTensorParallelRanks) {
  Job job = deepseek();
  job.model.vocab = 32004;
  job.layout.tp = 2;
  EXPECT_EQ(job.padded_vocab(), 32256);  // a multiple of 256
}

TEST(Job, PlacesVirtualStagesByTheOrder) {
  Job job = deepseek();
  job.pipeline = PipelineKind::kInterleaved;
  job.layout.vpp = 2;
  job.stages = default_stages(job.model, 16, 2);
  EXPECT_EQ(job.stages_of_rank(3), (std::vector<int64_t>{3, 19}));
  job.pipeline = PipelineKind::kDualPipeV;
  EXPECT_EQ(job.stages_of_rank(3), (std::vector<int64_t>{3, 28}));
  EXPECT_EQ(job.rank_of_stage(31), 0);
}

TEST(DefaultStages, MakesTheFirstAndTheLastLighter) {
  ModelSpec model;
  model.layers = 61;
  const auto counts = [&](int64_t pp) {
    std::vector<int64_t> layers;
    for (const StageContent& stage : default_stages(model, pp, 1)) {
      layers.push_back(stage.layer_count);
    }
    return layers;
  };
  // 61 = 4 * 16 - 3: one less in the last, the first and the second stage.
  EXPECT_EQ(counts(16), (std::vector<int64_t>{3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3}));
  EXPECT_EQ(counts(1), (std::vector<int64_t>{61}));
  EXPECT_EQ(counts(2), (std::vector<int64_t>{31, 30}));
}

TEST(DefaultStages, GivesTheEndsTheirExtraParts) {
  ModelSpec model;
  model.layers = 4;
  model.mtp_layers = 1;
  const std::vector<StageContent> stages = default_stages(model, 2, 2);
  EXPECT_EQ(stages_text(stages), "Et|t|t|tmL");
}

TEST(ParseLayout, ReadsWhatItWrites) {
  for (const char* text :
       {"tp=1,cp=1,pp=1,vpp=1,ep=1,etp=1,dp=1", "tp=2,cp=4,pp=8,vpp=5,ep=16,etp=2,dp=8",
        "tp=4,cp=1,pp=2,vpp=1,ep=2,etp=1,dp=1,sp=0"}) {
    EXPECT_EQ(layout_text(parse_layout(text, "test", "layout")), text);
  }
  EXPECT_TRUE(parse_layout("tp=2", "test", "layout").sequence_parallel);
}

TEST(ParseLayout, RefusesWhatIsNoLayout) {
  for (const char* text : {"", "tp", "tp=", "tp=0", "tp=-1", "tp=2,tp=2", "xp=2", "tp=2,", "tp=1.5",
                           "tp=99999999999999999999", "tp=2;pp=2"}) {
    EXPECT_THROW(parse_layout(text, "test", "layout"), InvalidInput) << text;
  }
}

TEST(ParseStages, UnfoldsMegatronsLayout) {
  ModelSpec model;
  model.layers = 14;
  model.mtp_layers = 1;
  const auto stages = parse_stages("Et*2|(tt|)*5t|tmL", model, 8, "test", "layout");
  EXPECT_EQ(stages_text(stages), "Et*2|t*2|t*2|t*2|t*2|t*2|t|tmL");
  EXPECT_EQ(stages[6].first_layer, 12);
}

TEST(ParseStages, RefusesWhatDoesNotFitTheModel) {
  ModelSpec model;
  model.layers = 4;
  for (const char* text :
       {"Ett|tt", "tt|ttL", "Ett|t|tL", "Et|ttL", "Ett|ttmL", "E(tt|ttL", "Ett)|ttL", "EttL|tt",
        "Ett|tt*0L", "Ett|ttLx", "", "E((((((((((t*4096)*4096)*4096)*4096)*4096))))))|L"}) {
    EXPECT_THROW(parse_stages(text, model, 2, "test", "layout"), InvalidInput) << text;
  }
}

TEST(Job, RefusesSizesThatDoNotFitNamingTheField) {
  const auto changed = [](auto change) {
    Job job = deepseek();
    change(job);
    return refused_field(job);
  };
  EXPECT_EQ(changed([](Job&) {}), "");
  EXPECT_EQ(changed([](Job& j) { j.layout.world_size = 1000; }), "world_size");
  EXPECT_EQ(changed([](Job& j) { j.layout.ep = 48; }), "ep");
  EXPECT_EQ(changed([](Job& j) { j.layout.tp = 3, j.layout.world_size = 3072; }), "tp");
  EXPECT_EQ(changed([](Job& j) { j.layout.vpp = 2; }), "stages");
  EXPECT_EQ(changed([](Job& j) { j.stages.back().layer_count = 2; }), "stages");
  EXPECT_EQ(changed([](Job& j) { j.seq = 0; }), "seq");
  EXPECT_EQ(changed([](Job& j) { j.microbatches = 0; }), "microbatches");
  // 1 / top_k = 0.125 is the least factor that gives a token one expert.
  EXPECT_EQ(changed([](Job& j) { j.moe.capacity_factor = 0.1; }), "moe.capacity_factor");
  EXPECT_EQ(changed([](Job& j) { j.moe.capacity_factor = 16384; }), "moe.capacity_factor");
  EXPECT_EQ(changed([](Job& j) { j.moe.pad_to_capacity = true; }), "moe.pad_to_capacity");
  EXPECT_EQ(changed([](Job& j) { j.offload.fraction = 1.5; }), "offload.fraction");
}

TEST(PipelineKind, ReadsWhatItWrites) {
  for (int kind = 0; kind < 8; ++kind) {
    const auto value = static_cast<PipelineKind>(kind);
    EXPECT_EQ(parse_pipeline_kind(pipeline_kind_name(value), "test", "pipeline"), value);
  }
  EXPECT_THROW(parse_pipeline_kind("gpipe", "test", "pipeline"), InvalidInput);
}

}  // namespace
}  // namespace bagualu
