// Flags of a Job: the reverse of megatron_args_*.cpp.

#include "bagualu/model/megatron_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/megatron_args_parts.h"

namespace bagualu {
namespace {

class Writer {
 public:
  Writer(const Job& job, const std::string& where) : job_(job), where_(where) {}

  std::vector<std::string> write() {
    model_sizes();
    attention();
    experts();
    layout();
    batches();
    precision();
    optimizer();
    recompute();
    offload();
    dispatch();
    overlap();
    return std::move(words_);
  }

 private:
  void flag(std::string name) { words_.push_back("--" + std::move(name)); }
  template <class Value>
  void flag(std::string name, const Value& value) {
    flag(std::move(name));
    words_.push_back(fmt::format("{}", value));
  }
  void flag_if(bool given, std::string name) {
    if (given) flag(std::move(name));
  }
  void list(std::string name, const std::vector<std::string>& values) {
    flag(std::move(name));
    words_.insert(words_.end(), values.begin(), values.end());
  }
  void needs(bool ok, const char* field, std::string found, std::string allowed) const {
    if (!ok) throw InvalidInput(where_, field, std::move(found), std::move(allowed));
  }

  void model_sizes() {
    const ModelSpec& m = job_.model;
    flag("num-layers", m.layers);
    flag("hidden-size", m.hidden);
    flag("num-attention-heads", m.heads);
    if (m.dense_ffn > 0) flag("ffn-hidden-size", m.dense_ffn);
    flag("seq-length", job_.seq);
    flag("max-position-embeddings", std::max(job_.seq, m.learned_positions));
    needs(m.learned_positions == 0 || m.learned_positions >= job_.seq, "model.learned_positions",
          fmt::format("{}", m.learned_positions), fmt::format("at least seq = {}", job_.seq));
    flag("position-embedding-type", m.learned_positions > 0 ? "learned_absolute" : "rope");
    flag("rotary-base", static_cast<int64_t>(m.rope_theta));
    needs(m.rope_theta == static_cast<double>(static_cast<int64_t>(m.rope_theta)),
          "model.rope_theta", fmt::format("{}", m.rope_theta), "an integer (--rotary-base)");
    flag("vocab-size", m.vocab);
    flag("make-vocab-size-divisible-by", job_.vocab_multiple);
    flag_if(m.gated_mlp, "swiglu");
    flag("normalization", m.layer_norm ? "LayerNorm" : "RMSNorm");
    flag("norm-epsilon", m.rms_eps);
    flag("hidden-dropout", m.dropout);
    flag("attention-dropout", job_.attention_dropout);
    flag_if(!m.tied_embeddings, "untie-embeddings-and-output-weights");
    if (m.mtp_layers > 0) flag("mtp-num-layers", m.mtp_layers);
    needs(m.mtp_layers == 0 || m.learned_positions == 0, "model.mtp_layers",
          fmt::format("{}", m.mtp_layers), "0 with learned positions");
    needs(m.attn_out_bias == m.mlp_bias, "model.mlp_bias", m.mlp_bias ? "true" : "false",
          "the same as attn_out_bias: one flag, --disable-bias-linear, says both");
    flag_if(!m.mlp_bias, "disable-bias-linear");
    needs(!m.router_bias, "model.router_bias", "true", "false (Megatron's router has no bias)");
    needs(!m.qk_norm_full_width, "model.qk_norm_full_width", "true",
          "false (Megatron's query norm is per head)");
  }

  void attention() {
    const ModelSpec& m = job_.model;
    flag_if(m.attn_sinks, "softmax-type");
    if (m.attn_sinks) words_.push_back("learnable");
    window();
    if (m.has_mla()) {
      flag("multi-latent-attention");
      flag("qk-layernorm");
      if (m.q_lora_rank > 0) flag("q-lora-rank", m.q_lora_rank);
      flag("kv-lora-rank", m.kv_lora_rank);
      flag("qk-head-dim", m.qk_nope_head_dim);
      flag("qk-pos-emb-head-dim", m.qk_rope_head_dim);
      flag("v-head-dim", m.v_head_dim);
      needs(!m.qkv_bias, "model.qkv_bias", "true", "false with latent attention");
      return;
    }
    flag("kv-channels", m.head_dim);
    if (m.kv_heads != m.heads) {
      flag("group-query-attention");
      flag("num-query-groups", m.kv_heads);
    }
    needs(m.qkv_bias || !m.attn_out_bias, "model.qkv_bias", "false",
          "true where attn_out_bias is true");
    flag_if(m.qkv_bias && !m.attn_out_bias, "add-qkv-bias");
    flag_if(m.qk_norm && !m.qk_norm_weightless, "qk-layernorm");
    flag_if(m.qk_norm_weightless, "qk-l2-norm");
  }

