#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/schedule/job_memory_state.h"

namespace bagualu {
namespace {

constexpr size_t kLargest = 10;

/// "layer12.rows" -> "rows": a name without its layer. What a layer graph receives is the layer's
/// input, wherever the layer lies.
std::string bare(std::string_view name) {
  if (name == "stage_recv.out" || name == "embedding.out") return "layer_input";
  const size_t dot = name.starts_with("layer") ? name.find('.') : std::string_view::npos;
  return std::string(dot == std::string_view::npos ? name : name.substr(dot + 1));
}

/// `split_tokens`: of a rank's part of the sequence.
std::string numbers_put_in(const Graph& graph, const ByteFormula& formula, int64_t rows,
                           int64_t split_tokens) {
  std::string text;
  const auto add = [&](std::string part) { text += (text.empty() ? "" : " + ") + std::move(part); };
  if (formula.per_token > 0) add(fmt::format("{} tokens * {} B", graph.tokens, formula.per_token));
  if (formula.per_row > 0) add(fmt::format("{} rows * {} B", rows, formula.per_row));
  if (formula.fixed > 0 && formula.fixed % split_tokens == 0 && split_tokens < graph.tokens) {
    add(fmt::format("{} tokens * {} B", split_tokens, formula.fixed / split_tokens));
  } else if (formula.fixed > 0) {
    add(fmt::format("{} B", formula.fixed));
  }
  return text;
}

/// Tensors by name, equal ones of several layers and micro-batches as one row.
class Tally {
 public:
  explicit Tally(int64_t split_tokens) : split_tokens_(split_tokens) {}

  void add(const Graph& graph, int storage, const RowBytes& bytes, int64_t rows, bool saved,
           int64_t times = 1) {
    const StorageSpec& spec = graph.storages[storage];
    TensorRow& row = rows_[{bare(spec.name), saved}];
    if (row.count == 1 && row.name.empty()) {
      row.name = bare(spec.name);
      row.op = bare(graph.ops[spec.producer].name);
      row.formula = numbers_put_in(graph, spec.bytes, rows, split_tokens_);
      row.saved = saved;
      row.count = 0;
    }
    row.count += times;
    row.bytes += bytes.at(rows) * times;
    (saved ? saved_ : transient_) += bytes.at(rows) * times;
  }
  void add_other(std::string name, std::string op, int64_t bytes, bool saved) {
    if (bytes <= 0) return;
    TensorRow& row = rows_[{name, saved}];
    row.name = std::move(name);
    row.op = std::move(op);
    row.saved = saved;
    row.bytes += bytes;
    row.formula = fmt::format("{} B", row.bytes);
    (saved ? saved_ : transient_) += bytes;
  }
  std::vector<TensorRow> largest() const {
    std::vector<TensorRow> sorted;
    for (const auto& [key, row] : rows_) sorted.push_back(row);
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const TensorRow& a, const TensorRow& b) { return a.bytes > b.bytes; });
    if (sorted.size() > kLargest) sorted.resize(kLargest);
    return sorted;
  }
  int64_t saved_bytes() const { return saved_; }
  int64_t transient_bytes() const { return transient_; }

 private:
  int64_t split_tokens_;
  std::map<std::pair<std::string, bool>, TensorRow> rows_;
  int64_t saved_ = 0;
  int64_t transient_ = 0;
};

int step_of_highest(const std::vector<LayerLevel>& levels, int64_t rows) {
  int step = -1;
  int64_t most = -1;
  for (const LayerLevel& level : levels) {
    if (level.bytes.at(rows) > most) {
      most = level.bytes.at(rows);
      step = level.step;
    }
  }
  return step;
}

/// Graphs and settings by kind, made when first asked for.
class Kinds {
 public:
  explicit Kinds(const Job& job) : job_(job) {}
  struct Made {
    Graph graph;
    WalkSettings settings;
    std::vector<int> saved;  ///< storages between forward and backward
  };
  const Made& of(LayerKind kind) {
    Made& made = made_[kind];
    if (made.graph.ops.empty()) {
      made.graph = kind_graph(job_, kind);
      made.settings = walk_settings(made.graph, job_);
      made.saved = saved_of(made);
    }
    return made;
  }

 private:
  static std::vector<int> saved_of(const Made& made) {
    // The backward's first step has all of them and what that backward makes.
    const auto forward_ops = static_cast<int>(made.graph.ops.size());
    std::vector<int> saved;
    for (const int s : moment_of(made.graph, made.settings, forward_ops).alive) {
      if (made.graph.storages[s].kind != StorageKind::kActivation) continue;
      if (made.graph.storages[s].unit < 0 && made.settings.regions.empty()) continue;
      const bool off = !made.settings.offloaded.empty() && made.settings.offloaded[s] != 0;
      if (!off) saved.push_back(s);
    }
    return saved;
  }
  const Job& job_;
  std::map<LayerKind, Made> made_;
};

}  // namespace

std::vector<TensorRow> JobMemory::tensors(int64_t layer, double factor) const {
  const Job& job = state_->job;
  MegatronGraphOptions options = megatron_options(job);
  options.first_layer = layer;
  const Graph graph = build_megatron_graph(job.model, options);
  const int64_t rows = expert_rows(job, factor);
  std::vector<TensorRow> made;
  for (size_t s = 0; s < graph.storages.size(); ++s) {
    const StorageSpec& spec = graph.storages[s];
    TensorRow row;
    row.name = spec.name;
    row.op = graph.ops[spec.producer].name;
    row.formula = numbers_put_in(graph, spec.bytes, rows, job.sequence_tokens());
    row.bytes =
        storage_row_bytes(graph, static_cast<int>(s), job.allocator.rounding_bytes).at(rows);
    row.saved = spec.unit >= 0;
    made.push_back(std::move(row));
  }
  return made;
}

