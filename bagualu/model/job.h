// A training job as its launch script states it: model, parallel sizes, stages, batch, and what the
// framework was told about memory. Plain data; nothing here knows time or policy.
//
// Glossary
//   virtual stage  one slice of the model; a pipeline rank holds vpp of them (two in V-shaped
//                  orders). Listed in the model's order: number 0 has the embedding.
//   dp             ranks that hold the same dense parameters; edp: the same experts.
// Invariants
//   A Job that passed validate() divides: world_size = tp * cp * pp * dp and ep * etp divides
//   tp * cp * dp, every layer lies on one stage, in order.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/model/model_spec.h"

namespace bagualu {

/// Ranks of each dimension, Megatron's names and order (tp-cp-ep-dp-pp).
struct JobLayout {
  int64_t world_size = 1;
  int64_t tp = 1;                  ///< tensor parallel, of everything but the experts
  int64_t cp = 1;                  ///< context parallel: a sequence is split over cp ranks
  int64_t pp = 1;                  ///< pipeline ranks
  int64_t vpp = 1;                 ///< virtual stages of a pipeline rank
  int64_t ep = 1;                  ///< ranks that share one copy of the experts
  int64_t etp = 1;                 ///< tensor parallel of each expert
  bool sequence_parallel = false;  ///< with tp: norms and residuals are split along the sequence