  void window() {
    const ModelSpec& m = job_.model;
    if (m.attention_window == 0) return;
    flag("window-size", fmt::format("{},0", m.attention_window - 1));
    const bool all = std::all_of(m.windowed_layer.begin(), m.windowed_layer.end(),
                                 [](uint8_t windowed) { return windowed != 0; });
    if (!all) flag("window-attn-skip-freq", pattern(m.windowed_layer));
  }

  /// "[0]*3+[1]*58".
  static std::string pattern(const std::vector<uint8_t>& layers) {
    std::string text;
    for (size_t begin = 0; begin < layers.size();) {
      size_t end = begin;
      while (end < layers.size() && layers[end] == layers[begin]) ++end;
      text += fmt::format("{}[{}]*{}", text.empty() ? "" : "+", layers[begin], end - begin);
      begin = end;
    }
    return "(" + text + ")";
  }

  void experts() {
    const ModelSpec& m = job_.model;
    if (!m.has_moe()) return;
    flag("num-experts", m.experts);
    flag("moe-router-topk", m.top_k);
    flag("moe-ffn-hidden-size", m.expert_ffn);
    flag("moe-grouped-gemm");
    if (m.moe_layers() < m.layers) flag("moe-layer-freq", pattern(m.moe_layer));
    if (m.shared_ffn > 0) {
      flag("moe-shared-expert-intermediate-size", m.shared_ffn);
      needs(!m.mlp_bias, "model.mlp_bias", "true", "false, since there is a shared expert");
    }
    flag_if(m.shared_gate, "moe-shared-expert-gate");
    const bool biased = m.router_bias_rate > 0;
    needs(!biased || m.norm_topk_prob, "model.norm_topk_prob", "false",
          "true with router_bias_rate (Megatron's sigmoid scores are scaled to sum 1)");
    if (biased) {
      flag("moe-router-score-function", "sigmoid");
      flag("moe-router-enable-expert-bias");
      flag("moe-router-bias-update-rate", m.router_bias_rate);
    } else if (!m.norm_topk_prob) {
      flag("moe-router-pre-softmax");
    } else if (m.top_k == 1) {
      flag("moe-router-score-function", "sigmoid");
    }
    flag("moe-router-load-balancing-type", m.aux_loss_coef > 0 ? "aux_loss" : "none");
    if (m.aux_loss_coef > 0) flag("moe-aux-loss-coeff", m.aux_loss_coef);
    if (m.z_loss_coef > 0) flag("moe-z-loss-coeff", m.z_loss_coef);
  }

  void layout() {
    const JobLayout& l = job_.layout;
    needs(job_.pipeline == PipelineKind::k1F1B || job_.pipeline == PipelineKind::kInterleaved,
          "pipeline", std::string(pipeline_kind_name(job_.pipeline)),
          "1f1b or interleaved: Megatron has no flag for other orders");
    needs((job_.pipeline == PipelineKind::kInterleaved) == (l.vpp > 1 && l.pp > 1), "pipeline",
          fmt::format("{} with pp={}, vpp={}", pipeline_kind_name(job_.pipeline), l.pp, l.vpp),
          "interleaved exactly where pp and vpp are above 1");
    flag("tensor-model-parallel-size", l.tp);
    flag("pipeline-model-parallel-size", l.pp);
    flag("context-parallel-size", l.cp);
    if (l.cp > 1 || job_.cp_exchange != CpExchange::kRing) {
      needs(job_.seq % (2 * l.cp) == 0, "seq", fmt::format("{}", job_.seq),
            fmt::format("a multiple of 2 * cp = {}", 2 * l.cp));
      constexpr const char* kExchanges[] = {"p2p", "a2a", "allgather"};
      flag("cp-comm-type", kExchanges[static_cast<int>(job_.cp_exchange)]);
    }
    if (job_.model.has_moe()) {
      flag("expert-model-parallel-size", l.ep);
      flag("expert-tensor-parallel-size", l.etp);
      needs(l.tp == 1 || l.sequence_parallel, "layout.sp", "false",
            "true: Megatron trains experts with tensor parallelism only with it");
      needs(l.etp == 1 || !job_.model.mlp_bias, "layout.etp", fmt::format("{}", l.etp),
            "1, since the experts have biases");
    }
    needs(l.tp > 1 || !l.sequence_parallel, "layout.sp", "true", "false, since tp is 1");
    flag_if(l.sequence_parallel, "sequence-parallel");
    stages();
  }

