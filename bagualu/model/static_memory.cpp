#include "bagualu/model/static_memory.h"

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

StaticMemory static_memory(const ModelSpec& spec, const ParallelLayout& layout, Dtype dtype) {
  const ParameterLayout parameters = parameter_layout(spec, layout.ep_size);
  StaticMemory memory;
  memory.dense_bytes = add_group(&memory, "dense", parameters.dense_elements, dtype);
  memory.expert_bytes = add_group(&memory, "expert", parameters.expert_elements, dtype);
  for (const std::string& name : router_bias_names(spec)) {
    memory.buffer_bytes += add(&memory, name, spec.experts * dtype_bytes(Dtype::kFp32));
  }
  return memory;
}

}  // namespace bagualu
