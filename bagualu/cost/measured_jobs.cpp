#include "bagualu/cost/measured_jobs.h"

#include <fmt/format.h>

#include <map>
#include <optional>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr double kNsPerMs = 1e6;
constexpr double kLargestMs = 1e9;

template <class Value>
Value choice(JsonReader& reader, const std::string& key, Value fallback,
             const std::vector<std::pair<std::string, Value>>& choices) {
  if (!reader.has(key)) return fallback;
  const std::string found = reader.string(key);
  std::string allowed;
  for (const auto& [name, value] : choices) {
    if (name == found) return value;
    allowed += (allowed.empty() ? "" : ", ") + name;
  }
  throw InvalidInput(reader.where(), key, found, allowed);
}

std::vector<std::string> names(JsonReader& reader, const std::string& key) {
  std::vector<std::string> list;
  if (!reader.has(key)) return list;
  const Json& array = reader.raw(key);
  if (!array.is_array()) throw InvalidInput(reader.where(), key, array.dump(), "a list of names");
  for (const Json& name : array) {
    if (!name.is_string()) throw InvalidInput(reader.where(), key, name.dump(), "names");
    list.push_back(name.get<std::string>());
  }
  return list;
}

void read_recompute(const Json& object, const std::string& where, RecomputeSettings& settings) {
  JsonReader reader(object, where);
  settings.granularity = choice(reader, "granularity", RecomputeGranularity::kNone,
                                {{"none", RecomputeGranularity::kNone},
                                 {"selective", RecomputeGranularity::kSelective},
                                 {"full", RecomputeGranularity::kFull}});
  settings.block = reader.boolean_or("block", settings.block);
  settings.layers = reader.int64_or("layers", settings.layers, 1);
  settings.modules = names(reader, "modules");
  reader.finish();
}

void read_offload(const Json& object, const std::string& where, OffloadSettings& settings) {
  JsonReader reader(object, where);
  settings.fraction = reader.number_or("fraction", settings.fraction, 0, 1);
  settings.modules = names(reader, "modules");
  reader.finish();
}

void read_optimizer(const Json& object, const std::string& where, OptimizerSettings& settings) {
  JsonReader reader(object, where);
  settings.distributed = reader.boolean_or("distributed", settings.distributed);
  settings.gradient_bytes = reader.int64_or("gradient_bytes", settings.gradient_bytes, 2, 4);
  settings.main_gradient_bytes =
      reader.int64_or("main_gradient_bytes", settings.main_gradient_bytes, 0, 4);
  reader.finish();
}

void read_moe(const Json& object, const std::string& where, MoeSettings& settings) {
  JsonReader reader(object, where);
  settings.capacity_factor = reader.number_or("capacity_factor", settings.capacity_factor, 0);
  settings.pad_to_capacity = reader.boolean_or("pad_to_capacity", settings.pad_to_capacity);
  settings.permute_fusion = reader.boolean_or("permute_fusion", settings.permute_fusion);
  reader.finish();
}

void read_allocator(const Json& object, const std::string& where, AllocatorSettings& settings) {
  JsonReader reader(object, where);
  settings.engine_workspace_bytes =
      reader.int64_or("engine_workspace_bytes", settings.engine_workspace_bytes, 0);
  settings.blas_workspace_bytes =
      reader.int64_or("blas_workspace_bytes", settings.blas_workspace_bytes, 0);
  settings.weight_grad_stand_ins =
      reader.boolean_or("weight_grad_stand_ins", settings.weight_grad_stand_ins);
  settings.max_split_bytes = reader.int64_or("max_split_bytes", settings.max_split_bytes, 0);
  settings.communication_bytes =
      reader.int64_or("communication_bytes", settings.communication_bytes, 0);
  settings.reserve_fraction = reader.number_or("reserve_fraction", settings.reserve_fraction, 0, 1);
  settings.engine_gemms = reader.boolean_or("engine_gemms", settings.engine_gemms);
  reader.finish();
}

void read_overlap(const Json& object, const std::string& where, Job& job) {
  JsonReader reader(object, where);
  job.overlap.tp = reader.boolean_or("tp", job.overlap.tp);
  job.overlap.p2p = reader.boolean_or("p2p", job.overlap.p2p);
  job.overlap.expert = reader.boolean_or("expert", job.overlap.expert);
  job.overlap.shared_expert = reader.boolean_or("shared_expert", job.overlap.shared_expert);
  job.overlap_grad_reduce = reader.boolean_or("grad_reduce", job.overlap_grad_reduce);
  job.overlap_param_gather = reader.boolean_or("param_gather", job.overlap_param_gather);
  reader.finish();
}