  void stages() {
    const JobLayout& l = job_.layout;
    if (job_.stages == even_megatron_stages(job_.model, l.pp, l.vpp)) {
      if (l.vpp > 1) flag("num-virtual-stages-per-pipeline-rank", l.vpp);
      return;
    }
    // Megatron's own parser wants these; the last virtual stage of a rank may hold them all.
    int64_t holders = 0;
    for (size_t s = 0; s < job_.stages.size(); ++s) {
      if (job_.stages[s].mtp_layers == 0) continue;
      ++holders;
      const auto behind = static_cast<int64_t>(job_.stages.size()) - l.pp;
      const bool decoders_follow =
          std::any_of(job_.stages.begin() + static_cast<int64_t>(s) + 1, job_.stages.end(),
                      [](const StageContent& stage) { return stage.layer_count > 0; });
      needs(holders == 1 && static_cast<int64_t>(s) >= behind && !decoders_follow, "stages",
            stages_text(job_.stages),
            "multi-token prediction in one of the last pp stages, behind every layer");
    }
    flag("pipeline-model-parallel-layout", stages_text(job_.stages));
  }

  void batches() {
    flag("micro-batch-size", job_.micro_batch_size);
    flag("global-batch-size", job_.micro_batch_size * job_.layout.dp() * job_.microbatches);
  }

  void precision() {
    needs(job_.element_bytes == 2 || job_.element_bytes == 4, "element_bytes",
          fmt::format("{}", job_.element_bytes), "2 or 4");
    flag_if(job_.element_bytes == 2, "bf16");
    needs(job_.attention_unfused || job_.element_bytes == 2, "attention_unfused", "false",
          "true in fp32: flash and fused attention exist in 16 bits only");
    flag("attention-backend", job_.attention_unfused ? "unfused" : "auto");
    if (job_.fp8) {
      flag("fp8-format",
           job_.fp8_recipe == "delayed" || job_.fp8_recipe == "tensorwise" ? "hybrid" : "e4m3");
      flag("fp8-recipe", job_.fp8_recipe);
    }
    const int64_t bytes = job_.optimizer.parameter_bytes;
    needs(bytes == job_.element_bytes || (bytes == 1 && job_.fp8 && job_.optimizer.distributed),
          "optimizer.parameter_bytes", fmt::format("{}", bytes),
          fmt::format("{}, or 1 with fp8 and a distributed optimizer", job_.element_bytes));
    flag_if(bytes == 1, "fp8-param-gather");
    flag_if(!job_.accumulation_fusion, "no-gradient-accumulation-fusion");
    flag_if(!job_.activation_fusion, "no-bias-swiglu-fusion");
    if (job_.cross_entropy == CrossEntropy::kUnfused) return;
    flag("cross-entropy-loss-fusion");
    flag("cross-entropy-fusion-impl",
         job_.cross_entropy == CrossEntropy::kFusedTe ? "te" : "native");
  }

  void optimizer() {
    const OptimizerSettings& o = job_.optimizer;
    needs(o.name == "adam" || o.name == "sgd", "optimizer.name", o.name, "adam or sgd");
    flag("optimizer", o.name);
    flag_if(o.distributed, "use-distributed-optimizer");
    if (o.instances > 1) flag("num-distributed-optimizer-instances", o.instances);
    needs(!job_.overlap_param_gather || (o.distributed && job_.overlap_grad_reduce),
          "overlap_param_gather", "true",
          "false, or a distributed optimizer and overlap_grad_reduce");
    flag_if(job_.overlap_grad_reduce, "overlap-grad-reduce");
    flag_if(job_.overlap_param_gather, "overlap-param-gather");
    const bool half = job_.element_bytes == 2;
    needs(o.gradient_bytes == 4 || (o.gradient_bytes == 2 && half), "optimizer.gradient_bytes",
          fmt::format("{}", o.gradient_bytes), "4, or 2 where activations have 2 bytes");
    const OptimizerSettings plain = {.name = o.name,
                                     .distributed = o.distributed,
                                     .parameter_bytes = o.parameter_bytes,
                                     .gradient_bytes = o.gradient_bytes,
                                     .master_bytes = half ? 4 : 0,
                                     .exp_avg_bytes = o.name == "sgd" ? o.exp_avg_bytes : 4,
                                     .exp_avg_sq_bytes = o.name == "sgd" ? 0 : 4,
                                     .main_gradient_bytes = o.gradient_bytes == 2 ? 4 : 0,
                                     .instances = o.instances};
    if (o == plain) {
      flag_if(o.gradient_bytes == 2, "grad-reduce-in-bf16");
      needs(o.name == "adam" || o.exp_avg_bytes == 0 || o.exp_avg_bytes == 4,
            "optimizer.exp_avg_bytes", fmt::format("{}", o.exp_avg_bytes), "0 or 4 with sgd");
      if (o.name == "sgd") flag("sgd-momentum", o.exp_avg_bytes > 0 ? 0.9 : 0.0);
      return;
    }
    precision_aware();
  }

