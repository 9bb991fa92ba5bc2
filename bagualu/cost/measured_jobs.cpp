#include "bagualu/cost/measured_jobs.h"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/strategy.h"

namespace bagualu {
namespace {

constexpr double kNsPerMs = 1e6;
constexpr double kLargestMs = 1e9;

/// Settings of a job that `defaults` and a row may both state.
void read_settings(JsonReader& reader, Job& job) {
  read_job_settings(&reader, &job);
  job.microbatches = reader.int64_or("microbatches", job.microbatches, 1);
  if (reader.has("pipeline")) {
    job.pipeline = parse_pipeline_kind(reader.string("pipeline"), reader.where(), "pipeline");
  }
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
    const int64_t per_rank = virtual_stages_per_rank(job.pipeline, job.layout.vpp);
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