  int64_t dp() const { return world_size / (tp * cp * pp); }
  int64_t expert_dp() const { return world_size / (pp * ep * etp); }
  bool operator==(const JobLayout&) const = default;
};

/// What one virtual stage holds.
struct StageContent {
  int64_t first_layer = 0;
  int64_t layer_count = 0;
  int64_t mtp_layers = 0;
  bool embedding = false;
  bool head = false;  ///< final norm, output layer and loss
  bool operator==(const StageContent&) const = default;
};

/// Order of passes of the pipeline (schedule/pipeline.h generates them).
enum class PipelineKind : uint8_t {
  k1F1B,
  kInterleaved,
  kZbH1,
  kZbH2,
  kZbV,
  kVHalf,
  kDualPipe,
  kDualPipeV,
};
/// "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe", "dualpipe-v".
std::string_view pipeline_kind_name(PipelineKind kind);
PipelineKind parse_pipeline_kind(std::string_view text, const std::string& where,
                                 const std::string& field);
/// True where rank r holds virtual stages r and 2 * pp - 1 - r.
bool is_v_shaped(PipelineKind kind);
/// Virtual stages of a rank: two in the V shapes, whatever vpp says.
int64_t virtual_stages_per_rank(PipelineKind kind, int64_t vpp);
/// Rank that holds a virtual stage (DualPipe: of the first of its two copies of the model).
int64_t rank_of_stage(PipelineKind kind, int64_t pp, int64_t stage);

/// Bytes of one parameter, by what they are for.
struct OptimizerSettings {
  std::string name = "adam";  ///< "adam" or "sgd" (no moments)
  /// Masters and moments are split over the data-parallel group (--use-distributed-optimizer).
  bool distributed = false;
  int64_t parameter_bytes = 2;  ///< of the model's own copy
  int64_t gradient_bytes = 4;   ///< of the accumulation buffer; 2 with --grad-reduce-in-bf16
  int64_t master_bytes = 4;     ///< 0: parameters are their own masters (fp32 training)
  int64_t exp_avg_bytes = 4;    ///< 1 or 2 with --exp-avg-dtype fp8, bf16
  int64_t exp_avg_sq_bytes = 4;
  /// Bytes of gradient held beside the buffer for the masters' step: 4 where the optimizer casts
  /// bf16 gradients, 0 where it reads the buffer (fp32 buffers).
  int64_t main_gradient_bytes = 0;
  /// --num-distributed-optimizer-instances: masters and moments are split over dp / instances.
  int64_t instances = 1;
  bool operator==(const OptimizerSettings&) const = default;
};

enum class RecomputeGranularity : uint8_t { kNone, kSelective, kFull };

/// --recompute-granularity, -method, -num-layers, -modules.
struct RecomputeSettings {
  RecomputeGranularity granularity = RecomputeGranularity::kNone;
  bool block = false;  ///< full: the first `layers` of a virtual stage; else groups of `layers`
  int64_t layers = 1;  ///< full only
  std::vector<std::string> modules;  ///< selective: core_attn, moe_act, layernorm, mla_up_proj, ...
  /// full: the boundaries' inputs are split over tp (--distribute-saved-activations)
  bool distribute_saved = false;
  bool operator==(const RecomputeSettings&) const = default;
};

/// --fine-grained-activation-offloading, --offload-modules, --activation-offload-fraction and the
/// smallest tensor that is moved.
struct OffloadSettings {
  std::vector<std::string> modules;
  double fraction = 1.0;  ///< of the groups (one group: one module of one layer)
  int64_t min_tensor_elements = int64_t{1} << 20;
  bool operator==(const OffloadSettings&) const = default;
};

struct MoeSettings {
  std::string dispatcher = "alltoall";  ///< "allgather", "alltoall", "flex"
  std::string flex_backend = "deepep";  ///< of "flex": "deepep", "hybridep", "ncclep"
  double capacity_factor = 0;           ///< 0: dropless
  bool pad_to_capacity = false;         ///< --moe-pad-expert-input-to-capacity
  bool permute_fusion = false;
  /// Gate weights multiply the expert's activation and travel with the rows, so that combine saves
  /// nothing (Megatron's fused weighted activation, from 0.13 on).
  bool probs_in_activation = true;
  int64_t router_bytes = 2;  ///< of a probability; 4 with --moe-router-dtype fp32
  int64_t row_multiple = 1;  ///< rows of an expert are padded to it (FP8: 16, MXFP8: 32)
  bool operator==(const MoeSettings&) const = default;
};

/// Communication that the framework was told to run beside compute.
struct OverlapSettings {
  bool tp = false;             ///< --tp-comm-overlap: collectives beside the GEMM they feed
  bool p2p = true;             ///< interleaved only; off: --no-overlap-p2p-communication
  bool expert = false;         ///< --overlap-moe-expert-parallel-comm
  bool shared_expert = false;  ///< --moe-shared-expert-overlap: beside the exchange of rows
  bool operator==(const OverlapSettings&) const = default;
};

/// --cp-comm-type: keys and values go round a ring, heads are exchanged, or keys and values are
/// gathered.
enum class CpExchange : uint8_t { kRing, kAllToAll, kAllGather };

enum class CrossEntropy : uint8_t {
  kUnfused,      ///< Megatron's vocab-parallel cross entropy
  kFusedNative,  ///< --cross-entropy-loss-fusion with the native implementation
  kFusedTe,      ///< the same with Transformer Engine's
};

/// What stands between the bytes of tensors and the bytes of the device.
struct AllocatorSettings {
  int64_t rounding_bytes = 512;     ///< PyTorch's CUDA caching allocator rounds each tensor up
  int64_t communication_bytes = 0;  ///< of NCCL and others, outside the allocator's count
  double reserve_fraction = 0;      ///< of the peak, held by the allocator and not used
  /// Workspaces of the GEMM libraries, inside the allocator's count: Transformer Engine's one (and
  /// four more where grouped GEMMs run), PyTorch's one per thread that multiplies (forward's and
  /// backward's). Defaults: compute capability 9 and up, and PyTorch's outside Hopper (there 32
  /// MiB).
  int64_t engine_workspace_bytes = int64_t{32} << 20;
  int64_t blas_workspace_bytes = (int64_t{8} << 20) + (int64_t{128} << 10);
  /// With accumulation fusion, autograd is handed one stand-in gradient per shape of weight, which
  /// Transformer Engine (2.0 and later) keeps for good.
  bool weight_grad_stand_ins = true;
  /// Transformer Engine multiplies in the layers; else Megatron's own linear layers do, with
  /// PyTorch's GEMMs, one buffer for gathered inputs, and no stand-ins.
  bool engine_gemms = true;
  /// PYTORCH_CUDA_ALLOC_CONF max_split_size_mb: larger blocks serve smaller tensors whole if the
  /// difference is below 20 MiB, and count in full; 0: every block is split.
  int64_t max_split_bytes = 0;
  bool operator==(const AllocatorSettings&) const = default;
};

struct Job {
  ModelSpec model;
  JobLayout layout;
  std::vector<StageContent> stages;  ///< pp * (virtual stages of a rank), in the model's order
  PipelineKind pipeline = PipelineKind::k1F1B;
  int64_t micro_batch_size = 1;
  int64_t seq = 4096;
  int64_t microbatches = 1;            ///< per step and replica
  int64_t element_bytes = 2;           ///< of activations: bf16 or fp16; 4: fp32
  bool fp8 = false;                    ///< GEMM inputs exist as FP8 copies
  std::string fp8_recipe = "delayed";  ///< with fp8: or "tensorwise", "blockwise", "mxfp8"
  double attention_dropout = 0;        ///< on the softmax; its mask is kept where scores are
  bool attention_unfused = false;      ///< scores and their softmax are kept
  bool activation_fusion = true;       ///< off: a gated activation's factor is kept as well
  bool accumulation_fusion = true;     ///< weight gradients are added to the buffer by the GEMM
  bool overlap_grad_reduce = false;
  bool overlap_param_gather = false;
  OverlapSettings overlap;
  CpExchange cp_exchange = CpExchange::kRing;
  CrossEntropy cross_entropy = CrossEntropy::kUnfused;
  int64_t vocab_multiple = 128;  ///< rows of the embedding are a multiple of it times tp
  OptimizerSettings optimizer;
  RecomputeSettings recompute;
  OffloadSettings offload;
  MoeSettings moe;
  AllocatorSettings allocator;

