// A slow second opinion on a timeline, for tests: holds every storage by itself, checks that each
// action finds what it needs, and adds bytes up from the graph's formulas at every step. Shares no
// code with replay.cpp or timeline.cpp.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "bagualu/schedule/timeline.h"

namespace bagualu {

class ReferenceWalk {
 public:
  ReferenceWalk(const Graph& graph, const std::vector<LayerLoad>& loads)
      : graph_(graph), loads_(loads) {}

  int64_t live() const {
    int64_t sum = 0;
    for (int s : device_) sum += full(s);
    for (int s : encoded_) sum += code(s);
    return sum;
  }
  int64_t host_live() const {
    int64_t sum = 0;
    for (int s : host_) sum += full(s);
    return sum;
  }
  int64_t peak() const { return peak_; }
  int64_t host_peak() const { return host_peak_; }
  /// Times a saved storage's bytes were given back for good, by storage.
  const std::map<int, int>& frees() const { return frees_; }

  void step(const Plan& plan, const Action& action) {
    const int id = action.id;
    switch (action.kind) {
      case ActionKind::kForward:
        return forward(plan, graph_.ops[id]);
      case ActionKind::kBackward:
        return backward(plan, graph_.ops[id], graph_.ops[id].bwd_workspace, false);
      case ActionKind::kInputGrad:
        return backward(plan, graph_.ops[id], graph_.ops[id].input_grad_workspace, true);
      case ActionKind::kWeightGrad:
        expect_usable(graph_.ops[id].wgrad_saved, graph_.ops[id].name);
        expect_usable(graph_.ops[id].wgrad_reads, graph_.ops[id].name);
        return note(scratch(graph_.ops[id].wgrad_workspace, graph_.ops[id].layer));
      case ActionKind::kForwardEnd:
      case ActionKind::kBackwardEnd:
        EXPECT_EQ(issued_.erase(id), 1u) << graph_.ops[id].name;
        return;
      case ActionKind::kRecompute:
        return recompute(graph_.ops[id]);
      case ActionKind::kFree:
        ++frees_[id];
        EXPECT_FALSE(copying_.count(id)) << name(id);
        return take(id);
      case ActionKind::kDrop:
        dropped_.insert(id);
        return take(id);
      case ActionKind::kOffload:
        EXPECT_TRUE(device_.count(id) && host_.insert(id).second) << name(id);
        copying_.insert(id);
        host_peak_ = std::max(host_peak_, host_live());
        return;
      case ActionKind::kDrain:
        EXPECT_EQ(copying_.erase(id), 1u) << name(id);
        return take(id);
      case ActionKind::kReload:
        EXPECT_TRUE(host_.count(id) && !copying_.count(id)) << name(id);
        copying_.insert(id);
        return make(id, 0);
      case ActionKind::kAwait:
        EXPECT_EQ(copying_.erase(id), 1u) << name(id);
        EXPECT_EQ(host_.erase(id), 1u) << name(id);
        return;
      case ActionKind::kEncode:
        EXPECT_GT(graph_.storages[id].lossy_element_bytes, 0) << name(id);
        EXPECT_TRUE(encoded_.insert(id).second) << name(id);
        note(0);
        return take(id);
      case ActionKind::kDecode:
        make(id, 0);
        EXPECT_EQ(encoded_.erase(id), 1u) << name(id);
        return;
      case ActionKind::kGate:
        return;
    }
  }

 private:
  static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

  const std::string& name(int s) const { return graph_.storages[s].name; }

  LayerLoad load(int layer) const { return layer < 0 ? LayerLoad{} : loads_[layer]; }

  int64_t amount(const ByteFormula& f, int layer) const {
    return aligned(f.fixed + f.per_token * graph_.tokens + f.per_row * load(layer).rows +
                   f.per_piece_row * load(layer).piece_rows);
  }
  int64_t full(int s) const { return amount(graph_.storages[s].bytes, graph_.storages[s].layer); }
  int64_t piece(int s) const {
    return amount(graph_.storages[s].piece_bytes, graph_.storages[s].layer);
  }
  // One byte per element and four per started block of 128.
  int64_t code(int s) const {
    const int64_t elements = full(s) / graph_.storages[s].lossy_element_bytes;
    return aligned(elements + (elements + 127) / 128 * 4);
  }

