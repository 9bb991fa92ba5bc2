#include "bagualu/model/strategy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr const char* kFormat = "bagualu.strategy";
constexpr int64_t kVersion = 1;
constexpr int64_t kMaxSize = int64_t{1} << 20;
constexpr int64_t kMaxBytes = int64_t{1} << 50;

using Names = std::vector<std::string>;
const Names kGranularities = {"none", "selective", "full"};
const Names kExchanges = {"ring", "all-to-all", "all-gather"};
const Names kEntropies = {"unfused", "native", "transformer-engine"};
const Names kDispatchers = {"allgather", "alltoall", "flex"};
const Names kBackends = {"deepep", "hybridep", "ncclep"};
const Names kRecipes = {"delayed", "tensorwise", "blockwise", "mxfp8"};
const Names kOptimizers = {"adam", "sgd"};
/// Fills fields from an object; what the object does not say stays.
class Reading {
 public:
  explicit Reading(JsonReader* reader) : reader_(*reader) {}

  void field(const char* key, int64_t* value, int64_t min, int64_t max) {
    *value = reader_.int64_or(key, *value, min, max);
  }
  void field(const char* key, double* value, double min, double max) {
    *value = reader_.number_or(key, *value, min, max);
  }
  void field(const char* key, bool* value) { *value = reader_.boolean_or(key, *value); }
  void field(const char* key, std::string* value, const Names& allowed) {
    *value = reader_.string_or(key, *value);
    check(key, *value, allowed);
  }
  template <class Enum>
  void enumeration(const char* key, Enum* value, const Names& names) {
    std::string text = names[static_cast<size_t>(*value)];
    field(key, &text, names);
    *value = static_cast<Enum>(std::find(names.begin(), names.end(), text) - names.begin());
  }
  void field(const char* key, Names* values, const Names& allowed) {
    if (!reader_.has(key)) return;
    values->clear();
    const Json& list = reader_.raw(key);
    if (!list.is_array()) fail(key, list.type_name(), "a list of texts");
    for (const Json& item : list) {
      if (!item.is_string()) fail(key, item.type_name(), "a list of texts");
      values->push_back(item.get<std::string>());
      check(key, values->back(), allowed);
    }
  }
  template <class Fields>
  void section(const char* key, Fields fields) {
    if (!reader_.has(key)) return;
    JsonReader object(reader_.object(key), reader_.where() + "." + key);
    Reading inner(&object);
    fields(&inner);
    object.finish();
  }

 private:
  void check(const char* key, const std::string& value, const Names& allowed) const {
    if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return;
    fail(key, value, fmt::format("{}", fmt::join(allowed, ", ")));
  }
  [[noreturn]] void fail(const char* key, std::string found, std::string allowed) const {
    throw InvalidInput(reader_.where(), key, std::move(found), std::move(allowed));
  }

  JsonReader& reader_;
};

/// Puts fields into an object.
class Writing {
 public:
  explicit Writing(Json* object) : object_(*object) {}

  void field(const char* key, const int64_t* value, int64_t, int64_t) { object_[key] = *value; }
  void field(const char* key, const double* value, double, double) { object_[key] = *value; }
  void field(const char* key, const bool* value) { object_[key] = *value; }
  void field(const char* key, const std::string* value, const Names&) { object_[key] = *value; }
  void field(const char* key, const Names* values, const Names&) { object_[key] = *values; }
  template <class Enum>
  void enumeration(const char* key, const Enum* value, const Names& names) {
    object_[key] = names[static_cast<size_t>(*value)];
  }
  template <class Fields>
  void section(const char* key, Fields fields) {
    Json inner = Json::object();
    Writing writing(&inner);
    fields(&writing);
    object_[key] = std::move(inner);
  }

 private:
  Json& object_;
};

template <class Visitor>
void visit_layout(Visitor* visitor, JobLayout* layout) {
  visitor->field("world_size", &layout->world_size, 1, kMaxSize);
  visitor->field("tp", &layout->tp, 1, kMaxSize);
  visitor->field("cp", &layout->cp, 1, kMaxSize);
  visitor->field("pp", &layout->pp, 1, 4096);
  visitor->field("vpp", &layout->vpp, 1, 4096);
  visitor->field("ep", &layout->ep, 1, kMaxSize);
  visitor->field("etp", &layout->etp, 1, kMaxSize);
}

