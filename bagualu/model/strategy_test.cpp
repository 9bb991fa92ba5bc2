#include "bagualu/model/strategy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "bagualu/base/error.h"
#include "bagualu/model/megatron_flags.h"

namespace bagualu {
namespace {

using ::testing::HasSubstr;

ModelSpec config_model(const std::string& name) {
  return model_from_file(std::string(BAGUALU_SOURCE_DIR) + "/configs/models/" + name + ".json");
}

Json strategy_file(const std::string& name) {
  return read_json_file(std::string(BAGUALU_SOURCE_DIR) + "/configs/strategies/" + name + ".json");
}

/// Names begin with that of their model.
const std::vector<std::pair<const char*, const char*>>& strategies() {
  static const std::vector<std::pair<const char*, const char*>> all = {
      {"deepseek-v3-1024-h100", "deepseek-v3"},      {"deepseek-v3-1024-h100-fp8", "deepseek-v3"},
      {"deepseek-v3-256-b200-mxfp8", "deepseek-v3"}, {"llama-3-70b-64", "llama-3-70b"},
      {"mixtral-8x22b-128", "mixtral-8x22b"},        {"mixtral-8x7b-64", "mixtral-8x7b"},
      {"qwen3-235b-256-h100", "qwen3-235b-a22b"},    {"qwen3-30b-16-gb200", "qwen3-30b-a3b"}};
  return all;
}

TEST(Strategy, EveryFileFitsItsModelAndReadsBackTheSame) {
  for (const auto& [name, model] : strategies()) {
    const Job job = job_from_strategy(strategy_file(name), config_model(model), name);
    EXPECT_EQ(job_from_strategy(strategy_to_json(job), job.model, "written"), job) << name;
    EXPECT_TRUE(job.optimizer.distributed) << name;
  }
}

TEST(Strategy, EverySettingIsWrittenAndReadBack) {
  Job job = job_from_strategy(strategy_file("mixtral-8x7b-64"), config_model("mixtral-8x7b"), "m");
  job.activation_fusion = false;
  job.accumulation_fusion = false;
  job.cp_exchange = CpExchange::kAllGather;
  job.cross_entropy = CrossEntropy::kFusedTe;
  job.overlap = {.tp = true, .p2p = false, .expert = true, .shared_expert = true};
  job.optimizer.gradient_bytes = 2;
  job.optimizer.main_gradient_bytes = 4;
  job.offload = {.modules = {"moe_act"}, .fraction = 0.5, .min_tensor_elements = 4096};
  job.allocator = {.rounding_bytes = 256,
                   .communication_bytes = 1,
                   .reserve_fraction = 0.1,
                   .engine_workspace_bytes = 2,
                   .blas_workspace_bytes = 3,
                   .weight_grad_stand_ins = false,
                   .engine_gemms = false,
                   .max_split_bytes = 4};
  EXPECT_EQ(job_from_strategy(strategy_to_json(job), job.model, "written"), job);
}

TEST(Strategy, NoFileIsLeftOutOfTheTests) {
  int64_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(BAGUALU_SOURCE_DIR) +
                                                               "/configs/strategies")) {
    files += entry.path().extension() == ".json" ? 1 : 0;
  }
  EXPECT_EQ(files, static_cast<int64_t>(strategies().size()));
}

TEST(Strategy, FilesCanBeWrittenAsMegatronsFlags) {
  for (const auto& [name, model] : strategies()) {
    Job job = job_from_strategy(strategy_file(name), config_model(model), name);
    EXPECT_NO_THROW(megatron_flags(job, name)) << name;
    EXPECT_TRUE(check_exclusions(megatron_flags(job, name)).empty()) << name;
  }
}

TEST(Strategy, DeepseekOnAThousandGpus) {
  const Job job =
      job_from_strategy(strategy_file("deepseek-v3-1024-h100"), config_model("deepseek-v3"), "ds");
  EXPECT_EQ(layout_text(job.layout), "tp=1,cp=1,pp=16,vpp=2,ep=64,etp=1,dp=64");
  EXPECT_EQ(job.pipeline, PipelineKind::kInterleaved);
  EXPECT_EQ(job.stages.size(), 32u);
  EXPECT_EQ(job.stages[0].layer_count, 3);
  EXPECT_EQ(job.stages[30].mtp_layers, 1);
  EXPECT_EQ(job.microbatches, 128);  // 8192 / (1 * 64)
  EXPECT_EQ(job.moe.router_bytes, 4);
}

Json small() {
  return {{"format", "bagualu.strategy"}, {"version", 1}, {"world_size", 8}, {"pp", 2}};
}

TEST(Strategy, WhatIsLeftOutIsTheDefault) {
  const ModelSpec model = config_model("tiny");
  Job plain;
  plain.model = model;
  plain.layout.world_size = 8;
  plain.layout.pp = 2;
  plain.stages = default_stages(model, 2, 1);
  EXPECT_EQ(job_from_strategy(small(), model, "small"), plain);
  Json split = small();
  split["tp"] = 2;
  EXPECT_TRUE(job_from_strategy(split, model, "small").layout.sequence_parallel);
  split["sequence_parallel"] = false;
  EXPECT_FALSE(job_from_strategy(split, model, "small").layout.sequence_parallel);
}

TEST(Strategy, OrdersOtherThanMegatronsAreSaid) {
  Json zero_bubble = small();
  zero_bubble["pipeline"] = "zb-v";
  const Job job = job_from_strategy(zero_bubble, config_model("tiny"), "zb");
  EXPECT_EQ(job.stages.size(), 4u);  // two per rank
  EXPECT_EQ(job_from_strategy(strategy_to_json(job), job.model, "written"), job);
}

struct Refusal {
  const char* change;
  const char* where;
  const char* field;
};

TEST(Strategy, RefusalsNamePlaceAndKey) {
  const std::vector<Refusal> refusals = {
      {R"({"format": "bagualu.plan"})", "small", "format"},
      {R"({"version": 2})", "small", "version"},
      {R"({"worldsize": 8})", "small", "worldsize"},
      {R"({"world_size": 7})", "small", "world_size"},
      {R"({"optimizer": {"name": "lion"}})", "small.optimizer", "name"},
      {R"({"optimizer": {"momentum": 4}})", "small.optimizer", "momentum"},
      {R"({"recompute": {"modules": ["mpl"]}})", "small.recompute", "modules"},
      {R"({"recompute": {"modules": "mlp"}})", "small.recompute", "modules"},
      {R"({"pipeline": "fancy"})", "small", "pipeline"},
      {R"({"stages": "Et|L"})", "small", "stages"},
      {R"({"global_batch_size": 6})", "small", "global_batch_size"},
      {R"({"global_batch_size": 8, "microbatches": 2})", "small", "global_batch_size"},
      {R"({"moe": {"capacity_factor": -1}})", "small.moe", "capacity_factor"}};
  const ModelSpec model = config_model("tiny");
  for (const Refusal& refusal : refusals) {
    Json object = small();
    object.update(parse_json_object(refusal.change, "change"));
    try {
      job_from_strategy(object, model, "small");
      ADD_FAILURE() << refusal.change;
    } catch (const InvalidInput& error) {
      EXPECT_EQ(error.where(), refusal.where) << error.what();
      EXPECT_EQ(error.field(), refusal.field) << error.what();
    }
  }
}

}  // namespace
}  // namespace bagualu
