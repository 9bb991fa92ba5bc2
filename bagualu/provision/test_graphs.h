// Hand-made graphs for the tests of provenance, small enough to count bytes by hand.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "bagualu/base/units.h"
#include "bagualu/graph/graph.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// Adds storages, units and operators one by one; producers follow from who creates.
class GraphBuilder {
 public:
  GraphBuilder() { graph.layers = 1; }

  /// `rebuild` is that of a unit of its own named as the storage; without one it is not saved.
  int storage(const std::string& name, int64_t bytes) {
    StorageSpec spec;
    spec.name = name;
    spec.layer = 0;
    spec.bytes.fixed = bytes;
    graph.storages.push_back(spec);
    return static_cast<int>(graph.storages.size()) - 1;
  }
  int saved(const std::string& name, int64_t bytes, Rebuild rebuild, int derived_from = -1) {
    const int id = storage(name, bytes);
    graph.storages.back().derived_from = derived_from;
    graph.storages.back().unit = static_cast<int>(graph.units.size());
    UnitSpec unit;
    unit.name = name;
    unit.layer = 0;
    unit.rebuild = rebuild;
    unit.storages = {id};
    graph.units.push_back(unit);
    return id;
  }
  OpSpec& op(const std::string& name, std::vector<int> reads, std::vector<int> creates,
             std::vector<int> bwd_saved) {
    const int id = static_cast<int>(graph.ops.size());
    for (int s : creates) {
      StorageSpec& spec = graph.storages[static_cast<size_t>(s)];
      spec.producer = id;
      if (spec.unit >= 0) graph.units[static_cast<size_t>(spec.unit)].producer = id;
    }
    OpSpec spec;
    spec.kind = OpKind::kQkv;
    spec.name = name;
    spec.layer = 0;
    spec.reads = std::move(reads);
    spec.creates = std::move(creates);
    spec.bwd_saved = std::move(bwd_saved);
    graph.ops.push_back(std::move(spec));
    return graph.ops.back();
  }

  /// Fills what finalize() derives, without its checks: rules are tested on graphs that break them.
  Graph finish() {
    const size_t count = graph.storages.size();
    graph.last_forward_read.assign(count, -1);
    graph.last_backward_read.assign(count, -1);
    for (int i = 0; i < static_cast<int>(graph.ops.size()); ++i) {
      const OpSpec& op = graph.ops[static_cast<size_t>(i)];
      for (const auto* list : {&op.creates, &op.reads}) {
        for (int s : *list) graph.last_forward_read[static_cast<size_t>(s)] = i;
      }
      for (int s : op.bwd_saved) {
        int& last = graph.last_backward_read[static_cast<size_t>(s)];
        if (last < 0) last = i;
      }
    }
    return graph;
  }

  Graph graph;
};

/// Layers of operators that read each other's outputs; some outputs are not kept for backward, some
/// operators have two, some units are pinned or never rebuilt.
inline Graph random_graph(std::mt19937& random) {
  const auto chance = [&random](unsigned percent) { return random() % 100 < percent; };
  GraphBuilder b;
  b.graph.layers = 2;
  for (int layer = 0; layer < 2; ++layer) {
    for (unsigned n = 3 + random() % 4; n > 0; --n) {
      const std::string id = std::to_string(b.graph.ops.size());
      std::vector<int> reads, kept;
      for (int s = 0; s < static_cast<int>(b.graph.storages.size()); ++s) {
        const StorageSpec& spec = b.graph.storages[static_cast<size_t>(s)];
        // What is not kept is read within its layer only.
        if ((spec.unit >= 0 || spec.layer == layer) && chance(35)) reads.push_back(s);
      }
      std::vector<int> creates;
      for (const char* output : {"a", "b"}) {
        if (output[0] == 'b' && !chance(30)) continue;
        const int64_t bytes = 64 * static_cast<int64_t>(random() % 50);
        if (chance(25)) {
          creates.push_back(b.storage(id + output, bytes));
          b.graph.storages.back().layer = layer;
          continue;
        }
        const bool never = chance(20);
        creates.push_back(b.saved(id + output, bytes, never ? Rebuild::kNever : Rebuild::kOp));
        b.graph.storages.back().layer = b.graph.units.back().layer = layer;
        b.graph.storages.back().lossy_element_bytes = chance(60) ? 2 : 0;
        kept.push_back(creates.back());
      }
      for (int s : reads) {
        if (b.graph.storages[static_cast<size_t>(s)].unit >= 0 && chance(50)) kept.push_back(s);
      }
      OpSpec& op = b.op("op" + id, reads, creates, kept);
      op.layer = layer;
      op.fwd_workspace.phases = {{{.fixed = 64 * static_cast<int64_t>(random() % 20)}}};
      op.bwd_workspace.phases = {{{.fixed = 64 * static_cast<int64_t>(random() % 20)}}};
    }
  }
  return b.finish();
}

/// A residency that every unit allows, at random, and random flags.
inline Plan random_plan(const Graph& graph, std::mt19937& random) {
  Plan plan = uniform_plan(graph, kSave);
  for (size_t u = 0; u < graph.units.size(); ++u) {
    if (graph.units[u].pinned) continue;
    auto choice = static_cast<ResidencyId>(random() % residencies().size());
    if (residencies()[choice].needs_rebuild && graph.units[u].rebuild == Rebuild::kNever) {
      choice = kOffload;
    }
    plan.residency[u] = choice;
  }
  plan.eager_drain = random() % 2 == 0;
  plan.prefetch = random() % 2 == 0;
  return plan;
}

/// A fp32 value x [1024, 1024] of 4 MiB, which nothing rebuilds, and its bf16 copy of 2 MiB; both
/// are read in backward. With `fp8` also its row-wise and column-wise FP8 copies of 1 MiB each.
inline Graph precision_twins(bool fp8 = false) {
  GraphBuilder b;
  const int x = b.saved("x", 4 * kMiB, Rebuild::kNever);
  b.op("input", {}, {x}, {});
  const int bf16 = b.saved("x_bf16", 2 * kMiB, Rebuild::kOp, x);
  b.op("cast", {x}, {bf16}, {});
  std::vector<int> copies = {bf16};
  if (fp8) {
    copies.push_back(b.saved("x_fp8_rows", kMiB, Rebuild::kOp, x));
    b.op("fp8_rows", {x}, {copies.back()}, {});
    copies.push_back(b.saved("x_fp8_columns", kMiB, Rebuild::kOp, x));
    b.op("fp8_columns", {x}, {copies.back()}, {});
  }
  std::vector<int> all = copies;
  all.push_back(x);
  b.op("use", all, {}, all);
  return b.finish();
}

}  // namespace bagualu