template <class Visitor>
void visit_optimizer(Visitor* visitor, OptimizerSettings* optimizer) {
  visitor->field("name", &optimizer->name, kOptimizers);
  visitor->field("distributed", &optimizer->distributed);
  visitor->field("parameter_bytes", &optimizer->parameter_bytes, 1, 8);
  visitor->field("gradient_bytes", &optimizer->gradient_bytes, 2, 4);
  visitor->field("master_bytes", &optimizer->master_bytes, 0, 8);
  visitor->field("exp_avg_bytes", &optimizer->exp_avg_bytes, 0, 8);
  visitor->field("exp_avg_sq_bytes", &optimizer->exp_avg_sq_bytes, 0, 8);
  visitor->field("main_gradient_bytes", &optimizer->main_gradient_bytes, 0, 4);
  visitor->field("instances", &optimizer->instances, 1, kMaxSize);
}

template <class Visitor>
void visit_kept(Visitor* visitor, Job* job) {
  visitor->section("recompute", [&](auto* inner) {
    inner->enumeration("granularity", &job->recompute.granularity, kGranularities);
    inner->field("block", &job->recompute.block);
    inner->field("layers", &job->recompute.layers, 1, 4096);
    inner->field("modules", &job->recompute.modules, recompute_module_names());
    inner->field("distribute_saved", &job->recompute.distribute_saved);
  });
  visitor->section("offload", [&](auto* inner) {
    inner->field("modules", &job->offload.modules, offload_module_names());
    inner->field("fraction", &job->offload.fraction, 0, 1);
    inner->field("min_tensor_elements", &job->offload.min_tensor_elements, 0, kMaxBytes);
  });
  visitor->section("allocator", [&](auto* inner) {
    AllocatorSettings& allocator = job->allocator;
    inner->field("rounding_bytes", &allocator.rounding_bytes, 1, int64_t{1} << 30);
    inner->field("communication_bytes", &allocator.communication_bytes, 0, kMaxBytes);
    inner->field("reserve_fraction", &allocator.reserve_fraction, 0, 1);
    inner->field("engine_workspace_bytes", &allocator.engine_workspace_bytes, 0, kMaxBytes);
    inner->field("blas_workspace_bytes", &allocator.blas_workspace_bytes, 0, kMaxBytes);
    inner->field("weight_grad_stand_ins", &allocator.weight_grad_stand_ins);
    inner->field("engine_gemms", &allocator.engine_gemms);
    inner->field("max_split_bytes", &allocator.max_split_bytes, 0, kMaxBytes);
  });
}

template <class Visitor>
void visit_moe(Visitor* visitor, MoeSettings* moe) {
  visitor->field("dispatcher", &moe->dispatcher, kDispatchers);
  visitor->field("flex_backend", &moe->flex_backend, kBackends);
  visitor->field("capacity_factor", &moe->capacity_factor, 0, 4096);
  visitor->field("pad_to_capacity", &moe->pad_to_capacity);
  visitor->field("permute_fusion", &moe->permute_fusion);
  visitor->field("probs_in_activation", &moe->probs_in_activation);
  visitor->field("router_bytes", &moe->router_bytes, 1, 8);
  visitor->field("row_multiple", &moe->row_multiple, 1, 1024);
}

