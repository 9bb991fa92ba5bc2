#include "bagualu/runtime/trainer_options.h"

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int64_t kMostLayers = 1'000'000;

}  // namespace

TrainerOptions TrainerOptions::from_json(const Json& json, const std::string& where) {
  JsonReader reader(json, where);
  TrainerOptions options;
  options.layout.world_size = reader.int64("world_size", 1);
  options.layout.ep_size = reader.int64("ep_size", 1);
  options.layout.pp_size = reader.int64_or("pp_size", 1, 1);
  options.layout.virtual_per_rank = reader.int64_or("virtual_per_rank", 1, 1);
  options.layout.pipeline =
      parse_pipeline_kind(reader.string_or("pipeline", "1f1b"), where, "pipeline");
  if (reader.has("stage_layers")) {
    options.layout.stage_layers = reader.int64_list("stage_layers", 0, kMostLayers);
  }
  options.overlap = reader.boolean_or("overlap", false);
  options.deadline_ns = static_cast<int64_t>(reader.number_or("deadline_s", 30.0, 0.0) * 1e9);
  options.link_bytes_per_s = reader.int64_or("link_bytes_per_s", 0, 0);
  options.link_latency_ns = reader.int64_or("link_latency_us", 0, 0) * 1000;
  options.rank = reader.int64("rank", 0, options.layout.world_size - 1);
  options.shape.micro_batch_size = reader.int64("micro_batch_size", 1);
  options.shape.seq = reader.int64("seq", 1);
  options.shape.microbatches = reader.int64("microbatches", 1);
  options.shape.dtype = parse_dtype(reader.string("dtype"), where, "dtype");
  options.seed = static_cast<uint64_t>(reader.int64_or("seed", 0, 0));
  options.policy = reader.string_or("policy", options.policy);
  options.budget_bytes = reader.int64_or("budget_bytes", 0, 0);
  options.host_budget_bytes = reader.int64_or("host_budget_bytes", 0, 0);
  options.chunk_rows = reader.int64_or("chunk_rows", options.chunk_rows, 1);
  options.allow_quantise = reader.has("allow_quantise") && reader.boolean("allow_quantise");
  options.verify_checksums = reader.has("verify_checksums") && reader.boolean("verify_checksums");
  options.profile = reader.raw("profile");
  options.adamw.beta1 = reader.number_or("beta1", options.adamw.beta1, 0.0, 1.0);
  options.adamw.beta2 = reader.number_or("beta2", options.adamw.beta2, 0.0, 1.0);
  options.adamw.eps = reader.number_or("eps", options.adamw.eps, 0.0);
  options.adamw.weight_decay = reader.number_or("weight_decay", 0.0, 0.0);
  options.clip = reader.number_or("clip", 0.0, 0.0);
  const Json& policy_args = reader.raw("policy_args");
  reader.finish();
  if (!policy_args.is_null()) {
    options.policy_options = policy_options_from_json(policy_args, where + ": policy_args");
  }
  return options;
}

TrainerGroups TrainerGroups::from_json(const Json& json, const std::string& where) {
  JsonReader reader(json, where);
  TrainerGroups groups;
  groups.ep = reader.string_or("ep", "");
  groups.dp = reader.string_or("dp", "");
  groups.edp = reader.string_or("edp", "");
  groups.pp = reader.string_or("pp", "");
  groups.world = reader.string_or("world", "");
  groups.embedding = reader.string_or("embedding", "");
  reader.finish();
  return groups;
}

}  // namespace bagualu
