#include "bagualu/schedule/layer_profile.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

/// Megatron-Kwai leaves smaller tensors on the device.
constexpr int64_t kSmallestMoved = int64_t{1} << 20;

int64_t highest(const std::vector<LayerLevel>& levels, int64_t rows) {
  int64_t most = 0;
  for (const LayerLevel& level : levels) most = std::max(most, level.bytes.at(rows));
  return most;
}

/// Leaves out levels that another one exceeds at every load.
void keep_highest(std::vector<LayerLevel>& levels) {
  std::sort(levels.begin(), levels.end(), [](const LayerLevel& a, const LayerLevel& b) {
    if (a.bytes.per_row != b.bytes.per_row) return a.bytes.per_row > b.bytes.per_row;
    if (a.bytes.fixed != b.bytes.fixed) return a.bytes.fixed > b.bytes.fixed;
    return a.step < b.step;
  });
  std::vector<LayerLevel> kept;
  for (const LayerLevel& level : levels) {
    if (kept.empty() || level.bytes.fixed > kept.back().bytes.fixed) kept.push_back(level);
  }
  levels = std::move(kept);
}

bool contains(const std::vector<int>& ids, int id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

/// Forward and backward of one graph. Note [Regions]: a region's dropped storages are those saved
/// ones that it made and that only its own backwards read; with discards_output all it made. What a
/// region reads and nobody saves is kept for it, as a checkpoint keeps its inputs.
class Walk {
 public:
  Walk(const Graph& graph, const WalkSettings& settings, int wanted)
      : graph_(graph), settings_(settings), wanted_(wanted) {
    const size_t storages = graph.storages.size();
    alive_.assign(storages, 0);
    dropped_.assign(storages, 0);
    kept_.assign(storages, 0);
    region_of_op_.assign(graph.ops.size(), -1);
    bytes_.resize(storages);
    for (size_t s = 0; s < storages; ++s) {
      bytes_[s] = storage_row_bytes(graph, static_cast<int>(s), settings.rounding_bytes);
    }
    for (size_t r = 0; r < settings.regions.size(); ++r) plan_region(static_cast<int>(r));
    rebuilt_.assign(settings.regions.size(), 0);
  }

  void run() {
    for (int i = 0; i < static_cast<int>(graph_.ops.size()); ++i) forward(i);
    finish_forward();
    for (int i = static_cast<int>(graph_.ops.size()) - 1; i >= 0; --i) backward(i);
  }

  LayerProfile take() {
    keep_highest(profile_.forward);
    keep_highest(profile_.backward);
    return std::move(profile_);
  }
  WalkMoment moment() const { return moment_; }

 private:
  void plan_region(int r) {
    const RecomputeRegion& region = settings_.regions[static_cast<size_t>(r)];
    for (const int op : region.ops) region_of_op_[static_cast<size_t>(op)] = r;
    for (const int op : region.ops) {
      for (const int s : graph_.ops[op].creates) {
        if (graph_.storages[s].unit < 0) continue;
        dropped_[s] = region.discards_output || only_read_inside(region, s) ? 1 : 0;
      }
      for (const int s : graph_.ops[op].reads) {
        const StorageSpec& storage = graph_.storages[s];
        if (storage.unit < 0 && !contains(region.ops, storage.producer)) kept_[s] = 1;
      }
    }
  }

  bool only_read_inside(const RecomputeRegion& region, int s) const {
    for (int i = 0; i < static_cast<int>(graph_.ops.size()); ++i) {
      if (contains(graph_.ops[i].bwd_saved, s) && !contains(region.ops, i)) return false;
    }
    return true;
  }

  void add(int s) {
    if (alive_[s] != 0) return;
    alive_[s] = 1;
    live_ += bytes_[s];
  }
  void remove(int s) {
    if (alive_[s] == 0) return;
    alive_[s] = 0;
    live_ -= bytes_[s];
  }

  RowBytes scratch_of(const Workspace& workspace) const {
    RowBytes sum;
    for (const auto& phase : workspace.phases) {
      for (const ByteFormula& buffer : phase) {
        sum += {buffer.fixed + buffer.per_token * graph_.tokens, buffer.per_row};
      }
    }
    return sum;
  }

  void note(std::vector<LayerLevel>& levels, int op, const Workspace& workspace, bool backward) {
    const RowBytes scratch = scratch_of(workspace);
    RowBytes level = live_;
    level += scratch;
    levels.push_back({level, step_});
    if (step_ == wanted_) {
      moment_ = {backward, op, {}, scratch};
      for (size_t s = 0; s < alive_.size(); ++s) {
        if (alive_[s] != 0) moment_.alive.push_back(static_cast<int>(s));
      }
    }
    ++step_;
  }

  void forward(int i) {
    const OpSpec& op = graph_.ops[i];
    for (const int s : op.creates) add(s);
    note(profile_.forward, i, op.fwd_workspace, false);
    if (i == 0) profile_.input = live_;
    for (const auto* list : {&op.reads, &op.creates}) {
      for (const int s : *list) {
        if (graph_.last_forward_read[s] == i) retire(s);
      }
    }
  }

  void retire(int s) {
    const bool saved = graph_.storages[s].unit >= 0 || kept_[s] != 0;
    if (!saved || dropped_[s] != 0) remove(s);
  }

  void finish_forward() {
    // A region's inner storages may have their last reader inside a later op of the region.
    for (size_t s = 0; s < alive_.size(); ++s) {
      if (alive_[s] != 0 && dropped_[s] != 0) remove(static_cast<int>(s));
    }
    RowBytes host;
    for (size_t s = 0; s < settings_.offloaded.size(); ++s) {
      if (settings_.offloaded[s] != 0 && alive_[s] != 0) host += bytes_[s];
    }
    profile_.offloaded = host;
    list_movable();
    profile_.saved = live_;
    profile_.saved -= host;
  }

  // Where a gated activation is not one kernel, both halves of fc1's output are saved as views.
  void list_movable() {
    bool halves = false;
    for (size_t s = 0; s < alive_.size(); ++s) {
      halves = halves || (alive_[s] != 0 && graph_.storages[s].name.ends_with("_act.gate"));
    }
    for (size_t s = 0; s < alive_.size(); ++s) {
      const int64_t bytes = bytes_[s].at(graph_.tokens);
      profile_.block_bytes.push_back(bytes);
      if (alive_[s] == 0) continue;
      const bool strided = halves && graph_.storages[s].name.ends_with("_fc1.out");
      const int64_t each = strided ? bytes / 2 : bytes;
      if (each < kSmallestMoved) continue;
      for (int part = 0; part < (strided ? 2 : 1); ++part) {
        profile_.movable.push_back({each, strided});
      }
    }
    auto& blocks = profile_.block_bytes;
    for (const OpSpec& op : graph_.ops) {
      for (const Workspace* workspace : {&op.fwd_workspace, &op.bwd_workspace}) {
        for (const auto& phase : workspace->phases) {
          for (const ByteFormula& buffer : phase) {
            blocks.push_back(buffer.fixed + buffer.per_token * graph_.tokens);
          }
        }
      }
    }
    std::sort(blocks.begin(), blocks.end());
    blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  }

  void rebuild_for(int i) {
    const OpSpec& op = graph_.ops[i];
    if (region_of_op_[static_cast<size_t>(i)] >= 0) rebuild(region_of_op_[static_cast<size_t>(i)]);
    for (const int s : op.bwd_saved) {
      if (alive_[s] == 0) rebuild(region_of_op_[static_cast<size_t>(graph_.storages[s].producer)]);
    }
  }

  void rebuild(int r) {
    BGL_CHECK(r >= 0, r);
    if (rebuilt_[static_cast<size_t>(r)] != 0) return;
    rebuilt_[static_cast<size_t>(r)] = 1;
    const RecomputeRegion& region = settings_.regions[static_cast<size_t>(r)];
    for (const int i : region.ops) {
      const OpSpec& op = graph_.ops[i];
      for (const int s : op.creates) add(s);
      note(profile_.backward, i, op.fwd_workspace, true);
      for (const auto* list : {&op.reads, &op.creates}) {
        for (const int s : *list) {
          // What the region hands on unsaved dies with it; so do inputs that were kept for it.
          if (graph_.storages[s].unit < 0 && !read_later(region, i, s)) remove(s);
        }
      }
    }
  }

  bool read_later(const RecomputeRegion& region, int i, int s) const {
    return std::any_of(region.ops.begin(), region.ops.end(),
                       [&](int op) { return op > i && contains(graph_.ops[op].reads, s); });
  }

  void backward(int i) {
    const OpSpec& op = graph_.ops[i];
    if (!op.has_backward) return;
    rebuild_for(i);
    for (const int s : op.bwd_creates) add(s);
    note(profile_.backward, i, op.bwd_workspace, true);
    for (const auto* list : {&op.bwd_saved, &op.bwd_reads, &op.bwd_creates}) {
      for (const int s : *list) {
        if (graph_.last_backward_read[s] == i) remove(s);
      }
    }
  }

  const Graph& graph_;
  const WalkSettings& settings_;
  const int wanted_;
  std::vector<RowBytes> bytes_;
  std::vector<uint8_t> alive_, dropped_, kept_, rebuilt_;
  std::vector<int> region_of_op_;
  RowBytes live_;
  int step_ = 0;
  LayerProfile profile_;
  WalkMoment moment_;
};

/// What a module name of --recompute-modules covers, and whether its output is given up too.
struct ModuleOps {
  std::string_view name;
  bool discards_output;
  std::vector<OpKind> kinds;
};

const std::vector<ModuleOps>& recompute_modules() {
  static const std::vector<ModuleOps> modules = {
      {"moe",
       false,
       {OpKind::kRouter, OpKind::kSharedFc1, OpKind::kSharedAct, OpKind::kSharedFc2,
        OpKind::kDispatchPack, OpKind::kDispatch, OpKind::kDispatchUnpack, OpKind::kExpertFc1,
        OpKind::kMoeAct, OpKind::kExpertFc2, OpKind::kCombine, OpKind::kCombineUnpack}},
      {"core_attn", false, {OpKind::kCoreAttn}},
      {"moe_act", true, {OpKind::kMoeAct}},
      {"mla_up_proj",
       true,
       {OpKind::kQNorm, OpKind::kQUp, OpKind::kKvNorm, OpKind::kKvUp, OpKind::kQRope,
        OpKind::kKRope}},
      {"mlp", false, {OpKind::kMlpNorm, OpKind::kMlpFc1, OpKind::kMlpAct, OpKind::kMlpFc2}},
      {"shared_experts", false, {OpKind::kSharedFc1, OpKind::kSharedAct, OpKind::kSharedFc2}},
      {"mlp_act", true, {OpKind::kMlpAct}},
      {"attn_norm", true, {OpKind::kAttnNorm}},
      {"mlp_norm", true, {OpKind::kMlpNorm}}};
  return modules;
}

/// An output that is given up takes its FP8 copy along.
bool belongs(const Graph& graph, const ModuleOps& module, const RecomputeRegion& region, int op) {
  const OpSpec& spec = graph.ops[op];
  if (spec.kind == OpKind::kCast || spec.kind == OpKind::kRowCast) {
    return contains(region.ops, graph.storages[spec.reads.front()].producer);
  }
  return std::find(module.kinds.begin(), module.kinds.end(), spec.kind) != module.kinds.end();
}

/// Modules of one layer; "layernorm" means the norms that are modules of their own: Transformer
/// Engine's GEMMs bring theirs along, which recompute cannot reach.
std::vector<std::string> modules_of_layer(const Job& job, bool moe) {
  std::vector<std::string> names;
  const auto& modules = job.recompute.modules;
  // A framework that recomputes the dense activation (Megatron-Kwai) reaches every norm.
  const bool all_norms = std::find(modules.begin(), modules.end(), "mlp_act") != modules.end();
  for (const std::string& name : modules) {
    if (name == "layernorm" && !all_norms) {
      if (job.model.has_mla()) names.push_back("attn_norm");
      if (moe) names.push_back("mlp_norm");
    } else if (name == "mla_up_proj" && !job.model.has_mla()) {
      continue;
    } else if (name == "layernorm") {
      names.insert(names.end(), {"attn_norm", "mlp_norm"});
    } else {
      names.push_back(name);
    }
  }
  return names;
}

/// What --offload-modules moves: the tensors that a module's backward reads.
struct OffloadModule {
  std::string_view name;
  std::vector<OpKind> readers;
};

const std::vector<OffloadModule>& offload_modules() {
  static const std::vector<OffloadModule> modules = {
      {"attn_norm", {OpKind::kAttnNorm}},
      {"qkv_linear", {OpKind::kQkv, OpKind::kQDown, OpKind::kKvDown}},
      {"core_attn", {OpKind::kCoreAttn}},
      {"attn_proj", {OpKind::kAttnProj}},
      {"mlp_norm", {OpKind::kMlpNorm}},
      {"expert_fc1", {OpKind::kExpertFc1}},
      {"moe_act", {OpKind::kMoeAct}},
      {"dense_mlp", {OpKind::kMlpFc1, OpKind::kMlpAct, OpKind::kMlpFc2}}};
  return modules;
}

}  // namespace