/// Everything that has one key, in the order of the file.
template <class Visitor>
void visit_settings(Visitor* visitor, Job* job) {
  visitor->field("micro_batch_size", &job->micro_batch_size, 1, kMaxSize);
  visitor->field("seq", &job->seq, 1, INT32_MAX);
  visitor->field("element_bytes", &job->element_bytes, 1, 8);
  visitor->field("fp8", &job->fp8);
  visitor->field("fp8_recipe", &job->fp8_recipe, kRecipes);
  visitor->field("attention_dropout", &job->attention_dropout, 0, 1);
  visitor->field("attention_unfused", &job->attention_unfused);
  visitor->field("activation_fusion", &job->activation_fusion);
  visitor->field("accumulation_fusion", &job->accumulation_fusion);
  visitor->field("overlap_grad_reduce", &job->overlap_grad_reduce);
  visitor->field("overlap_param_gather", &job->overlap_param_gather);
  visitor->enumeration("cp_exchange", &job->cp_exchange, kExchanges);
  visitor->enumeration("cross_entropy", &job->cross_entropy, kEntropies);
  visitor->field("vocab_multiple", &job->vocab_multiple, 1, 1 << 24);
  visitor->section("overlap", [&](auto* inner) {
    inner->field("tp", &job->overlap.tp);
    inner->field("p2p", &job->overlap.p2p);
    inner->field("expert", &job->overlap.expert);
    inner->field("shared_expert", &job->overlap.shared_expert);
  });
  visitor->section("optimizer", [&](auto* inner) { visit_optimizer(inner, &job->optimizer); });
  visit_kept(visitor, job);
  visitor->section("moe", [&](auto* inner) { visit_moe(inner, &job->moe); });
}

/// Orders that follow from the sizes, where the file names none.
PipelineKind default_pipeline(const JobLayout& layout) {
  return layout.pp > 1 && layout.vpp > 1 ? PipelineKind::kInterleaved : PipelineKind::k1F1B;
}

void read_batches(JsonReader* reader, Job* job) {
  job->microbatches = reader->int64_or("microbatches", 1, 1, kMaxSize);
  if (!reader->has("global_batch_size")) return;
  if (reader->has("microbatches")) {
    throw InvalidInput(reader->where(), "global_batch_size", "beside microbatches",
                       "one of the two");
  }
  const int64_t global = reader->int64("global_batch_size", 1);
  const int64_t of_step = job->micro_batch_size * std::max<int64_t>(job->layout.dp(), 1);
  if (global % of_step != 0) {
    throw InvalidInput(reader->where(), "global_batch_size", fmt::format("{}", global),
                       fmt::format("a multiple of micro_batch_size * dp = {}", of_step));
  }
  job->microbatches = global / of_step;
}

}  // namespace

void read_job_settings(JsonReader* reader, Job* job) {
  Reading reading(reader);
  visit_settings(&reading, job);
}

Json strategy_to_json(const Job& job) {
  Job copy = job;
  Json object = {{"format", kFormat}, {"version", kVersion}};
  Writing writing(&object);
  visit_layout(&writing, &copy.layout);
  object["sequence_parallel"] = job.layout.sequence_parallel;
  object["pipeline"] = pipeline_kind_name(job.pipeline);
  object["stages"] = stages_text(job.stages);
  object["microbatches"] = job.microbatches;
  visit_settings(&writing, &copy);
  return object;
}

Job job_from_strategy(const Json& object, const ModelSpec& model, const std::string& where) {
  JsonReader reader(object, where);
  Reading reading(&reader);
  const std::string format = reader.string("format");
  if (format != kFormat) throw InvalidInput(where, "format", format, kFormat);
  reader.int64("version", kVersion, kVersion);
  reader.string_or("name", "");
  reader.string_or("source", "");
  Job job;
  job.model = model;
  visit_layout(&reading, &job.layout);
  job.layout.sequence_parallel = reader.boolean_or("sequence_parallel", job.layout.tp > 1);
  const std::string kind(pipeline_kind_name(default_pipeline(job.layout)));
  job.pipeline = parse_pipeline_kind(reader.string_or("pipeline", kind), where, "pipeline");
  const int64_t per_rank = virtual_stages_per_rank(job.pipeline, job.layout.vpp);
  const std::string stages = reader.string_or("stages", "");
  job.stages = stages.empty()
                   ? default_stages(model, job.layout.pp, per_rank)
                   : parse_stages(stages, model, job.layout.pp * per_rank, where, "stages");
  visit_settings(&reading, &job);
  read_batches(&reader, &job);
  reader.finish();
  validate(job, where);
  return job;
}

Job job_from_strategy_file(const std::filesystem::path& path, const ModelSpec& model) {
  return job_from_strategy(read_json_file(path), model, path.string());
}

}  // namespace bagualu
