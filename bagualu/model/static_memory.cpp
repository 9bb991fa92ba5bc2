#include "bagualu/model/static_memory.h"

#include <algorithm>
#include <utility>

#include "bagualu/base/units.h"

namespace bagualu {
namespace {

int64_t add(StaticMemory* memory, std::string name, int64_t bytes) {
  const int64_t rounded = round_up(bytes, kStorageGranularityBytes);
  memory->storages.push_back({std::move(name), rounded});
  return rounded;
}

int64_t add_group(StaticMemory* memory, const std::string& group, int64_t elements, Dtype dtype) {
  if (elements == 0) return 0;
  int64_t bytes = 0;
  for (const char* buffer : {".master", ".gradient", ".exp_avg", ".exp_avg_sq"}) {
    bytes += add(memory, group + buffer, elements * dtype_bytes(Dtype::kFp32));
  }
  if (dtype != Dtype::kFp32)
    bytes += add(memory, group + ".working", elements * dtype_bytes(dtype));
  return bytes;
}

}  // namespace

StaticMemory static_memory(const ModelSpec& spec, const ParallelLayout& layout, Dtype dtype,
                           int64_t pp_rank) {
  const std::vector<StageSlice> slices = rank_slices(spec, layout, pp_rank);
  const ParameterLayout parameters = parameter_layout(spec, layout.ep_size, slices);
  StaticMemory memory;
  memory.dense_bytes = add_group(&memory, "dense", parameters.dense_elements, dtype);
  memory.expert_bytes = add_group(&memory, "expert", parameters.expert_elements, dtype);
  for (const std::string& name : router_bias_names(spec, slices)) {
    memory.buffer_bytes += add(&memory, name, spec.experts * dtype_bytes(Dtype::kFp32));
  }
  return memory;
}

void add_step_tables(const ModelSpec& spec, const ParallelLayout& layout, const TrainShape& shape,
                     StaticMemory& memory, int64_t pp_rank, int64_t slots) {
  constexpr int64_t kInt64 = 8, kFp64 = 8, kFp32 = 4;
  const std::vector<StageSlice> slices = rank_slices(spec, layout, pp_rank);
  const auto moe_layers = static_cast<int64_t>(router_bias_names(spec, slices).size());
  const auto table = [&](const char* name, int64_t bytes, int64_t count = 1) {
    for (int64_t i = 0; i < count; ++i) memory.table_bytes += add(&memory, name, bytes);
  };
  const auto held = [&](bool StageSlice::*part) {
    return std::any_of(slices.begin(), slices.end(),
                       [&](const StageSlice& slice) { return slice.*part; });
  };
  table("step.rope_cos", shape.seq * spec.rope_dim() * kFp32);
  table("step.rope_sin", shape.seq * spec.rope_dim() * kFp32);
  if (held(&StageSlice::embedding)) table("step.ids", shape.tokens() * kInt64, slots);
  if (held(&StageSlice::head)) table("step.targets", shape.tokens() * kInt64, slots);
  table("step.scalars", kReducedScalars * kFp64);
  table("step.tokens_per_expert", std::max<int64_t>(moe_layers, 1) * spec.experts * kFp64);
  if (layout.pp_size > 1) table("step.pipeline_sums", (spec.layers + 1) * kFp64);
  if (layout.ep_size > 1) {
    table("step.counts_sent", layout.ep_size * spec.experts * kInt64);
    table("step.counts_received", layout.ep_size * spec.experts * kInt64);
  }
  table("step.tokens", shape.microbatches * shape.micro_batch_size * (shape.seq + 1) * kInt64);
}

}  // namespace bagualu
