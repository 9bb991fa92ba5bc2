#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "bagualu/graph/graph.h"
#include "bagualu/graph/megatron_moe.h"
#include "bagualu/graph/megatron_writer.h"
#include "bagualu/model/model_spec.h"

namespace bagualu {

/// Writes the parts of build_megatron_graph(), layer by layer. Attention stands in
/// megatron_attention.cpp, MLP and experts in megatron_mlp.cpp, the rest in megatron_moe.cpp.
class MegatronBuilder {
 public:
  MegatronBuilder(const ModelSpec& spec, const MegatronGraphOptions& options, int64_t layers);

  Graph build();
  Graph build_head();

 private:
  struct Normed {
    int out, rstd;
  };
  /// A GEMM input in the precision that the GEMM reads, and what its backward reads.
  struct Operand {
    int forward;
    std::vector<int> saved;
  };
  /// What the rotations read, and the values.
  struct AttentionInputs {
    int q;
    std::vector<int> k;
    int v;
  };
  struct Mlp {
    OpKind fc1, act, fc2;
    std::string name;
    int64_t ffn;
  };
  struct Routing {
    int probs, row_map;
  };
  struct Rows {
    int rows, probs;         ///< probs -1: gate weights stay at the source
    std::vector<int> holds;  ///< alive until the layer's end
  };

  ByteFormula tokens_of(int64_t width) const { return {.per_token = width * element_bytes_}; }
  ByteFormula rows_of(int64_t width) const { return {.per_row = width * element_bytes_}; }
  /// Of the parts that sequence parallelism splits. `bytes` per token.
  ByteFormula sequence_bytes(int64_t bytes) const;
  ByteFormula sequence_of(int64_t width) const { return sequence_bytes(width * element_bytes_); }
  int64_t kv_heads() const;  ///< of one tp rank
  int64_t q_width() const { return spec_.q_width() / options_.tp; }
  int64_t kv_width() const { return kv_heads() * spec_.head_dim; }
  /// A GEMM's input: with an FP8 copy only that one is kept, where transients are told apart.
  int gemm_input(std::string_view name, ByteFormula bytes, Rebuild rebuild = Rebuild::kOp);
  bool keeps_copy_only() const { return options_.transients && options_.fp8_twins; }
  int64_t sent_rows() const;
  bool sorts_rows() const;
  bool gathers() const { return options_.tp > 1 && options_.sequence_parallel; }

  void begin();
  void end();
  void head();
  Normed norm(OpKind kind, std::string_view which, int input, bool gemm_only = false);
  Operand operand(int storage, const std::string& name, int64_t width, bool rows = false);
  /// Scratch of a GEMM whose input is gathered over tp (column parallel) or whose output is summed
  /// (row parallel), and of its weight's gradient.
  void add_gemm(MegatronStep step, int64_t gathered_width, int64_t summed_width, int64_t weights);

  void attention();
  void core_attention(int q, int k, int v);
  AttentionInputs projections(const Operand& x);
  AttentionInputs latent_projections(const Operand& x);
  int head_norm(OpKind kind, const std::string& which, int input, int64_t width, int64_t heads);
  int latent_norm(OpKind kind, const std::string& which, int input, int64_t width);

  void mlp_norm();
  void finish_layer(std::vector<int> branches);
  int mlp(const Mlp& mlp);
  /// A dropout's mask, a byte per element of the residual stream.
  void keep_mask(MegatronStep& sum, const std::string& name);
  /// An activation that is not one kernel keeps the product's first factor.
  void keep_gate(MegatronStep& activation, const std::string& name, ByteFormula bytes);
  void dense_mlp();
  void moe();
  Routing router();
  Rows dispatch(const Routing& routing);
  Rows receive(MegatronStep pack, std::vector<int> made);
  int experts(const Rows& rows);
  int combine(int expert_out, const Routing& routing, const Rows& rows);

  const ModelSpec& spec_;
  const MegatronGraphOptions& options_;
  const int64_t layers_;
  const int64_t element_bytes_;
  const int64_t tokens_;
  const ByteFormula hidden_bytes_;  ///< of the residual stream
  MegatronWriter writer_;
  bool last_layer_ = false;
  int64_t number_ = 0;  ///< of the layer, in the model
  int hidden_ = -1;     ///< layer input
  int hidden_mid_ = -1;
  int normed_mlp_ = -1;
  Operand mlp_input_ = {};
};

}  // namespace bagualu
