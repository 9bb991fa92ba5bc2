#include "bagualu/provision/training_rank.h"

namespace bagualu {
namespace {

constexpr int64_t kMostLayers = 1'000'000;

}  // namespace

TrainingSetup read_training_setup(JsonReader& reader) {
  const std::string& where = reader.where();
  TrainingSetup setup;
  setup.layout.world_size = reader.int64("world_size", 1);
  setup.layout.ep_size = reader.int64("ep_size", 1);
  setup.layout.pp_size = reader.int64_or("pp_size", 1, 1);
  setup.layout.virtual_per_rank = reader.int64_or("virtual_per_rank", 1, 1);
  setup.layout.pipeline =
      parse_pipeline_kind(reader.string_or("pipeline", "1f1b"), where, "pipeline");
  if (reader.has("stage_layers")) {
    setup.layout.stage_layers = reader.int64_list("stage_layers", 0, kMostLayers);
  }
  setup.overlap = reader.boolean_or("overlap", false);
  setup.rank = reader.int64("rank", 0, setup.layout.world_size - 1);
  setup.shape.micro_batch_size = reader.int64("micro_batch_size", 1);
  setup.shape.seq = reader.int64("seq", 1);
  setup.shape.microbatches = reader.int64("microbatches", 1);
  setup.shape.dtype = parse_dtype(reader.string("dtype"), where, "dtype");
  setup.policy = reader.string_or("policy", setup.policy);
  setup.budget_bytes = reader.int64_or("budget_bytes", 0, 0);
  setup.host_budget_bytes = reader.int64_or("host_budget_bytes", 0, 0);
  setup.chunk_rows = reader.int64_or("chunk_rows", setup.chunk_rows, 1);
  setup.allow_quantise = reader.has("allow_quantise") && reader.boolean("allow_quantise");
  const Json& policy_args = reader.raw("policy_args");
  if (!policy_args.is_null()) {
    setup.policy_options = policy_options_from_json(policy_args, where + ": policy_args");
  }
  return setup;
}

}  // namespace bagualu
