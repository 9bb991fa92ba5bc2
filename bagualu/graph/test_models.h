#pragma once

#include "bagualu/model/model_spec.h"

namespace bagualu {

/// Small models for tests; every feature of the native graph appears in one of them.
inline ModelSpec small_moe_spec() {
  ModelSpec spec;
  spec.name = "small";
  spec.layers = 2;
  spec.hidden = 32;
  spec.heads = 4;
  spec.kv_heads = 2;
  spec.head_dim = 16;
  spec.vocab = 64;
  spec.experts = 8;
  spec.top_k = 2;
  spec.expert_ffn = 48;
  spec.moe_layer = {1, 1};
  return spec;
}

/// Query and key norms, one dense layer, a shared expert, dropout.
inline ModelSpec rich_moe_spec() {
  ModelSpec spec = small_moe_spec();
  spec.name = "rich";
  spec.layers = 3;
  spec.moe_layer = {0, 1, 1};
  spec.dense_ffn = 80;
  spec.shared_ffn = 16;
  spec.qk_norm = true;
  spec.dropout = 0.1;
  return spec;
}

}  // namespace bagualu
