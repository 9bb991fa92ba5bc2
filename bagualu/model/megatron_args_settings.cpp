// Precision, optimizer, what is kept for backward, dispatch and overlap. Source:
// megatron/training/arguments.py (validate_args), megatron/core/transformer/transformer_config.py,
// megatron/core/optimizer/optimizer_config.py and distrib_optimizer.py.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "bagualu/model/megatron_args_parts.h"

namespace bagualu {
namespace {

void read_precision(const MegatronFlags& flags, Job* job) {
  if (flags.on("bf16") && flags.on("fp16")) flags.contradiction("fp16", "not beside --bf16");
  job->element_bytes = flags.on("bf16") || flags.on("fp16") ? 2 : 4;
  const std::string format = flags.choice_or("fp8-format", "", {"e4m3", "hybrid"});
  const std::string recipe = flags.choice_or(
      "fp8-recipe", "delayed", {"delayed", "tensorwise", "blockwise", "mxfp8", "custom"});
  job->fp8 = !format.empty();
  if (job->fp8) {
    if (recipe == "custom") flags.fail("fp8-recipe", recipe, "a recipe that Megatron names");
    job->fp8_recipe = recipe;
  }
  if (flags.on("fp8-param-gather")) {
    if (!job->fp8) flags.contradiction("fp8-param-gather", "only beside --fp8-format");
    if (!flags.on("use-distributed-optimizer")) {
      flags.contradiction("fp8-param-gather", "only beside --use-distributed-optimizer");
    }
  }
}

int64_t bytes_of_dtype(const MegatronFlags& flags, const char* name, bool fp8_too) {
  std::vector<std::string> names = {"fp32", "fp16", "bf16"};
  if (fp8_too) names.push_back("fp8");
  const std::string dtype = flags.choice_or(name, "fp32", names);
  return dtype == "fp32" ? 4 : dtype == "fp8" ? 1 : 2;
}

/// Note [Precision-aware optimizer]
/// Transformer Engine's Adam keeps masters beside bf16 parameters as the 16 bits that those lack,
/// and reads gradients of any type. With an FP8 recipe other than delayed scaling, Megatron keeps
/// fp32 masters itself and casts the gradients, unless the masters are not fp32.
void read_precision_aware(const MegatronFlags& flags, Job* job) {
  OptimizerSettings& optimizer = job->optimizer;
  if (!flags.on("use-distributed-optimizer")) {
    flags.contradiction("use-precision-aware-optimizer", "only beside --use-distributed-optimizer");
  }
  if (optimizer.name != "adam") {
    flags.contradiction("use-precision-aware-optimizer", "only with --optimizer adam");
  }
  const int64_t master = bytes_of_dtype(flags, "main-params-dtype", false);
  optimizer.exp_avg_bytes = bytes_of_dtype(flags, "exp-avg-dtype", true);
  optimizer.exp_avg_sq_bytes = bytes_of_dtype(flags, "exp-avg-sq-dtype", true);
  const std::string recipe = flags.has("fp8-recipe") ? flags.text("fp8-recipe") : "delayed";
  const bool by_kernel = master != 4 || recipe == "delayed";
  optimizer.master_bytes = by_kernel && flags.on("bf16") ? 2 : master;
  optimizer.main_gradient_bytes = by_kernel || optimizer.gradient_bytes == 4 ? 0 : 4;
}

void read_optimizer(MegatronFlags* flags, Job* job) {
  OptimizerSettings& optimizer = job->optimizer;
  const std::string name = flags->has("optimizer") ? flags->text("optimizer") : "adam";
  if (name == "sgd") {
    optimizer.name = "sgd";
    optimizer.exp_avg_bytes = flags->number_or("sgd-momentum", 0.9, 0, 1) > 0 ? 4 : 0;
    optimizer.exp_avg_sq_bytes = 0;
  }
  flags->unmodelled_if("optimizer", name != "adam" && name != "sgd");
  optimizer.distributed = flags->on("use-distributed-optimizer");
  optimizer.instances = flags->count_or("num-distributed-optimizer-instances", 1, 1, 1 << 20);
  if (job->layout.dp() % optimizer.instances != 0) {
    flags->contradiction("num-distributed-optimizer-instances",
                         fmt::format("a divisor of the {} data parallel ranks", job->layout.dp()));
  }
  const bool half = job->element_bytes == 2;
  optimizer.parameter_bytes = flags->on("fp8-param-gather") ? 1 : half ? 2 : 4;
  const int64_t main_gradients = bytes_of_dtype(*flags, "main-grads-dtype", false);
  const bool in_fp32 = flags->on("accumulate-allreduce-grads-in-fp32");
  const bool in_bf16 = flags->on("grad-reduce-in-bf16");
  if (in_fp32 && main_gradients != 4) {
    flags->contradiction("main-grads-dtype", "fp32 beside --accumulate-allreduce-grads-in-fp32");
  }
  const bool narrow = flags->on("bf16") ? in_bf16 || main_gradients != 4 : half && !in_fp32;
  optimizer.gradient_bytes = narrow ? 2 : 4;
  optimizer.master_bytes = half ? 4 : 0;
  optimizer.main_gradient_bytes = narrow ? 4 : 0;
  if (flags->on("use-precision-aware-optimizer")) {
    read_precision_aware(*flags, job);
    return;
  }
  for (const char* dtype :
       {"main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"}) {
    if (bytes_of_dtype(*flags, dtype, true) != 4) {
      flags->contradiction(dtype, "fp32, or --use-precision-aware-optimizer beside it");
    }
  }
}

void read_gradient_overlap(const MegatronFlags& flags, Job* job) {
  job->accumulation_fusion = !flags.on("no-gradient-accumulation-fusion");
  job->overlap_grad_reduce = flags.on("overlap-grad-reduce");
  job->overlap_param_gather = flags.on("overlap-param-gather");
  if (!job->overlap_param_gather) return;
  const std::string optimizer = flags.has("optimizer") ? flags.text("optimizer") : "adam";
  const bool sharded =
      job->optimizer.distributed || flags.has("use-megatron-fsdp") || optimizer == "dist_muon";
  if (!sharded) {
    flags.contradiction("overlap-param-gather", "only beside --use-distributed-optimizer");
  }
  if (!job->overlap_grad_reduce) {
    flags.contradiction("overlap-param-gather", "only beside --overlap-grad-reduce");
  }
}

void read_recompute_modules(MegatronFlags* flags, Job* job) {
  RecomputeSettings& recompute = job->recompute;
  std::vector<std::string> modules = flags->list("recompute-modules");
  if (!flags->has("recompute-modules")) modules = {"core_attn"};
  if (flags->on("moe-layer-recompute")) modules.push_back("moe");
  const std::vector<std::string> modelled = {"core_attn", "moe_act", "layernorm",     "mla_up_proj",
                                             "mlp",       "moe",     "shared_experts"};
  const std::vector<std::string> known = {"gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc"};
  for (const std::string& module : modules) {
    const auto among = [&](const std::vector<std::string>& names) {
      return std::find(names.begin(), names.end(), module) != names.end();
    };
    if (among(recompute.modules)) continue;
    if (among(modelled)) {
      const bool latent = module == "mla_up_proj";  // Megatron refuses it without, further down
      if (latent || among(recompute_modules_of(job->model))) {
        recompute.modules.push_back(module);
      } else {
        flags->ignored(fmt::format("--recompute-modules {} (the model has none)", module));
      }
    } else if (among(known)) {
      flags->unmodelled("--recompute-modules " + module);
    } else {
      flags->fail("recompute-modules", module, fmt::format("{}", fmt::join(modelled, ", ")));
    }
  }
  const auto has = [&](const char* module) {
    return std::find(recompute.modules.begin(), recompute.modules.end(), module) !=
           recompute.modules.end();
  };
  if (has("mla_up_proj") && !job->model.has_mla()) {
    flags->fail("recompute-modules", "mla_up_proj", "only beside --multi-latent-attention");
  }
  if (has("moe_act") && !flags->has("moe-grouped-gemm")) {
    flags->fail("recompute-modules", "moe_act", "only beside --moe-grouped-gemm");
  }
  if (job->fp8 && job->fp8_recipe == "delayed" && (has("moe_act") || has("layernorm"))) {
    flags->fail("recompute-modules", has("moe_act") ? "moe_act" : "layernorm",
                "--fp8-recipe tensorwise, blockwise or mxfp8 beside it: delayed scaling cannot "
                "recompute these");
  }
  if (has("shared_experts") && flags->on("moe-shared-expert-overlap")) {
    flags->fail("recompute-modules", "shared_experts", "not beside --moe-shared-expert-overlap");
  }
}

void read_recompute(MegatronFlags* flags, Job* job) {
  RecomputeSettings& recompute = job->recompute;
  std::string granularity = flags->choice_or("recompute-granularity", "", {"full", "selective"});
  if (flags->on("recompute-activations") || flags->on("moe-layer-recompute")) {
    if (granularity == "full") {
      flags->contradiction("recompute-granularity", "selective, as another flag says");
    }
    granularity = "selective";
  }
  const std::string method = flags->choice_or("recompute-method", "", {"uniform", "block"});
  recompute.distribute_saved = flags->on("distribute-saved-activations");
  if (granularity != "full") {
    for (const char* name :
         {"recompute-method", "recompute-num-layers", "distribute-saved-activations"}) {
      if (flags->has(name)) {
        flags->contradiction(name, "only beside --recompute-granularity full");
      }
    }
  }
  if (granularity == "selective") {
    read_recompute_modules(flags, job);
    if (!recompute.modules.empty()) recompute.granularity = RecomputeGranularity::kSelective;
  } else if (flags->has("recompute-modules")) {
    flags->contradiction("recompute-modules", "only beside --recompute-granularity selective");
  }
  if (granularity != "full") return;
  recompute.granularity = RecomputeGranularity::kFull;
  if (method.empty()) {
    flags->fail("recompute-method", "nothing", "uniform or block, as recomputation is full");
  }
  recompute.block = method == "block";
  recompute.layers = flags->count("recompute-num-layers", 1, 4096);
  if (recompute.distribute_saved && (job->layout.tp == 1 || job->layout.sequence_parallel)) {
    flags->contradiction("distribute-saved-activations",
                         "only with tensor parallelism and without --sequence-parallel");
  }
}

void read_offload(MegatronFlags* flags, Job* job) {
  OffloadSettings& offload = job->offload;
  if (!flags->on("fine-grained-activation-offloading")) {
    for (const char* name : {"offload-modules", "activation-offload-fraction"}) {
      if (flags->has(name)) {
        flags->contradiction(name, "only beside --fine-grained-activation-offloading");
      }
    }
    flags->unmodelled_or_ignored("min-offloaded-tensor-size", false);
    return;
  }
  const std::vector<std::string> modelled = {"core_attn", "attn_proj", "expert_fc1", "moe_act",
                                             "attn_norm", "mlp_norm",  "qkv_linear"};
  for (const std::string& module : flags->list("offload-modules")) {
    const auto among = [&](const std::vector<std::string>& names) {
      return std::find(names.begin(), names.end(), module) != names.end();
    };
    if (among(offload.modules)) continue;
    if (among(modelled)) {
      if (among(offload_modules_of(job->model))) {
        offload.modules.push_back(module);
      } else {
        flags->ignored(fmt::format("--offload-modules {} (the model has none)", module));
      }
    } else if (module == "fused_group_mlp" || module == "gdp_qkv") {
      flags->unmodelled("--offload-modules " + module);
    } else {
      flags->fail("offload-modules", module, fmt::format("{}", fmt::join(modelled, ", ")));
    }
  }
  if (flags->list("offload-modules").empty()) {
    flags->fail("offload-modules", "nothing", "modules, as activations are offloaded");
  }
  offload.fraction = flags->number_or("activation-offload-fraction", 1, 0, 1);
  offload.min_tensor_elements = flags->count_or("min-offloaded-tensor-size", 1 << 20, 0);
  const auto has = [](const std::vector<std::string>& modules, const char* module) {
    return std::find(modules.begin(), modules.end(), module) != modules.end();
  };
  if (has(offload.modules, "attn_proj") && !has(offload.modules, "core_attn")) {
    flags->fail("offload-modules", "attn_proj",
                "core_attn beside it: its output, which is attn_proj's input, is needed there");
  }
  if (has(job->recompute.modules, "moe")) {
    for (const char* module : {"expert_fc1", "moe_act"}) {
      if (has(offload.modules, module)) {
        flags->fail("offload-modules", module, "not beside --recompute-modules moe");
      }
    }
  }
}

void read_dispatch(MegatronFlags* flags, Job* job) {
  MoeSettings& moe = job->moe;
  if (!job->model.has_moe()) return;
  moe.router_bytes = job->element_bytes;
  std::string dispatcher = flags->choice_or("moe-token-dispatcher-type", "allgather",
                                            {"allgather", "alltoall", "alltoall_seq", "flex"});
  if (dispatcher == "alltoall_seq") {
    flags->unmodelled("--moe-token-dispatcher-type alltoall_seq (taken as alltoall)");
    dispatcher = "alltoall";
  }
  moe.dispatcher = dispatcher;
  const bool deepep = flags->on("moe-enable-deepep");
  const std::string backend =
      flags->choice_or("moe-flex-dispatcher-backend", "deepep", {"deepep", "hybridep", "ncclep"});
  if (deepep && (dispatcher != "flex" || backend != "deepep")) {
    flags->contradiction("moe-enable-deepep",
                         "only with --moe-token-dispatcher-type flex and no other backend");
  }
  if (dispatcher == "flex") moe.flex_backend = backend;
  moe.capacity_factor =
      std::max(0.0, flags->number_or("moe-expert-capacity-factor", -1, -1e9, 1e9));
  moe.pad_to_capacity = flags->on("moe-pad-expert-input-to-capacity");
  if (moe.pad_to_capacity && moe.capacity_factor == 0) {
    flags->contradiction("moe-pad-expert-input-to-capacity",
                         "only beside --moe-expert-capacity-factor");
  }
  if (moe.pad_to_capacity && dispatcher == "flex" && backend == "deepep") {
    flags->contradiction("moe-pad-expert-input-to-capacity",
                         "not with --moe-flex-dispatcher-backend deepep");
  }
  moe.permute_fusion = flags->on("moe-permute-fusion");
  const std::string router = flags->choice_or("moe-router-dtype", "", {"fp32", "fp64"});
  if (!router.empty()) moe.router_bytes = router == "fp64" ? 8 : 4;
  for (const char* padding :
       {"moe-router-padding-for-fp8", "moe-router-padding-for-quantization"}) {
    if (flags->on(padding) && !job->fp8 && !flags->has("fp4-format")) {
      flags->contradiction(padding, "only beside --fp8-format");
    }
    if (flags->on(padding) && dispatcher == "allgather") {
      flags->contradiction(padding, "not with --moe-token-dispatcher-type allgather");
    }
  }
  // Where the router does not pad, the experts do before their GEMMs.
  if (job->fp8) moe.row_multiple = job->fp8_recipe == "mxfp8" ? 32 : 16;
}

void read_overlap(MegatronFlags* flags, Job* job) {
  OverlapSettings& overlap = job->overlap;
  overlap.tp = flags->on("tp-comm-overlap");
  if (overlap.tp && !job->layout.sequence_parallel) {
    flags->contradiction("tp-comm-overlap", "only beside --sequence-parallel");
  }
  const bool interleaved = job->pipeline == PipelineKind::kInterleaved;
  overlap.p2p = !(flags->on("no-overlap-p2p-communication") && interleaved);
  if (!overlap.p2p && job->layout.pp == 2) {
    flags->contradiction("no-overlap-p2p-communication",
                         "not with interleaving over two pipeline ranks");
  }
  overlap.shared_expert = flags->on("moe-shared-expert-overlap");
  if (overlap.shared_expert && job->moe.dispatcher == "allgather") {
    flags->contradiction("moe-shared-expert-overlap",
                         "only with --moe-token-dispatcher-type alltoall or flex");
  }
  overlap.expert = flags->on("overlap-moe-expert-parallel-comm");
  if (!overlap.expert) return;
  const char* name = "overlap-moe-expert-parallel-comm";
  const auto needs = [&](bool ok, const char* allowed) {
    if (!ok) flags->contradiction(name, allowed);
  };
  const std::vector<std::string>& modules = job->recompute.modules;
  needs(job->layout.ep > 1, "only with --expert-model-parallel-size above 1");
  needs(job->moe.dispatcher != "allgather", "only with dispatcher alltoall or flex");
  needs(job->layout.pp == 1 || interleaved, "only with virtual stages where there is a pipeline");
  needs(job->recompute.granularity != RecomputeGranularity::kFull, "not with full recomputation");
  needs(std::find(modules.begin(), modules.end(), "moe") == modules.end(),
        "not beside --recompute-modules moe");
  needs(job->element_bytes == 2, "only beside --bf16 or --fp16");
  needs(!overlap.shared_expert, "not beside --moe-shared-expert-overlap");
  needs(job->model.mtp_layers <= 1, "at most one multi-token prediction layer beside it");
}

void read_attention_settings(MegatronFlags* flags, Job* job) {
  const std::string backend =
      flags->choice_or("attention-backend", "auto", {"flash", "fused", "unfused", "local", "auto"});
  const std::string impl = flags->choice_or("transformer-impl", "transformer_engine",
                                            {"transformer_engine", "local", "inference_optimized"});
  flags->unmodelled_if("transformer-impl", impl != "transformer_engine");
  // Flash and fused attention exist in 16 bits only.
  job->attention_unfused =
      backend == "unfused" || backend == "local" || impl == "local" || job->element_bytes == 4;
  job->attention_dropout = flags->number_or("attention-dropout", 0.1, 0, 1);
  flags->unmodelled_or_ignored("no-masked-softmax-fusion", job->attention_unfused);
  flags->unmodelled_or_ignored("apply-query-key-layer-scaling", job->attention_unfused);
  job->activation_fusion = !(flags->on("swiglu") && flags->on("no-bias-swiglu-fusion"));
  flags->unmodelled_or_ignored("no-bias-gelu-fusion", !job->model.gated_mlp && job->model.mlp_bias);
  std::vector<std::string> exchange = flags->list("cp-comm-type");
  std::sort(exchange.begin(), exchange.end());
  exchange.erase(std::unique(exchange.begin(), exchange.end()), exchange.end());
  for (const std::string& kind : exchange) {
    if (kind == "a2a") {
      job->cp_exchange = CpExchange::kAllToAll;
    } else if (kind == "allgather" || kind == "all_gather") {
      job->cp_exchange = CpExchange::kAllGather;
    } else if (kind != "p2p" && kind != "a2a+p2p") {
      flags->fail("cp-comm-type", kind, "p2p, a2a, allgather, a2a+p2p");
    }
  }
  const bool mixed = exchange.size() > 1 || (exchange.size() == 1 && exchange[0] == "a2a+p2p");
  if (mixed) job->cp_exchange = CpExchange::kRing;
  flags->unmodelled_if("cp-comm-type", mixed && job->layout.cp > 1);
}

void read_cross_entropy(const MegatronFlags& flags, Job* job) {
  const std::string impl = flags.choice_or("cross-entropy-fusion-impl", "native", {"native", "te"});
  if (!flags.on("cross-entropy-loss-fusion")) return;
  job->cross_entropy = impl == "te" ? CrossEntropy::kFusedTe : CrossEntropy::kFusedNative;
}

}  // namespace

void read_megatron_settings(MegatronFlags* flags, Job* job) {
  read_precision(*flags, job);
  read_optimizer(flags, job);
  read_gradient_overlap(*flags, job);
  read_recompute(flags, job);
  read_offload(flags, job);
  read_dispatch(flags, job);
  read_overlap(flags, job);
  read_attention_settings(flags, job);
  read_cross_entropy(*flags, job);
}

}  // namespace bagualu