  void precision_aware() {
    const OptimizerSettings& o = job_.optimizer;
    needs(o.name == "adam" && o.distributed && job_.element_bytes == 2, "optimizer",
          fmt::format("{}, distributed {}", o.name, o.distributed),
          "fp32 states, or adam with a distributed optimizer in 16 bits");
    const bool by_kernel = !job_.fp8 || job_.fp8_recipe == "delayed";
    // Masters of 2 bytes beside a recipe whose masters Megatron keeps itself: fp16 ones.
    const bool fp16_masters = !by_kernel && o.master_bytes == 2;
    const int64_t cast = o.gradient_bytes == 2 && !by_kernel && !fp16_masters ? 4 : 0;
    needs(o.master_bytes == 2 || (o.master_bytes == 4 && !by_kernel), "optimizer.master_bytes",
          fmt::format("{}", o.master_bytes),
          by_kernel ? "2 where the optimizer is precision-aware" : "2 or 4");
    needs(o.main_gradient_bytes == cast, "optimizer.main_gradient_bytes",
          fmt::format("{}", o.main_gradient_bytes), fmt::format("{} with these states", cast));
    flag("use-precision-aware-optimizer");
    if (o.gradient_bytes == 2) flag("main-grads-dtype", "bf16");
    if (fp16_masters) flag("main-params-dtype", "fp16");
    moment("exp-avg-dtype", o.exp_avg_bytes);
    moment("exp-avg-sq-dtype", o.exp_avg_sq_bytes);
  }

  void moment(const char* name, int64_t bytes) {
    needs(bytes == 1 || bytes == 2 || bytes == 4, name, fmt::format("{} bytes", bytes),
          "1, 2 or 4 bytes");
    flag(name, bytes == 4 ? "fp32" : bytes == 2 ? "bf16" : "fp8");
  }

  bool recomputes(const char* module) const {
    const std::vector<std::string>& modules = job_.recompute.modules;
    return std::find(modules.begin(), modules.end(), module) != modules.end();
  }
  bool offloads(const char* module) const {
    const std::vector<std::string>& modules = job_.offload.modules;
    return std::find(modules.begin(), modules.end(), module) != modules.end();
  }

  void recompute() {
    const RecomputeSettings& r = job_.recompute;
    const bool full = r.granularity == RecomputeGranularity::kFull;
    const bool selective = r.granularity == RecomputeGranularity::kSelective;
    needs(selective == !r.modules.empty(), "recompute.modules",
          fmt::format("{}", fmt::join(r.modules, " ")),
          selective ? "at least one" : "none, since recomputation is not selective");
    needs(full || !r.distribute_saved, "recompute.distribute_saved", "true",
          "false, since recomputation is not full");
    if (full) {
      flag("recompute-granularity", "full");
      flag("recompute-method", r.block ? "block" : "uniform");
      flag("recompute-num-layers", r.layers);
      needs(!r.distribute_saved || (job_.layout.tp > 1 && !job_.layout.sequence_parallel),
            "recompute.distribute_saved", "true", "false, or tp above 1 without sp");
      flag_if(r.distribute_saved, "distribute-saved-activations");
      return;
    }
    if (!selective) return;
    needs(!recomputes("mla_up_proj") || job_.model.has_mla(), "recompute.modules", "mla_up_proj",
          "others: the model has no latent attention");
    needs(!job_.fp8 || job_.fp8_recipe != "delayed" ||
              (!recomputes("moe_act") && !recomputes("layernorm")),
          "recompute.modules", "moe_act or layernorm",
          "neither with fp8_recipe delayed: its scales cannot be recomputed");
    needs(!recomputes("shared_experts") || !job_.overlap.shared_expert, "recompute.modules",
          "shared_experts", "not beside overlap.shared_expert");
    needs(!recomputes("mlp_act"), "recompute.modules", "mlp_act",
          "mlp: Megatron recomputes no activation of dense MLPs alone");
    flag("recompute-granularity", "selective");
    list("recompute-modules", r.modules);
  }

