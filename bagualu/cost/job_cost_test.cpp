#include "bagualu/cost/job_cost.h"

#include <gtest/gtest.h>

#include "bagualu/base/error.h"
#include "bagualu/cost/job_ops.h"

namespace bagualu {
namespace {

/// 2 heads of 64 over hidden 128, gated MLP of 512, 1,024 words, 1,024 tokens.
Job dense_job() {
  Job job;
  ModelSpec& m = job.model;
  m.layers = 4;
  m.hidden = 128;
  m.heads = 2;
  m.kv_heads = 2;
  m.head_dim = 64;
  m.vocab = 1024;
  m.dense_ffn = 512;
  m.moe_layer.assign(4, 0);
  job.seq = 1024;
  job.stages = default_stages(m, 1, 1);
  return job;
}

Job moe_job(int64_t ep) {
  Job job = dense_job();
  ModelSpec& m = job.model;
  m.experts = 8;
  m.top_k = 2;
  m.expert_ffn = 256;
  m.dense_ffn = 0;
  m.moe_layer.assign(4, 1);
  job.layout.ep = job.layout.world_size = ep;
  return job;
}

/// A teraflop per second, 100 GB/s of memory, links of 10 and 1 GB/s, all perfectly used.
SystemSpec round_system() {
  SystemSpec s;
  s.bf16_flops_per_s = s.fp32_flops_per_s = s.fp8_flops_per_s = 1e12;
  s.compute_efficiency_fraction = s.gemm_efficiency_fraction = 1;
  s.grouped_gemm_efficiency_fraction = 1;
  s.attention_forward_efficiency_fraction = s.attention_backward_efficiency_fraction = 1;
  s.memory_bytes_per_s = 1e11;
  s.memory_efficiency_fraction = s.optimizer_efficiency_fraction = 1;
  s.link_bytes_per_s = 1e9;
  s.node_link_bytes_per_s = 1e10;
  s.collective_efficiency_fraction = 1;
  s.collective_latency_ns = 0;
  s.comm_overlap_fraction = 1;
  s.d2h_bytes_per_s = s.h2d_bytes_per_s = 1e10;
  return s;
}

const JobOp& op_named(const JobOpList& ops, std::string_view name) {
  for (const JobOp& op : ops) {
    if (op.name == name) return op;
  }
  throw std::out_of_range(std::string(name));
}

double model_flops(const JobOpList& ops) {
  double flops = 0;
  for (const JobOp& op : ops) flops += op.model_flops;
  return flops;
}

TEST(JobOps, DenseLayerMultipliesWhatItsWeightsAndVisibleKeysSay) {
  const Job job = dense_job();
  // Weights: qkv 128 * 384, proj 128 * 128, fc1 128 * 1024, fc2 512 * 128 = 262,144; twice that per
  // token. Attention: 512 keys on average, 2 products of width 128.
  const double expected = 1024.0 * 2 * 262144 + 1024.0 * 512 * 2 * 2 * 128;
  EXPECT_DOUBLE_EQ(model_flops(layer_ops(job, {}, 1)), expected);
}

TEST(JobOps, WindowBoundsTheKeysThatATokenSees) {
  Job job = dense_job();
  job.model.attention_window = 256;
  job.model.windowed_layer = {1, 0, 1, 0};
  // 256 keys but for the first 256 tokens: 256 - 256^2 / (2 * 1024) = 224 on average.
  const JobOpList ops = layer_ops(job, layer_kind(job.model, 0), 1);
  EXPECT_DOUBLE_EQ(op_named(ops, "core_attn").forward.flops, 1024.0 * 224 * 2 * 2 * 128);
  EXPECT_FALSE(layer_kind(job.model, 1).windowed);
}

TEST(JobOps, TensorParallelRanksShareTheProductsAndExchangeTheSequence) {
  Job job = dense_job();
  job.layout.tp = job.layout.world_size = 2;
  job.layout.sequence_parallel = true;
  const JobOpList whole = layer_ops(dense_job(), {}, 1);
  const JobOpList half = layer_ops(job, {}, 1);
  EXPECT_DOUBLE_EQ(model_flops(half), model_flops(whole) / 2);
  // Gather of [1024, 128] in bf16 of which the rank has half: 131,072 bytes come in.
  EXPECT_DOUBLE_EQ(op_named(half, "qkv").forward.wire_bytes, 131072);
  EXPECT_DOUBLE_EQ(op_named(half, "attn_proj").input_gradient.wire_bytes, 131072);
  EXPECT_DOUBLE_EQ(op_named(half, "attn_norm").forward.memory_bytes,
                   op_named(whole, "attn_norm").forward.memory_bytes / 2);
  job.layout.sequence_parallel = false;  // all-reduce: twice the bytes, and none in the backward
  const JobOpList reduced = layer_ops(job, {}, 1);
  EXPECT_DOUBLE_EQ(op_named(reduced, "attn_proj").forward.wire_bytes, 262144);
  EXPECT_DOUBLE_EQ(op_named(reduced, "qkv").forward.wire_bytes, 0);
}

TEST(JobOps, ExpertWorkFollowsTheLoad) {
  const Job job = moe_job(4);
  const JobOpList calm = layer_ops(job, {.moe = true}, 1);
  const JobOpList hot = layer_ops(job, {.moe = true}, 2.5);
  // 1,024 tokens * 2 experts = 2,048 rows through [128, 512].
  EXPECT_DOUBLE_EQ(op_named(calm, "expert_fc1").forward.flops, 2.0 * 2048 * 128 * 512);
  EXPECT_DOUBLE_EQ(op_named(hot, "expert_fc1").forward.flops, 2.5 * 2.0 * 2048 * 128 * 512);
  // Three of four rows leave the rank: 1,536 * 256 bytes.
  EXPECT_DOUBLE_EQ(op_named(calm, "dispatch").forward.wire_bytes, 1536 * 256);
  EXPECT_DOUBLE_EQ(op_named(hot, "qkv").forward.flops, op_named(calm, "qkv").forward.flops);
}

TEST(JobOps, CapacityBoundsAndPaddingFixesTheLoad) {
  Job job = moe_job(4);
  job.moe.capacity_factor = 1.25;
  EXPECT_DOUBLE_EQ(effective_factor(job, 3.0), 1.25);
  EXPECT_DOUBLE_EQ(effective_factor(job, 1.1), 1.1);
  job.moe.pad_to_capacity = true;
  EXPECT_DOUBLE_EQ(effective_factor(job, 0.5), 1.25);
}

TEST(JobOps, ModelFlopsAreThoseOfTheTokensWhereverTheyGo) {
  Job job = moe_job(4);
  const double calm = model_flops(layer_ops(job, {.moe = true}, 1));
  EXPECT_DOUBLE_EQ(model_flops(layer_ops(job, {.moe = true}, 2.5)), calm);
  job.moe.capacity_factor = 1.5;
  job.moe.pad_to_capacity = true;
  EXPECT_DOUBLE_EQ(model_flops(layer_ops(job, {.moe = true}, 1)), calm);
}

TEST(JobOps, AllGatherDispatcherSendsEveryTokenToAllRanks) {
  Job job = moe_job(4);
  job.moe.dispatcher = "allgather";
  // 1,024 tokens of each of three other ranks, 256 bytes each.
  const JobOpList ops = layer_ops(job, {.moe = true}, 1);
  EXPECT_DOUBLE_EQ(op_named(ops, "dispatch").forward.wire_bytes, 3 * 1024 * 256);
}

TEST(JobLinks, GroupsInsideANodeUseItsLinkAndOthersEveryRanksPort) {
  const SystemSpec system = round_system();
  Job job = dense_job();
  job.layout.tp = 4;
  job.layout.pp = 2;
  job.layout.world_size = 64;  // dp 8, nodes of 8: two data-parallel ranks of a group in each
  const JobLinks links = job_links(job, system);
  EXPECT_DOUBLE_EQ(links.tp_bytes_per_s, 1e10);
  EXPECT_DOUBLE_EQ(links.dp_bytes_per_s, 2e9);
  EXPECT_DOUBLE_EQ(links.pp_bytes_per_s, 1e9);
  job = moe_job(16);
  // 8 of the 15 other ranks are outside, over one port each way: 15 / 8 of its rate.
  EXPECT_NEAR(job_links(job, system).ep_bytes_per_s, 15.0 / 8 * 1e9, 1);
  // Two nodes, two experts of a token: 2 (1 - 1/4) = 1.5 nodes are hit, 3/4 of the copies cross.
  job.moe.dispatcher = "flex";
  EXPECT_NEAR(job_links(job, system).ep_bytes_per_s, 15.0 / 8 * 1e9 / 0.75, 1);
}

TEST(JobCost, GemmTakesItsArithmeticAndHalfItsTraffic) {
  Job job = dense_job();
  const SystemSpec system = round_system();
  JobCost cost(job, system);
  // lm_head forward: 2 * 1024 * 128 * 1024 flops = 268,435 ns of arithmetic; bytes 2 * (1024 * 128
  // + 1024 * 1024 + 128 * 1024) = 2,621,440 = 26,214 ns, half shown. Norm: 2 passes over 262,144
  // bytes = 5,243 ns. Loss: 34 bytes per logit = 356,516 ns.
  EXPECT_NEAR(cost.head().forward_ns, 268435.5 + 13107.2 + 5242.9 + 356515.8, 1);
}

TEST(JobCost, TakesMeasuredOperatorsWhereTheSystemHasThem) {
  Job job = dense_job();
  SystemSpec system = round_system();
  // 1 ns per 1,000 flops at 1e8, 2 ns per 1,000 at 1e10.
  system.measured_operators = measured_operators_from_json(
      parse_json_object(R"({"gemm": [[1e8, 1e5], [1e10, 2e7]]})", "table"), "table");
  EXPECT_DOUBLE_EQ(measured_ns(system.measured_operators.gemm, 1e7), 1e4);
  EXPECT_DOUBLE_EQ(measured_ns(system.measured_operators.gemm, 1e9), 1.5e6);
  EXPECT_DOUBLE_EQ(measured_ns(system.measured_operators.gemm, 2e10), 4e7);
  JobCost cost(job, system);
  const double products = measured_ns(system.measured_operators.gemm, 2.0 * 1024 * 128 * 1024);
  EXPECT_NEAR(cost.head().forward_ns, products + 5242.9 + 356515.8, 1);
  EXPECT_EQ(to_json(system.measured_operators)["gemm"].size(), 2u);
  for (const char* bad :
       {R"({"gem": []})", R"({"gemm": [[2, 1], [1, 1]]})", R"({"gemm": [[1]]})"}) {
    EXPECT_THROW(measured_operators_from_json(parse_json_object(bad, "table"), "table"),
                 InvalidInput);
  }
}

TEST(JobCost, HidesCollectivesBesideComputeOnlyIfTheFrameworkIsTold) {
  Job job = dense_job();
  job.layout.tp = job.layout.world_size = 2;
  job.layout.sequence_parallel = true;
  const SystemSpec system = round_system();
  const double exposed = JobCost(job, system).layer(0, 1).forward_exposed_ns;
  // Four collectives of 131,072 bytes at 10 GB/s: 52,429 ns.
  EXPECT_NEAR(exposed, 4 * 13107.2, 0.1);
  job.overlap.tp = true;
  EXPECT_LT(JobCost(job, system).layer(0, 1).forward_exposed_ns, 1);
}

TEST(JobCost, RecomputeRepeatsTheForwardOfItsModules) {
  Job job = dense_job();
  const SystemSpec system = round_system();
  job.recompute.granularity = RecomputeGranularity::kFull;
  JobCost full(job, system);
  EXPECT_DOUBLE_EQ(full.layer(0, 1).recompute_ns, full.layer(0, 1).forward_ns);
  job.recompute.granularity = RecomputeGranularity::kSelective;
  job.recompute.modules = {"core_attn"};
  JobCost selective(job, system);
  // 2 products over 512 keys: 268,435 ns of arithmetic and half of 1,048,576 bytes' 10,486 ns.
  EXPECT_NEAR(selective.layer(0, 1).recompute_ns, 268435.5 + 5242.9, 1);
}

TEST(JobCost, ExchangesBesideTheSharedExpertIfTold) {
  Job job = moe_job(4);
  job.model.shared_ffn = 1024;
  const SystemSpec system = round_system();
  const double plain = JobCost(job, system).layer(0, 1).forward_ns;
  job.overlap.shared_expert = true;
  EXPECT_LT(JobCost(job, system).layer(0, 1).forward_ns, plain);
}

}  // namespace
}  // namespace bagualu
