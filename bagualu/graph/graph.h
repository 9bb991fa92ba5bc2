// The operator graph of one micro-batch on one rank: what is computed, which bytes exist, who reads
// them. It knows nothing of hardware, time or policy.
//
// Glossary
//   storage   one allocation. Saved (some backward reads it), transient or gradient.
//   op        one operator, with its forward and its backward.
//   unit      the storages that one op leaves for backward and that share one fate; a residency
//             (save, recompute, offload, ...) is chosen per unit.
//   T, R, P   tokens of the micro-batch on this rank; rows this rank's experts receive in a layer;
//             rows of the largest expert piece of that layer (graph/pieces.h).
// Invariants
//   ops are listed in forward order; backward runs in reverse. A storage is created by one forward
//   op (or one backward op, if it is a gradient) and is freed after its last reader.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bagualu {

/// Allocation granularity of the device arena; every storage is charged rounded up to it.
inline constexpr int64_t kAllocationGranularity = 64;

/// Routed load of one layer, known after its gate has run.
/// Units: rows received by this rank's experts; rows of the largest piece.
struct LayerLoad {
  int64_t rows = 0;
  int64_t piece_rows = 0;
  bool operator==(const LayerLoad&) const = default;
};

/// Bytes of one allocation as an integer affine function of (T, R, P).
struct ByteFormula {
  int64_t fixed = 0;
  int64_t per_token = 0;
  int64_t per_row = 0;
  int64_t per_piece_row = 0;

  /// Returns: bytes charged by the arena, rounded up to kAllocationGranularity.
  int64_t eval(int64_t tokens, const LayerLoad& load) const {
    const int64_t exact =
        fixed + per_token * tokens + per_row * load.rows + per_piece_row * load.piece_rows;
    return (exact + kAllocationGranularity - 1) & -kAllocationGranularity;  // a power of two
  }
  bool operator==(const ByteFormula&) const = default;
};

/// Scratch that lives only inside one forward or backward. The peak is the largest phase; the
/// buffers of a phase are alive together. `hidden_bytes` is scratch inside ATen's kernels that no
/// formula gives (attention), measured by `bagualu profile` and added to every phase.
struct Workspace {
  std::vector<std::vector<ByteFormula>> phases;
  int64_t hidden_bytes = 0;

  int64_t eval(int64_t tokens, const LayerLoad& load) const;
};

enum class OpKind : uint8_t {
  kEmbedding,
  kAttnNorm,
  kQkv,
  kQkNorm,
  kCoreAttn,
  kAttnProj,
  kMlpNorm,
  kRouter,
  kDispatchPack,
  kDispatch,
  kDispatchUnpack,
  kExperts,
  kCombine,
  kCombineUnpack,
  kSharedFc1,
  kSharedAct,
  kSharedFc2,
  kMlpFc1,
  kMlpAct,
  kMlpFc2,
  kFinalNorm,
  kLmHead,  ///< head and cross entropy: logits are its scratch, log-probabilities its output
  // Ends of a pipeline stage: forward receives or sends the residual stream, backward its gradient
  // the other way.
  kStageRecv,
  kStageSend,
  // Of the megatron profile only (graph/megatron_moe.h); its lm_head makes the logits alone.
  kQDown,
  kQNorm,
  kQUp,
  kKvDown,
  kKvNorm,
  kKvUp,
  kKNorm,
  kQRope,
  kKRope,
  kAttnBda,
  kExpertFc1,
  kMoeAct,
  kExpertFc2,
  kMlpBda,
  kLoss,
  kCast,     ///< copy of a token storage at another precision
  kRowCast,  ///< copy of a row storage at another precision
};

enum class Stream : uint8_t { kCompute, kComm };

enum class StorageKind : uint8_t {
  kActivation,  ///< created by a forward op
  kGradient,    ///< created by a backward op
};

/// How a unit may be rebuilt when its bytes were given up.
enum class Rebuild : uint8_t {
  kNever,     ///< behind a collective or routing: kept or offloaded, never recomputed
  kOp,        ///< run the producer again, and first the producers of what it reads unsaved
  kInPieces,  ///< expert intermediates: rebuilt piece by piece inside the backward, and never
              ///< materialised in the forward
};