  void offload() {
    const OffloadSettings& o = job_.offload;
    if (o.modules.empty()) {
      needs(o == OffloadSettings{}, "offload.modules", "none", "modules beside other settings");
      return;
    }
    needs(!offloads("attn_proj") || offloads("core_attn"), "offload.modules", "attn_proj",
          "core_attn beside it, which needs the same tensor in its backward");
    needs(!recomputes("moe") || (!offloads("expert_fc1") && !offloads("moe_act")),
          "offload.modules", "expert_fc1 or moe_act",
          "neither, since the whole MoE layer is recomputed");
    needs(!offloads("all"), "offload.modules", "all", "modules that Megatron names");
    flag("fine-grained-activation-offloading");
    list("offload-modules", o.modules);
    if (o.fraction != 1) flag("activation-offload-fraction", o.fraction);
    if (o.min_tensor_elements != OffloadSettings{}.min_tensor_elements) {
      flag("min-offloaded-tensor-size", o.min_tensor_elements);
    }
  }

  void dispatch() {
    if (!job_.model.has_moe()) return;
    const MoeSettings& moe = job_.moe;
    flag("moe-token-dispatcher-type", moe.dispatcher);
    if (moe.dispatcher == "flex") flag("moe-flex-dispatcher-backend", moe.flex_backend);
    if (moe.capacity_factor > 0) flag("moe-expert-capacity-factor", moe.capacity_factor);
    needs(!moe.pad_to_capacity || moe.dispatcher != "flex" || moe.flex_backend != "deepep",
          "moe.pad_to_capacity", "true", "false with the DeepEP backend");
    flag_if(moe.pad_to_capacity, "moe-pad-expert-input-to-capacity");
    flag_if(moe.permute_fusion, "moe-permute-fusion");
    needs(moe.probs_in_activation, "moe.probs_in_activation", "false", "true (Megatron 0.13 on)");
    if (moe.router_bytes != job_.element_bytes) {
      needs(moe.router_bytes == 4 || moe.router_bytes == 8, "moe.router_bytes",
            fmt::format("{}", moe.router_bytes), "that of activations, 4 or 8");
      flag("moe-router-dtype", moe.router_bytes == 8 ? "fp64" : "fp32");
    }
    const int64_t multiple = !job_.fp8 ? 1 : job_.fp8_recipe == "mxfp8" ? 32 : 16;
    needs(moe.row_multiple == multiple, "moe.row_multiple", fmt::format("{}", moe.row_multiple),
          fmt::format("{} with this precision", multiple));
  }

  void overlap() {
    const OverlapSettings& o = job_.overlap;
    needs(!o.tp || job_.layout.sequence_parallel, "overlap.tp", "true", "false without sp");
    flag_if(o.tp, "tp-comm-overlap");
    const bool interleaved = job_.pipeline == PipelineKind::kInterleaved;
    needs(o.p2p || (interleaved && job_.layout.pp > 2), "overlap.p2p", "false",
          "true, or interleaving over more than two pipeline ranks");
    flag_if(!o.p2p, "no-overlap-p2p-communication");
    needs(!o.shared_expert || (job_.model.has_moe() && job_.moe.dispatcher != "allgather"),
          "overlap.shared_expert", "true", "false, or dispatcher alltoall or flex");
    flag_if(o.shared_expert, "moe-shared-expert-overlap");
    if (!o.expert) return;
    needs(job_.layout.ep > 1 && job_.moe.dispatcher != "allgather" &&
              (job_.layout.pp == 1 || interleaved) && !o.shared_expert &&
              job_.recompute.granularity != RecomputeGranularity::kFull && !recomputes("moe") &&
              job_.element_bytes == 2 && job_.model.mtp_layers <= 1,
          "overlap.expert", "true",
          "false, or ep above 1, dispatcher alltoall or flex, virtual stages where there is a "
          "pipeline, 16 bits, at most one multi-token prediction layer, no full or moe "
          "recomputation and no overlap.shared_expert");
    flag("overlap-moe-expert-parallel-comm");
  }

  const Job& job_;
  const std::string& where_;
  std::vector<std::string> words_;
};

}  // namespace

std::vector<std::string> megatron_flags(const Job& job, const std::string& where) {
  validate(job, where);
  return Writer(job, where).write();
}

std::string megatron_flags_text(const Job& job, const std::string& where) {
  std::string text = "MEGATRON_ARGS=(\n";
  std::string line;
  const auto end_line = [&] {
    if (!line.empty()) text += "    " + line + "\n";
    line.clear();
  };
  for (const std::string& word : megatron_flags(job, where)) {
    if (word.starts_with("--")) end_line();
    const bool plain = word.find_first_of("|()*[]$&;<> ") == std::string::npos;
    line += (line.empty() ? "" : " ") + (plain ? word : "\"" + word + "\"");
  }
  end_line();
  return text + ")\n";
}

}  // namespace bagualu