namespace {

/// What is alive at the peak, part by part.
class PeakReport {
 public:
  PeakReport(const JobMemory::State& state, const RoutedLoads& loads)
      : state_(state), loads_(loads), kinds_(state.job), tally_(state.job.sequence_tokens()) {}

  /// Layers and head of a stage, in order.
  std::vector<std::pair<LayerKind, int64_t>> parts_of(int64_t stage) const {
    const StageContent& content = state_.job.stages[static_cast<size_t>(stage)];
    std::vector<std::pair<LayerKind, int64_t>> parts;
    for (int64_t i = 0; i < content.layer_count; ++i) {
      parts.emplace_back(state_.kind_of(content.first_layer + i), content.first_layer + i);
    }
    for (int64_t i = 0; i < content.mtp_layers; ++i) {
      parts.emplace_back(state_.kind_of(state_.job.model.layers - 1), state_.job.model.layers - 1);
      parts.emplace_back(LayerKind::kHead, -1);
    }
    if (content.head) parts.emplace_back(LayerKind::kHead, -1);
    return parts;
  }

  int64_t rows_of(LayerKind kind, int64_t layer, int64_t microbatch) const {
    return kind == LayerKind::kMoe ? expert_rows(state_.job, loads_.at(layer, microbatch)) : 0;
  }

  void add_saved(const PipelinePass& pass, int parts) {
    const auto all = parts_of(pass.stage);
    for (int p = 0; p < std::min(parts, static_cast<int>(all.size())); ++p) {
      const auto& [kind, layer] = all[static_cast<size_t>(p)];
      const int64_t rows = rows_of(kind, layer, pass.microbatch);
      const auto& made = kinds_.of(kind);
      for (const int s : made.saved) {
        tally_.add(made.graph, s, storage_row_bytes(made.graph, s, made.settings.rounding_bytes),
                   rows, true);
      }
    }
  }

  /// The part inside which the peak is. Returns the name of the operator.
  std::string add_moment(const PipelinePass& pass, int part, int64_t& layer_number) {
    const auto all = parts_of(pass.stage);
    if (part < 0 || part >= static_cast<int>(all.size())) {
      tally_.add_other("embedding.gradient", "embedding", state_.embedding_gradient_bytes, false);
      tally_.add_other("d_hidden", "embedding", state_.boundary_bytes, false);
      return "embedding";
    }
    const auto& [kind, layer] = all[static_cast<size_t>(part)];
    layer_number = layer;
    const auto& made = kinds_.of(kind);
    const int64_t rows = rows_of(kind, layer, pass.microbatch);
    const LayerProfile& profile = state_.kinds[static_cast<size_t>(kind)]->profile;
    const bool forward = pass.kind == PassKind::kForward;
    const int step = step_of_highest(forward ? profile.forward : profile.backward, rows);
    const WalkMoment moment = moment_of(made.graph, made.settings, step);
    for (const int s : moment.alive) {
      const bool saved = made.graph.storages[s].unit >= 0;
      tally_.add(made.graph, s, storage_row_bytes(made.graph, s, made.settings.rounding_bytes),
                 rows, saved);
    }
    const std::string op = bare(made.graph.ops[moment.op].name);
    tally_.add_other(op + ".scratch", op, moment.scratch.at(rows), false);
    return layer < 0 ? op : fmt::format("layer{}.{}", layer, op);
  }

  Tally& tally() { return tally_; }

 private:
  const JobMemory::State& state_;
  const RoutedLoads& loads_;
  Kinds kinds_;
  Tally tally_;
};

}  // namespace

RankMemory JobMemory::describe(int64_t pp_rank, const RoutedLoads& loads) const {
  const Job& job = state_->job;
  RankMemory memory;
  memory.pp_rank = pp_rank;
  memory.static_bytes = static_bytes(pp_rank);
  const RankPeak peak = state_->walk_rank(pp_rank, loads, nullptr, /*with_resident=*/true);
  memory.peak_bytes = memory.static_bytes + peak.bytes;
  memory.communication_bytes = job.allocator.communication_bytes;
  memory.reserved_bytes = static_cast<int64_t>(static_cast<double>(memory.peak_bytes) *
                                               (1 + job.allocator.reserve_fraction));
  memory.cause.pass = peak.pass;
  memory.in_flight = peak.in_flight;
  PeakReport report(*state_, loads);
  for (const PipelinePass& pass : peak.resident) {
    if (pass.stage == peak.pass.stage && pass.microbatch == peak.pass.microbatch) continue;
    report.add_saved(pass, INT32_MAX);
  }
  report.add_saved(peak.pass, peak.part);
  memory.cause.op = report.add_moment(peak.pass, peak.part, memory.cause.layer);
  report.tally().add_other("stage_boundary", "send", peak.held, false);
  // What a forward or a full recompute holds beside single layers (copies under way).
  const int64_t rest = peak.bytes - report.tally().saved_bytes() - report.tally().transient_bytes();
  report.tally().add_other(rest > 0 ? "recomputed_or_in_copy" : "", "", rest, false);
  for (const StaticBucket& bucket : job_static(job, pp_rank).buckets) {
    const std::string name = bucket.part.empty() ? bucket.name : bucket.name + "." + bucket.part;
    memory.by_kind.push_back({name, bucket.bytes});
  }
  const int64_t saved = std::min(report.tally().saved_bytes(), peak.bytes);
  memory.by_kind.push_back({"activations", saved});
  memory.by_kind.push_back({"transients", peak.bytes - saved});
  memory.largest = report.tally().largest();
  return memory;
}

}  // namespace bagualu
