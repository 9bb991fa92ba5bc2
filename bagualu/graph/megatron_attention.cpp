#include <algorithm>
#include <utility>

#include "bagualu/graph/megatron_builder.h"

namespace bagualu {
namespace {

constexpr int64_t kFp32Bytes = 4;

ByteFormula per_token(int64_t bytes) { return {.per_token = bytes}; }

}  // namespace

int64_t MegatronBuilder::kv_heads() const {
  return std::max<int64_t>(1, spec_.kv_heads / options_.tp);
}

void MegatronBuilder::attention() {
  const int input = hidden_;
  const Normed normed = norm(OpKind::kAttnNorm, "attn", input, /*gemm_only=*/true);
  const Operand x = operand(normed.out, "normed_attn", spec_.hidden);
  const auto [q_in, k_in, v] = spec_.has_mla() ? latent_projections(x) : projections(x);
  const int q = writer_.saved("q", tokens_of(q_width()));
  writer_.add({.kind = OpKind::kQRope, .reads = {q_in}, .creates = {q}, .writes_parts = true});
  const int k = writer_.saved("k", tokens_of(kv_width()));
  writer_.add({.kind = OpKind::kKRope, .reads = k_in, .creates = {k}, .writes_parts = true});
  core_attention(q, k, v);
}

// The fused kernel keeps a sum per query; the unfused one the scores, and with dropout its mask and
// the product.
void MegatronBuilder::core_attention(int q, int k, int v) {
  const int input = hidden_;
  const int64_t heads = spec_.heads / options_.tp;
  const ByteFormula out_bytes = tokens_of(spec_.attn_out_width() / options_.tp);
  const int out = writer_.saved("attn_out", out_bytes);
  MegatronStep core = {.kind = OpKind::kCoreAttn, .reads = {q, k, v}, .creates = {out}};
  if (options_.attention_unfused) {
    const int64_t keys = options_.seq * options_.cp * heads;
    const bool dropout = options_.attention_dropout > 0;
    core.bwd_saved = {q, k, v};
    core.bwd_saved.push_back(writer_.constant("attn_softmax", tokens_of(keys)));
    if (dropout) {
      core.bwd_saved.push_back(writer_.constant("attn_mask", per_token(keys)));
      core.bwd_saved.push_back(writer_.constant("attn_dropped", tokens_of(keys)));
    }
    core.creates.insert(core.creates.end(), core.bwd_saved.begin() + 3, core.bwd_saved.end());
    if (options_.transients) {
      core.fwd_scratch = {tokens_of(keys)};
      core.bwd_scratch = {tokens_of(keys), tokens_of(keys)};
    }
  } else {
    const int lse = writer_.constant("attn_lse", per_token(heads * kFp32Bytes));
    core.creates.push_back(lse);
    core.bwd_saved = {q, k, v, out, lse};
    if (options_.cp > 1 && options_.cp_exchanges_heads) {
      const int exchanged = writer_.constant("attn_out_heads", out_bytes);
      core.creates.push_back(exchanged);
      core.bwd_saved.push_back(exchanged);
    }
    if (options_.cp > 1 && options_.cp_gathers_keys && options_.transients) {
      const ByteFormula whole = tokens_of(2 * kv_width() * options_.cp);
      core.fwd_scratch = {whole};
      core.bwd_scratch = {whole, whole};  // and their gradients
    }
  }
  writer_.add(std::move(core));
  const int projected = writer_.unsaved("attn_proj.out", hidden_bytes_);
  add_gemm({.kind = OpKind::kAttnProj, .reads = {out}, .creates = {projected}, .bwd_saved = {out}},
           0, spec_.hidden, spec_.attn_out_width() / options_.tp * spec_.hidden);
  hidden_mid_ = writer_.saved("hidden_mid", hidden_bytes_);
  MegatronStep sum = {
      .kind = OpKind::kAttnBda, .reads = {projected, input}, .creates = {hidden_mid_}};
  keep_mask(sum, "attn_dropout.mask");
  writer_.add(std::move(sum));
}

// Grouped-query attention. The fused kernel wants q, k, v apart, so v is copied out of the GEMM's
// output; so are q and k where a norm follows, else the rotation reads them in place.
MegatronBuilder::AttentionInputs MegatronBuilder::projections(const Operand& x) {
  const int64_t width = q_width() + 2 * kv_width();
  const int64_t weights = width * spec_.hidden;
  const int v = writer_.saved("v", tokens_of(kv_width()));
  MegatronStep qkv = {.kind = OpKind::kQkv, .reads = {x.forward}, .bwd_saved = x.saved};
  if (!spec_.qk_norm) {
    const int out = writer_.unsaved("qkv.out", tokens_of(width));
    qkv.creates = {out, v};
    add_gemm(std::move(qkv), spec_.hidden, 0, weights);
    return {out, {out}, v};
  }
  const int q_raw = writer_.saved("q_raw", tokens_of(q_width()));
  const int k_raw = writer_.saved("k_raw", tokens_of(kv_width()));
  qkv.creates = {q_raw, k_raw, v};
  add_gemm(std::move(qkv), spec_.hidden, 0, weights);
  const int q = head_norm(OpKind::kQNorm, "q", q_raw, q_width(), spec_.heads / options_.tp);
  const int k = head_norm(OpKind::kKNorm, "k", k_raw, kv_width(), kv_heads());
  return {q, {k}, v};
}

// RMSNorm over the heads' width; the rotation behind it keeps nothing, so its output is unsaved.
int MegatronBuilder::head_norm(OpKind kind, const std::string& which, int input, int64_t width,
                               int64_t heads) {
  const int64_t statistics = spec_.qk_norm_full_width ? 1 : heads;
  const int out = writer_.unsaved(which + "_normed", tokens_of(width));
  const int rstd = writer_.constant(which + "_rstd", per_token(statistics * kFp32Bytes));
  writer_.add({.kind = kind, .reads = {input}, .creates = {out, rstd}, .bwd_saved = {input, rstd}});
  return out;
}

// Multi-head latent attention. kv_down and kv_up hand on two things each: a contiguous copy that
// is saved (the latent, the values) and the output itself, which the rotation of k reads. The down
// projections are whole on every tp rank and work on its part of the sequence.
MegatronBuilder::AttentionInputs MegatronBuilder::latent_projections(const Operand& x) {
  int q_in = x.forward;
  std::vector<int> q_saved = x.saved;
  if (spec_.q_lora_rank > 0) {
    const int q_compressed = writer_.saved("q_compressed", sequence_of(spec_.q_lora_rank));
    add_gemm({.kind = OpKind::kQDown,
              .reads = {x.forward},
              .creates = {q_compressed},
              .bwd_saved = x.saved},
             0, 0, spec_.q_lora_rank * spec_.hidden);
    q_in = latent_norm(OpKind::kQNorm, "q", q_compressed, spec_.q_lora_rank);
    q_saved = {q_in};
  }
  const int64_t q_width_in = spec_.q_lora_rank > 0 ? spec_.q_lora_rank : spec_.hidden;
  const int q_up = writer_.unsaved("q_up.out", tokens_of(q_width()));
  add_gemm({.kind = OpKind::kQUp, .reads = {q_in}, .creates = {q_up}, .bwd_saved = q_saved},
           q_width_in, 0, q_width_in * q_width());

  const int kv_down = writer_.unsaved("kv_down.out", sequence_of(spec_.kv_down_width()));
  const int kv_compressed = writer_.saved("kv_compressed", sequence_of(spec_.kv_lora_rank));
  add_gemm({.kind = OpKind::kKvDown,
            .reads = {x.forward},
            .creates = {kv_down, kv_compressed},
            .bwd_saved = x.saved},
           0, 0, spec_.kv_down_width() * spec_.hidden);
  const int kv_normed = latent_norm(OpKind::kKvNorm, "kv", kv_compressed, spec_.kv_lora_rank);
  const int64_t up_width = spec_.kv_up_width() / options_.tp;
  const int kv_up = writer_.unsaved("kv_up.out", tokens_of(up_width));
  const int v = writer_.saved("v", tokens_of(spec_.attn_out_width() / options_.tp));
  add_gemm({.kind = OpKind::kKvUp,
            .reads = {kv_normed},
            .creates = {kv_up, v},
            .bwd_saved = {kv_normed}},
           spec_.kv_lora_rank, 0, spec_.kv_lora_rank * up_width);
  return {q_up, {kv_up, kv_down}, v};
}

int MegatronBuilder::latent_norm(OpKind kind, const std::string& which, int input, int64_t width) {
  const int out = writer_.saved(which + "_normed", sequence_of(width));
  const int rstd = writer_.constant(which + "_rstd", sequence_bytes(kFp32Bytes));
  writer_.add({.kind = kind, .reads = {input}, .creates = {out, rstd}, .bwd_saved = {input, rstd}});
  return out;
}

}  // namespace bagualu