  /// Tokens of a micro-batch on a rank of the attention, and on one of the sequence-parallel parts.
  int64_t tokens() const { return micro_batch_size * seq / layout.cp; }
  int64_t sequence_tokens() const {
    return layout.sequence_parallel ? tokens() / layout.tp : tokens();
  }
  /// Rows that the experts of one rank receive if the router is balanced: copies of this rank's
  /// tokens, those of the etp group gathered.
  int64_t balanced_rows() const {
    return micro_batch_size * seq / (layout.cp * layout.tp) * model.top_k * layout.etp;
  }
  int64_t padded_vocab() const;
  int64_t stages_per_rank() const { return static_cast<int64_t>(stages.size()) / layout.pp; }
  /// Pipeline rank of a virtual stage, and the virtual stages of a rank in the model's order.
  int64_t rank_of_stage(int64_t stage) const {
    return bagualu::rank_of_stage(pipeline, layout.pp, stage);
  }
  std::vector<int64_t> stages_of_rank(int64_t pp_rank) const;
  bool operator==(const Job&) const = default;
};

/// "tp=2,pp=4,vpp=1,ep=8,etp=1,cp=1,dp=8": every key at most once, absent ones 1; with tp > 1 and
/// no sp=0 the sequence is split too.
/// Throws: InvalidInput(where, field).
JobLayout parse_layout(std::string_view text, const std::string& where, const std::string& field);
std::string layout_text(const JobLayout& layout);

/// Layers spread over pp * per_rank virtual stages; where they do not divide, the first and the
/// last are lighter, since they have the embedding and the head beside them.
std::vector<StageContent> default_stages(const ModelSpec& model, int64_t pp, int64_t per_rank);

/// "Et*3|(tt|)*29m|L" (Megatron's --pipeline-model-parallel-layout): E embedding, t layer, m
/// multi-token prediction layer, L loss; x*n and (...)*n repeat; | ends a virtual stage.
/// Throws: InvalidInput(where, field) if the counts do not fit the model or the stages.
std::vector<StageContent> parse_stages(std::string_view text, const ModelSpec& model,
                                       int64_t stages, const std::string& where,
                                       const std::string& field);
std::string stages_text(const std::vector<StageContent>& stages);
/// Virtual stages that such a text describes.
int64_t count_stages(std::string_view text, const std::string& where, const std::string& field);

/// What RecomputeSettings::modules and OffloadSettings::modules may name; offload also "all": every
/// saved tensor, as Megatron-Kwai's ratio counts them (models without experts, as Megatron-Kwai).
const std::vector<std::string>& recompute_module_names();
const std::vector<std::string>& offload_module_names();

/// Modules of the two lists that this model has.
std::vector<std::string> recompute_modules_of(const ModelSpec& model);
std::vector<std::string> offload_modules_of(const ModelSpec& model);

/// A rule that a job breaks: field, what was found, what is allowed.
struct JobFault {
  std::string field;
  std::string found;
  std::string allowed;
};

/// The first broken rule, those of the model alone aside; none for a job that fits together.
/// Cost: no text is made unless a rule is broken.
std::optional<JobFault> job_fault(const Job& job);

/// Throws InvalidInput(where) naming the field that does not fit the others.
void validate(const Job& job, const std::string& where);

}  // namespace bagualu
