#include "bagualu/runtime/trainer_options.h"

namespace bagualu {

TrainerOptions TrainerOptions::from_json(const Json& json, const std::string& where) {
  JsonReader reader(json, where);
  TrainerOptions options;
  static_cast<TrainingSetup&>(options) = read_training_setup(reader);
  options.deadline_ns = static_cast<int64_t>(reader.number_or("deadline_s", 30.0, 0.0) * 1e9);
  options.link_bytes_per_s = reader.int64_or("link_bytes_per_s", 0, 0);
  options.link_latency_ns = reader.int64_or("link_latency_us", 0, 0) * 1000;
  options.seed = static_cast<uint64_t>(reader.int64_or("seed", 0, 0));
  options.verify_checksums = reader.has("verify_checksums") && reader.boolean("verify_checksums");
  options.profile = reader.raw("profile");
  options.adamw.beta1 = reader.number_or("beta1", options.adamw.beta1, 0.0, 1.0);
  options.adamw.beta2 = reader.number_or("beta2", options.adamw.beta2, 0.0, 1.0);
  options.adamw.eps = reader.number_or("eps", options.adamw.eps, 0.0);
  options.adamw.weight_decay = reader.number_or("weight_decay", 0.0, 0.0);
  options.clip = reader.number_or("clip", 0.0, 0.0);
  reader.finish();
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
