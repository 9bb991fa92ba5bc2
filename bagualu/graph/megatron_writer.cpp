#include "bagualu/graph/megatron_writer.h"

#include <algorithm>

namespace bagualu {

MegatronWriter::MegatronWriter(int64_t tokens, int64_t layers, bool summed_gradients,
                               bool split_weight_grads)
    : summed_gradients_(summed_gradients), split_weight_grads_(split_weight_grads) {
  graph_.tokens = tokens;
  graph_.layers = static_cast<int>(layers);
}

void MegatronWriter::enter_layer(int layer, int64_t number) {
  layer_ = layer;
  prefix_ = layer < 0 ? "" : "layer" + std::to_string(number) + ".";
}

int MegatronWriter::unsaved(std::string_view name, ByteFormula bytes) {
  StorageSpec spec;
  spec.name = prefix_ + std::string(name);
  spec.layer = layer_;
  spec.bytes = bytes;
  graph_.storages.push_back(std::move(spec));
  const int id = static_cast<int>(graph_.storages.size()) - 1;
  differentiates_.push_back(id);
  return id;
}

int MegatronWriter::saved(std::string_view name, ByteFormula bytes, Rebuild rebuild) {
  const int id = unsaved(name, bytes);
  UnitSpec unit;
  unit.name = graph_.storages[id].name;
  unit.layer = layer_;
  unit.rebuild = rebuild;
  unit.storages = {id};
  graph_.storages[id].unit = static_cast<int>(graph_.units.size());
  graph_.storages[id].lossy_element_bytes = kMegatronElementBytes;
  graph_.units.push_back(std::move(unit));
  return id;
}

int MegatronWriter::exact(std::string_view name, ByteFormula bytes, Rebuild rebuild) {
  const int id = saved(name, bytes, rebuild);
  graph_.storages[id].lossy_element_bytes = 0;
  return id;
}

int MegatronWriter::constant(std::string_view name, ByteFormula bytes, Rebuild rebuild) {
  const int id = exact(name, bytes, rebuild);
  differentiates_[id] = -1;
  return id;
}

int MegatronWriter::pin(int storage) {
  graph_.units[graph_.storages[storage].unit].pinned = true;
  return storage;
}

void MegatronWriter::add(MegatronStep step) {
  OpSpec op;
  op.kind = step.kind;
  op.name = prefix_ + (step.name.empty() ? std::string(op_kind_name(step.kind)) : step.name);
  op.layer = layer_;
  op.stream = step.stream;
  op.reads = std::move(step.reads);
  op.reads.insert(op.reads.end(), step.holds.begin(), step.holds.end());
  held_.push_back(step.holds.size());
  parts_.push_back(step.writes_parts);
  weights_.push_back(step.weights);
  if (!step.fwd_scratch.empty()) op.fwd_workspace.phases.push_back(std::move(step.fwd_scratch));
  if (!step.bwd_scratch.empty()) op.bwd_workspace.phases.push_back(std::move(step.bwd_scratch));
  op.creates = std::move(step.creates);
  op.bwd_saved = std::move(step.bwd_saved);
  graph_.ops.push_back(std::move(op));
}

void MegatronWriter::gate() {
  graph_.gates.push_back({layer_, static_cast<int>(graph_.ops.size()) - 1});
}

int MegatronWriter::twin(int original, const std::string& name, ByteFormula bytes) {
  const int copy = exact(name + "_fp8", bytes);
  graph_.storages[copy].derived_from = original;
  differentiates_[copy] = original;
  add({.kind = bytes.per_row > 0 ? OpKind::kRowCast : OpKind::kCast,
       .reads = {original},
       .creates = {copy},
       .name = name + ".cast"});
  graph_.ops.back().has_backward = false;
  return copy;
}

Graph MegatronWriter::take() {
  add_gradients();
  if (split_weight_grads_) split_backwards();
  graph_.finalize();
  return std::move(graph_);
}

namespace {

void add_scratch(Workspace& workspace, ByteFormula bytes) {
  if (workspace.phases.empty()) workspace.phases.emplace_back();
  workspace.phases.back().push_back(bytes);
}

}  // namespace

// Backward reads the gradients of what an op created and creates those of what it read, or adds
// to them if a later reader's backward has created them.
void MegatronWriter::add_gradients() {
  gradient_of_.assign(graph_.storages.size(), -1);
  for (auto op = graph_.ops.rbegin(); op != graph_.ops.rend(); ++op) {
    if (!op->has_backward) continue;
    if (op->kind == OpKind::kStageSend) {  // receives the gradient from the stage behind
      op->bwd_creates = {gradient(op->reads.front())};
      continue;
    }
    for (int s : op->creates) {
      if (differentiates_[s] == s && gradient_of_[s] >= 0) {
        op->bwd_reads.push_back(gradient_of_[s]);
      }
    }
    pass_gradients(*op, static_cast<size_t>(&*op - graph_.ops.data()));
  }
}

void MegatronWriter::pass_gradients(OpSpec& op, size_t index) {
  // A sum hands its gradient on: one tensor is the gradient of the residual stream throughout.
  const bool sum = op.kind == OpKind::kAttnBda || op.kind == OpKind::kMlpBda;
  const bool summed = summed_gradients_ && parts_[index] == 0 && !sum;
  for (size_t i = 0; i + held_[index] < op.reads.size(); ++i) {
    const int target = differentiates_[op.reads[i]];
    if (target < 0) continue;
    if (gradient_of_[target] >= 0) {
      op.bwd_reads.push_back(gradient_of_[target]);
      if (summed) add_scratch(op.bwd_workspace, graph_.storages[target].bytes);
    } else if (sum) {
      gradient_of_[target] = gradient_of_[op.creates.front()];
    } else {
      op.bwd_creates.push_back(gradient(target));
    }
  }
}

// A weight gradient reads the operator's inputs and its outputs' gradients. Where one of those is
// the residual stream's, which operators further down add to, it reads a copy.
void MegatronWriter::split_backwards() {
  const auto read_below = [this](size_t op, int gradient) {
    return std::any_of(graph_.ops.begin(), graph_.ops.begin() + static_cast<std::ptrdiff_t>(op),
                       [gradient](const OpSpec& other) {
                         const auto& reads = other.bwd_reads;
                         return std::find(reads.begin(), reads.end(), gradient) != reads.end();
                       });
  };
  for (size_t i = 0; i < graph_.ops.size(); ++i) {
    if (weights_[i] == 0 || !graph_.ops[i].has_backward) continue;
    std::vector<int> read;
    for (int s : graph_.ops[i].creates) {
      if (differentiates_[s] != s || gradient_of_[s] < 0) continue;
      int made = gradient_of_[s];
      if (read_below(i, made)) {
        made = gradient(s);
        graph_.storages[made].deferred_only = true;
        graph_.storages[made].name += "_kept";
        graph_.ops[i].bwd_creates.push_back(made);
      }
      read.push_back(made);
    }
    OpSpec& op = graph_.ops[i];
    op.has_wgrad = true;
    op.wgrad_saved = op.bwd_saved;
    op.wgrad_reads = std::move(read);
    op.input_grad_workspace = op.wgrad_workspace = op.bwd_workspace;
  }
}

int MegatronWriter::gradient(int of) {
  StorageSpec spec;
  const StorageSpec& source = graph_.storages[of];
  spec.name = source.name;
  spec.name.insert(source.layer < 0 ? 0 : source.name.find('.') + 1, "d_");
  spec.kind = StorageKind::kGradient;
  spec.layer = source.layer;
  spec.bytes = source.bytes;
  graph_.storages.push_back(std::move(spec));
  gradient_of_[of] = static_cast<int>(graph_.storages.size()) - 1;
  return gradient_of_[of];
}

}  // namespace bagualu