/// Where a storage's values come from.
/// Note [Provenance]: bytes are freed once per storage. Views (q, k, v inside qkv; gate and up
/// inside expert_fc1) are never storages of their own, so that they cannot be counted or offloaded
/// twice. `derived_from` names the storage that can restore this one by a cheap op (a cast, a
/// gather by the pinned row map); -1 where there is none. Twins of one value (fp32 and its bf16 copy)
/// are two storages: giving up one frees its own bytes only, and only the origin restores the other.
struct StorageSpec {
  std::string name;  ///< "layer2.expert_fc1.out"
  StorageKind kind = StorageKind::kActivation;
  int layer = -1;  ///< -1: embedding, head
  ByteFormula bytes;
  int producer = -1;  ///< op
  int unit = -1;      ///< -1: not saved for backward
  int derived_from = -1;
  ByteFormula piece_bytes;  ///< Rebuild::kInPieces: the piece buffer that stands in when dropped
  /// Element size of values that an encoding may round; 0 = exact under every residency (indices,
  /// gate weights, statistics of a norm or a softmax), also when the rest of the unit is encoded.
  int64_t lossy_element_bytes = 0;
  /// A view of a parameter or of a persistent buffer: its bytes belong to static memory and are 0
  /// here. Its unit is pinned, since giving it up would free nothing or break the parameter.
  bool persistent = false;
  /// A gradient that outlives its backward only because the weight gradient that reads it comes
  /// later; without deferral it is never created.
  bool deferred_only = false;
};

struct UnitSpec {
  std::string name;  ///< Megatron operator name: "layer2.expert_fc1", "layer0.qkv", "loss"
  int layer = -1;
  int producer = -1;  ///< op
  Rebuild rebuild = Rebuild::kOp;
  bool pinned = false;  ///< routing results: always resident
  std::vector<int> storages;
};

struct OpSpec {
  OpKind kind{};
  std::string name;  ///< "layer2.core_attn"
  int layer = -1;
  Stream stream = Stream::kCompute;
  std::vector<int> reads;        ///< storages the forward reads
  std::vector<int> creates;      ///< storages the forward creates
  std::vector<int> bwd_saved;    ///< saved storages the backward reads
  std::vector<int> bwd_reads;    ///< gradient storages the backward reads or updates in place
  std::vector<int> bwd_creates;  ///< gradient storages the backward creates
  Workspace fwd_workspace;
  Workspace bwd_workspace;
  bool has_backward = true;

  /// Note [Split backward]: an operator with weights may run its backward in two parts. The whole
  /// backward (kBackward) computes both gradients and is what everything above describes. Split,
  /// the input gradient (kInputGrad) reads and creates the same and also creates those storages of
  /// bwd_creates that are `deferred_only`; the weight gradient (kWeightGrad) comes any time later
  /// and reads the two lists below. Both give the same bits.
  bool has_wgrad = false;
  std::vector<int> wgrad_saved;  ///< saved storages the weight gradient reads, kept until then
  std::vector<int> wgrad_reads;  ///< gradient storages it reads, kept until then
  Workspace input_grad_workspace;
  Workspace wgrad_workspace;
};

/// Position of the decision: after ops[op] (the router) has run and the counts are known.
struct GateSpec {
  int layer = -1;
  int op = -1;
};

struct Graph {
  int64_t tokens = 0;
  int layers = 0;
  /// Of a pipeline stage: number in the model of the layer that is 0 here. Names of ops, units and
  /// storages have the model's numbers; `layer` members and the vectors of loads count from 0.
  int first_layer = 0;
  std::vector<StorageSpec> storages;
  std::vector<UnitSpec> units;
  std::vector<OpSpec> ops;
  std::vector<GateSpec> gates;

  // Derived by finalize(), indexed by storage.
  std::vector<int> last_forward_read;   ///< op index; producer if never read in forward
  std::vector<int> last_backward_read;  ///< op index (smallest, backward runs downwards), weight
                                        ///< gradients at their op; -1 none

  /// Fills the derived members and checks the invariants of this file.
  /// Throws: InternalError naming the op or storage that breaks one.
  void finalize();

  /// Returns: index of the unit or op named so, or -1.
  int find_unit(std::string_view name) const;
  int find_op(std::string_view name) const;
  int find_storage(std::string_view name) const;

  /// Bytes of every storage at these loads (one entry per layer; dense layers ignored).
  std::vector<int64_t> storage_bytes(const std::vector<LayerLoad>& loads) const;
  /// Bytes of a unit's storages at the load of its layer.
  int64_t unit_bytes(int unit, const LayerLoad& load) const;
  const LayerLoad& load_of(int layer, const std::vector<LayerLoad>& loads) const;
};

std::string_view op_kind_name(OpKind kind);

}  // namespace bagualu