int64_t LayerProfile::forward_bytes(int64_t rows) const { return highest(forward, rows); }
int64_t LayerProfile::backward_bytes(int64_t rows) const { return highest(backward, rows); }

RowBytes storage_row_bytes(const Graph& graph, int storage, int64_t rounding_bytes) {
  const ByteFormula& formula = graph.storages[storage].bytes;
  RowBytes bytes = {formula.fixed + formula.per_token * graph.tokens, formula.per_row};
  if (bytes.per_row == 0) {
    bytes.fixed = (bytes.fixed + rounding_bytes - 1) / rounding_bytes * rounding_bytes;
  }
  return bytes;
}

WalkSettings walk_settings(const Graph& graph, const Job& job) {
  WalkSettings settings;
  settings.rounding_bytes = std::max<int64_t>(1, job.allocator.rounding_bytes);
  const bool moe = !graph.gates.empty();
  if (job.recompute.granularity == RecomputeGranularity::kSelective) {
    std::vector<uint8_t> taken(graph.ops.size(), 0);
    const std::vector<std::string> names = modules_of_layer(job, moe);
    for (const ModuleOps& module : recompute_modules()) {
      if (std::find(names.begin(), names.end(), module.name) == names.end()) continue;
      RecomputeRegion region;
      region.discards_output = module.discards_output;
      for (int i = 0; i < static_cast<int>(graph.ops.size()); ++i) {
        if (taken[i] != 0 || !belongs(graph, module, region, i)) continue;
        taken[i] = 1;
        region.ops.push_back(i);
      }
      if (!region.ops.empty()) settings.regions.push_back(std::move(region));
    }
  }
  if (job.offload.modules.empty() || job.offload.fraction <= 0) return settings;
  settings.offloaded.assign(graph.storages.size(), 0);
  for (const OffloadModule& module : offload_modules()) {
    const auto& names = job.offload.modules;
    if (std::find(names.begin(), names.end(), module.name) == names.end()) continue;
    for (const OpSpec& op : graph.ops) {
      if (std::find(module.readers.begin(), module.readers.end(), op.kind) ==
          module.readers.end()) {
        continue;
      }
      for (const int s : op.bwd_saved) {
        const RowBytes bytes = storage_row_bytes(graph, s, 1);
        // Sized at one row per token where it depends on rows: the smallest real load.
        const int64_t elements = bytes.at(graph.tokens) / job.element_bytes;
        const bool moves = elements >= job.offload.min_tensor_elements;
        if (moves && !graph.units[graph.storages[s].unit].pinned) settings.offloaded[s] = 1;
      }
    }
  }
  return settings;
}

LayerProfile profile_layer(const Graph& graph, const WalkSettings& settings) {
  Walk walk(graph, settings, -1);
  walk.run();
  return walk.take();
}

WalkMoment moment_of(const Graph& graph, const WalkSettings& settings, int step) {
  Walk walk(graph, settings, step);
  walk.run();
  return walk.moment();
}

}  // namespace bagualu
