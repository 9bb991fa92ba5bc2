// Operators of one layer of a job on one rank, as work: arithmetic, memory traffic, bytes sent.
// Shapes follow the job's layout; nothing here knows a machine.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "bagualu/model/job.h"

namespace bagualu {

/// What an operator's time follows; each has its efficiency in a SystemSpec.
enum class JobOpClass : uint8_t {
  kGemm,
  kGroupedGemm,  ///< the experts' GEMMs
  kAttention,    ///< fused core attention
  kMemory,       ///< norms, activations, permutations, casts: memory traffic alone
  kTpExchange,
  kCpExchange,
  kEpExchange,
};
inline constexpr int kJobOpClasses = 7;
std::string_view job_op_class_name(JobOpClass kind);

/// Work of one of an operator's three passes.
struct JobWork {
  double flops = 0;
  double memory_bytes = 0;
  double wire_bytes = 0;         ///< received by a rank and waited for
  double hidden_wire_bytes = 0;  ///< received beside this pass's own arithmetic
  int collectives = 0;           ///< in the two above
};

struct JobOp {
  std::string_view name;  ///< Megatron's
  JobOpClass kind = JobOpClass::kMemory;
  JobWork forward = {}, input_gradient = {}, weight_gradient = {};
  JobOpClass wire = JobOpClass::kTpExchange;  ///< whose links the wire bytes take
  /// Of a GEMM: [rows, in] times [in, out], in `copies` matrices that share the rows.
  double rows = 0, in = 0, out = 0, copies = 1;
  /// Of the forward, without what causality masks: what MFU counts.
  double model_flops = 0;
  double weights = 0;          ///< elements on this rank
  double saved_bytes = 0;      ///< of inputs that the backward reads; a tensor counts once
  int kernels = 1;             ///< launched in the forward; twice as many in the backward
  bool expert = false;         ///< weights belong to the expert group
  bool with_exchange = false;  ///< runs beside the rows' exchange (--moe-shared-expert-overlap)
};

/// A layer's operators in order; a fixed array, since a search prices many thousand layers.
class JobOpList {
 public:
  void push(const JobOp& op) { ops_[static_cast<size_t>(count_++)] = op; }
  const JobOp* begin() const { return ops_.data(); }
  const JobOp* end() const { return ops_.data() + count_; }
  JobOp& back() { return ops_[static_cast<size_t>(count_ - 1)]; }
  int size() const { return count_; }
  /// Marks the operators from `first` on.
  void set_with_exchange(int first, bool on) {
    for (int i = first; i < count_; ++i) ops_[static_cast<size_t>(i)].with_exchange = on;
  }

 private:
  std::array<JobOp, 48> ops_;
  int count_ = 0;
};

struct JobLayerKind {
  bool moe = false;
  bool windowed = false;  ///< attends to ModelSpec::attention_window tokens
  bool operator==(const JobLayerKind&) const = default;
};
JobLayerKind layer_kind(const ModelSpec& model, int64_t layer);

/// Rows of a rank's experts over the balanced rows after capacity and padding.
double effective_factor(const Job& job, double factor);

/// One transformer layer; `factor` is the routed load of its experts over the balanced one.
/// Requires: job passed validate().
JobOpList layer_ops(const Job& job, JobLayerKind kind, double factor);
JobOpList embedding_ops(const Job& job);
/// Final norm, output layer and loss; also behind every multi-token prediction layer.
JobOpList head_ops(const Job& job);
/// What a multi-token prediction layer has beside a layer and a head: two norms, the projection of
/// hidden state and embedding.
JobOpList mtp_ops(const Job& job);

}  // namespace bagualu
