#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bagualu/graph/graph.h"

namespace bagualu {

/// Bytes of one element of the megatron profile's activations (bf16).
inline constexpr int64_t kMegatronElementBytes = 2;

/// An operator with what its forward reads and makes and what its backward reads of the saved.
struct MegatronStep {
  OpKind kind{};
  std::vector<int> reads = {};
  std::vector<int> creates = {};
  std::vector<int> bwd_saved = {};
  Stream stream = Stream::kCompute;
  std::string name = {};        ///< the kind's name if empty
  std::vector<int> holds = {};  ///< not read, but alive until here (a caller's variables)
  bool writes_parts = false;    ///< its gradients are parts of what it read: nothing is summed
  std::vector<ByteFormula> fwd_scratch = {};
  std::vector<ByteFormula> bwd_scratch = {};
  bool weights = false;  ///< a GEMM with weights, whose backward may be split
};

/// Writes operators, storages and gradients of the megatron profile's graph; knows its conventions
/// but no transformer. Every saved storage is a unit of its own.
class MegatronWriter {
 public:
  /// `summed_gradients`: a gradient that is added to one that exists takes bytes of its own first.
  /// `split_weight_grads`: steps with weights split their backward.
  MegatronWriter(int64_t tokens, int64_t layers, bool summed_gradients = false,
                 bool split_weight_grads = false);

  /// From here on storages and ops belong to this layer of the stage (-1: embedding, head), named
  /// by its number in the model.
  void enter_layer(int layer, int64_t number);

  /// An activation that no backward reads.
  int unsaved(std::string_view name, ByteFormula bytes);
  /// An activation kept for backward, alone in a unit of its own name.
  int saved(std::string_view name, ByteFormula bytes, Rebuild rebuild = Rebuild::kOp);
  /// Saved, and never rounded: gate weights.
  int exact(std::string_view name, ByteFormula bytes, Rebuild rebuild = Rebuild::kOp);
  /// Saved, never rounded, and without a gradient: statistics, maps.
  int constant(std::string_view name, ByteFormula bytes, Rebuild rebuild = Rebuild::kOp);
  /// Returns: the same storage, its unit pinned.
  int pin(int storage);

  void never_rebuild(int storage) {
    graph_.units[graph_.storages[storage].unit].rebuild = Rebuild::kNever;
  }

  /// The FP8 copy of a bf16 storage and the cast that makes it; gradients go past it to the
  /// original.
  int twin(int original, const std::string& name, ByteFormula bytes);

  void add(MegatronStep step);
  /// The op added last is a router: its layer's counts are known behind it.
  void gate();

  StorageSpec& storage(int id) { return graph_.storages[id]; }

  /// Adds the gradients and finalizes.
  Graph take();

 private:
  void add_gradients();
  void split_backwards();
  void pass_gradients(OpSpec& op, size_t index);
  int gradient(int of);

  Graph graph_;
  bool summed_gradients_ = false;
  bool split_weight_grads_ = false;
  int layer_ = -1;
  std::string prefix_;
  std::vector<size_t> held_;         ///< by op: reads at the end of its list that it only holds
  std::vector<uint8_t> parts_;       ///< by op: MegatronStep::writes_parts
  std::vector<uint8_t> weights_;     ///< by op: MegatronStep::weights
  std::vector<int> differentiates_;  ///< by storage: itself, a twin's original, or -1
  std::vector<int> gradient_of_;     ///< by storage; -1: none yet
};

}  // namespace bagualu