  int64_t scratch(const Workspace& workspace, int layer) const {
    int64_t most = 0;
    for (const auto& phase : workspace.phases) {
      int64_t sum = 0;
      for (const ByteFormula& buffer : phase) sum += amount(buffer, layer);
      most = std::max(most, sum);
    }
    return most + workspace.hidden_bytes;
  }

  bool in_pieces(const Plan& plan, int s) const {
    const int unit = graph_.storages[s].unit;
    return unit >= 0 && graph_.units[unit].rebuild == Rebuild::kInPieces &&
           residencies()[plan.residency[unit]].name == "recompute";
  }

  void note(int64_t extra) { peak_ = std::max(peak_, live() + extra); }

  void make(int s, int64_t extra) {
    EXPECT_TRUE(device_.insert(s).second) << name(s) << " is there already";
    note(extra);
  }
  void take(int s) { EXPECT_EQ(device_.erase(s), 1u) << name(s) << " is not there"; }

  void expect_usable(const std::vector<int>& storages, const std::string& op) const {
    for (int s : storages) {
      EXPECT_TRUE(device_.count(s)) << op << " needs " << name(s);
      // A storage on its way to the host may be read, one on its way back may not.
      EXPECT_FALSE(copying_.count(s) && reloading(s)) << op << " did not await " << name(s);
    }
  }
  bool reloading(int s) const { return host_.count(s) && in_backward_; }

  // One communication of a micro-batch at a time; what follows it waits for its end.
  void begin_op(const OpSpec& op) {
    for (int one : issued_) {
      EXPECT_TRUE(is_boundary(graph_.ops[one]))
          << op.name << " does not await " << graph_.ops[one].name;
    }
    if (op.stream == Stream::kComm) issued_.insert(graph_.find_op(op.name));
  }

  static bool is_boundary(const OpSpec& op) {
    return op.kind == OpKind::kStageSend || op.kind == OpKind::kStageRecv;
  }

  void forward(const Plan& plan, const OpSpec& op) {
    begin_op(op);
    expect_usable(op.reads, op.name);
    int64_t extra = scratch(op.fwd_workspace, op.layer);
    for (int s : op.creates) {
      if (in_pieces(plan, s)) {
        extra += piece(s);
        dropped_.insert(s);
      } else {
        make(s, 0);
      }
    }
    note(extra);
  }

  void backward(const Plan& plan, const OpSpec& op, const Workspace& workspace, bool split) {
    begin_op(op);
    in_backward_ = true;
    int64_t extra = scratch(workspace, op.layer);
    std::vector<int> needed = op.bwd_reads;
    for (int s : op.bwd_saved) {
      if (in_pieces(plan, s)) {
        EXPECT_TRUE(dropped_.count(s) && !device_.count(s)) << name(s);
        extra += piece(s);
      } else {
        needed.push_back(s);
      }
    }
    expect_usable(needed, op.name);
    for (int s : op.bwd_creates) {
      if (split || !graph_.storages[s].deferred_only) make(s, 0);
    }
    note(extra);
  }

  void recompute(const OpSpec& op) {
    in_backward_ = true;
    expect_usable(op.reads, op.name);
    EXPECT_EQ(op.stream, Stream::kCompute) << op.name << " repeats a collective";
    // What is made again though it was not given up (kept, or on the host) is thrown away at the
    // end; an intermediate that no backward reads stays until a free action.
    bool useful = false;
    int64_t extra = scratch(op.fwd_workspace, op.layer);
    for (int s : op.creates) {
      const bool intermediate = graph_.storages[s].unit < 0;
      if (dropped_.erase(s) == 1 || (intermediate && !device_.count(s))) {
        make(s, 0);
        useful = true;
      } else {
        extra += full(s);
      }
    }
    EXPECT_TRUE(useful) << op.name << " is run again for nothing";
    note(extra);
  }

  const Graph& graph_;
  const std::vector<LayerLoad>& loads_;
  std::set<int> device_, host_, encoded_, copying_, dropped_;
  std::map<int, int> frees_;
  bool in_backward_ = false;
  std::set<int> issued_;
  int64_t peak_ = 0;
  int64_t host_peak_ = 0;
};

}  // namespace bagualu