/// Settings of a job that `defaults` and a row may both state.
void read_settings(JsonReader& reader, Job& job) {
  const std::string& where = reader.where();
  job.micro_batch_size = reader.int64_or("micro_batch_size", job.micro_batch_size, 1);
  job.seq = reader.int64_or("seq", job.seq, 1);
  job.microbatches = reader.int64_or("microbatches", job.microbatches, 1);
  if (reader.has("pipeline")) {
    job.pipeline = parse_pipeline_kind(reader.string("pipeline"), where, "pipeline");
  }
  job.attention_unfused = reader.boolean_or("attention_unfused", job.attention_unfused);
  job.activation_fusion = reader.boolean_or("activation_fusion", job.activation_fusion);
  job.fp8 = reader.boolean_or("fp8", job.fp8);
  job.vocab_multiple = reader.int64_or("vocab_multiple", job.vocab_multiple, 1);
  job.cross_entropy = choice(reader, "cross_entropy", job.cross_entropy,
                             {{"unfused", CrossEntropy::kUnfused},
                              {"native", CrossEntropy::kFusedNative},
                              {"te", CrossEntropy::kFusedTe}});
  job.cp_exchange = choice(reader, "cp_exchange", job.cp_exchange,
                           {{"ring", CpExchange::kRing},
                            {"all-to-all", CpExchange::kAllToAll},
                            {"all-gather", CpExchange::kAllGather}});
  const auto nested = [&](const char* key, const auto& read) {
    if (reader.has(key)) read(reader.object(key), where + "." + key);
  };
  nested("recompute", [&](auto& o, auto at) { read_recompute(o, at, job.recompute); });
  nested("offload", [&](auto& o, auto at) { read_offload(o, at, job.offload); });
  nested("optimizer", [&](auto& o, auto at) { read_optimizer(o, at, job.optimizer); });
  nested("moe", [&](auto& o, auto at) { read_moe(o, at, job.moe); });
  nested("allocator", [&](auto& o, auto at) { read_allocator(o, at, job.allocator); });
  nested("overlap", [&](auto& o, auto at) { read_overlap(o, at, job); });
}

/// The first `layers` layers of a model.
ModelSpec shortened(ModelSpec model, int64_t layers) {
  model.layers = layers;
  model.moe_layer.resize(static_cast<size_t>(layers));
  if (!model.windowed_layer.empty()) model.windowed_layer.resize(static_cast<size_t>(layers));
  return model;
}

class MeasuredReader {
 public:
  MeasuredReader(const Json& object, const std::string& where) : where_(where) {
    JsonReader reader(object, where);
    if (reader.string("format") != "bagualu.measured_jobs") {
      throw InvalidInput(where, "format", reader.string("format"), "bagualu.measured_jobs");
    }
    reader.int64("version", 1, 1);
    measured_.source = reader.string_or("source", "");
    reader.string_or("about", "");
    const Json& models = reader.object("models");
    for (const auto& [name, model] : models.items()) {
      models_[name] = model_from_json(model, where + ".models." + name);
    }
    if (reader.has("defaults")) {
      JsonReader defaults(reader.object("defaults"), where + ".defaults");
      read_settings(defaults, defaults_);
      defaults.finish();
    }
    const Json& rows = reader.raw("rows");
    if (!rows.is_array()) throw InvalidInput(where, "rows", rows.dump(), "a list");
    for (const Json& row : rows) read_row(row);
    reader.finish();
  }

  MeasuredJobs take() { return std::move(measured_); }

 private:
  void read_row(const Json& object) {
    const std::string at = fmt::format("{}.rows[{}]", where_, measured_.rows.size());
    if (!object.is_object()) throw InvalidInput(at, "", object.dump(), "an object");
    JsonReader reader(object, at);
    MeasuredJob row;
    row.id = reader.string("id");
    row.group = reader.string_or("group", row.id);
    Job& job = row.job;
    job = defaults_;
    const std::string model = reader.string("model");
    const auto found = models_.find(model);
    if (found == models_.end()) throw InvalidInput(at, "model", model, "a name of `models`");
    job.model = found->second;
    const int64_t layers = reader.int64_or("layers", job.model.layers, 1, job.model.layers);
    job.model = shortened(std::move(job.model), layers);
    read_settings(reader, job);
    job.layout = parse_layout(reader.string("layout"), at, "layout");
    const int64_t per_rank = is_v_shaped(job.pipeline) ? 2 : job.layout.vpp;
    job.stages = reader.has("stages") ? parse_stages(reader.string("stages"), job.model,
                                                     job.layout.pp * per_rank, at, "stages")
                                      : default_stages(job.model, job.layout.pp, per_rank);
    const auto ms = [&](const char* key) {
      return reader.number_or(key, 0, 0, kLargestMs) * kNsPerMs;
    };
    row.iteration_ns = ms("iteration_ms");
    row.layer_forward_ns = ms("layer_forward_ms");
    row.layer_backward_ns = ms("layer_backward_ms");
    row.peer_iteration_ns = ms("peer_iteration_ms");
    row.peak_bytes = reader.int64_list_or("peak_bytes", {}, 0);
    row.device_bytes = reader.int64_or("device_bytes", 0, 0);
    row.out_of_memory = reader.boolean_or("out_of_memory", false);
    for (const char* key : {"reserved_gib", "peer_peak_gib", "tokens_per_s"}) reader.raw(key);
    reader.finish();
    validate(job, at);
    measured_.rows.push_back(std::move(row));
  }

  std::string where_;
  std::map<std::string, ModelSpec> models_;
  Job defaults_;
  MeasuredJobs measured_;
};

}  // namespace

MeasuredJobs measured_jobs_from_json(const Json& object, const std::string& where) {
  return MeasuredReader(object, where).take();
}

MeasuredJobs measured_jobs_from_file(const std::filesystem::path& path) {
  return measured_jobs_from_json(read_json_file(path), path.string());
}

}  // namespace bagualu
