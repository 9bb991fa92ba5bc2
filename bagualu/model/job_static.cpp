#include "bagualu/model/job_static.h"

#include <algorithm>
#include <array>
#include <utility>

namespace bagualu {
namespace {

/// Streams of Transformer Engine's grouped GEMM, a workspace each.
constexpr int64_t kGroupedStreams = 4;

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

/// Shapes of weights whose GEMM hands autograd a stand-in, each once.
class ShapeSet {
 public:
  void add(int64_t rows, int64_t columns) {
    if (rows == 0 || columns == 0) return;
    const std::pair<int64_t, int64_t> shape = {rows, columns};
    if (std::find(shapes_.begin(), shapes_.begin() + count_, shape) != shapes_.begin() + count_) {
      return;
    }
    shapes_[static_cast<size_t>(count_++)] = shape;
    elements_ += rows * columns;
  }
  int64_t elements() const { return elements_; }

 private:
  std::array<std::pair<int64_t, int64_t>, 32> shapes_;
  int count_ = 0;
  int64_t elements_ = 0;
};

/// What the rank's stages hold, as far as state depends on it.
struct Held {
  bool dense = false, moe = false, embedding = false, head = false, mtp = false;
};

Held held_by(const Job& job, const std::vector<int64_t>& stages) {
  Held held;
  for (const int64_t s : stages) {
    const StageContent& stage = job.stages[static_cast<size_t>(s)];
    for (int64_t i = 0; i < stage.layer_count; ++i) {
      (job.model.is_moe(stage.first_layer + i) ? held.moe : held.dense) = true;
    }
    if (stage.mtp_layers > 0) {
      held.mtp = true;
      (job.model.is_moe(job.model.layers - 1) ? held.moe : held.dense) = true;
    }
    held.embedding = held.embedding || stage.embedding;
    held.head = held.head || stage.head;
  }
  return held;
}

void add_attention(const Job& job, ShapeSet& shapes) {
  const ModelSpec& m = job.model;
  const int64_t tp = job.layout.tp;
  if (m.has_mla()) {
    const int64_t q_in = m.q_lora_rank > 0 ? m.q_lora_rank : m.hidden;
    if (m.q_lora_rank > 0) shapes.add(m.q_lora_rank, m.hidden);
    shapes.add(m.q_width() / tp, q_in);
    shapes.add(m.kv_down_width(), m.hidden);
    shapes.add(m.kv_up_width() / tp, m.kv_lora_rank);
  } else {
    shapes.add(m.qkv_width() / tp, m.hidden);
  }
  shapes.add(m.hidden, m.attn_out_width() / tp);
}

void add_mlp(const ModelSpec& m, int64_t ffn, int64_t split, ShapeSet& shapes) {
  shapes.add(m.fc1_factor() * ffn / split, m.hidden);
  shapes.add(m.hidden, ffn / split);
}

int64_t stand_in_bytes(const Job& job, const Held& held) {
  const AllocatorSettings& a = job.allocator;
  if (!job.accumulation_fusion || !a.weight_grad_stand_ins || !a.engine_gemms) return 0;
  ShapeSet shapes;
  if (held.dense || held.moe) add_attention(job, shapes);
  if (held.dense) add_mlp(job.model, job.model.dense_ffn, job.layout.tp, shapes);
  if (held.moe) {
    add_mlp(job.model, job.model.shared_ffn, job.layout.tp, shapes);
    add_mlp(job.model, job.model.expert_ffn, job.layout.etp, shapes);
  }
  if (held.head || held.mtp) shapes.add(job.padded_vocab() / job.layout.tp, job.model.hidden);
  if (held.mtp) shapes.add(job.model.hidden / job.layout.tp, 2 * job.model.hidden);
  return shapes.elements() * job.optimizer.parameter_bytes;
}

/// Grouped GEMMs have workspaces of their own; PyTorch multiplies in the head and the router.
int64_t workspace_bytes(const Job& job, const Held& held) {
  const int64_t engines = 1 + (held.moe ? kGroupedStreams : 0);
  const bool blas = held.head || held.moe || held.mtp || !job.allocator.engine_gemms;
  const int64_t threads = blas ? 2 : 0;
  return engines * job.allocator.engine_workspace_bytes +
         threads * job.allocator.blas_workspace_bytes;
}

/// The rotary table in fp32; the buffer into which inputs are gathered, of the head or of every
/// layer; the one through which Megatron-Kwai's collectives and GEMMs overlap.
int64_t buffer_bytes(const Job& job, const Held& held) {
  constexpr int64_t kFp32Bytes = 4;
  int64_t bytes = 0;
  if (job.model.learned_positions == 0) {
    bytes += job.seq / job.layout.cp * job.model.rope_dim() * kFp32Bytes;
  }
  const int64_t whole = job.tokens() * job.model.hidden * job.element_bytes;
  const bool own = !job.allocator.engine_gemms;
  if (job.layout.sequence_parallel && job.layout.tp > 1) {
    if (held.head || held.mtp || own) bytes += whole;
    if (own && job.overlap.tp) bytes += whole;
  }
  return bytes;
}

/// FP8 copies of the layers' weights, by rows and by columns, beside parameters in bf16: made once
/// a step and kept. Latents' down projections, whole on every rank, are left out.
int64_t fp8_weight_bytes(const Job& job, const ModelParameters& parameters,
                         const std::vector<int64_t>& stages) {
  if (!job.fp8 || job.optimizer.parameter_bytes < 2) return 0;
  ParameterSums sums;
  for (const int64_t s : stages) {
    const StageContent& stage = job.stages[static_cast<size_t>(s)];
    sums += stage_parameters(job.model, parameters, stage, true);
  }
  sums.replicated = 0;
  sums.vocab_columns = 0;
  return 2 * rank_elements(sums, job.model, job.layout, job.padded_vocab()).total();
}

struct StateOf {
  const char* name;
  int64_t element_bytes;
  bool split;  ///< by the distributed optimizer
};

std::array<StateOf, 6> states(const OptimizerSettings& o) {
  const bool moments = o.name != "sgd";
  return {{{"parameters", o.parameter_bytes, false},
           {"gradients", o.gradient_bytes, false},
           {"main_gradients", o.main_gradient_bytes, true},
           {"masters", o.master_bytes, true},
           {"exp_avg", moments ? o.exp_avg_bytes : 0, true},
           {"exp_avg_sq", moments ? o.exp_avg_sq_bytes : 0, true}}};
}

struct Divisors {
  int64_t dense, expert;
};

Divisors divisors(const Job& job) {
  if (!job.optimizer.distributed) return {1, 1};
  const int64_t instances = std::max<int64_t>(1, job.optimizer.instances);
  return {std::max<int64_t>(1, job.layout.dp() * job.layout.cp / instances),
          std::max<int64_t>(1, job.layout.expert_dp() / instances)};
}

}  // namespace

int64_t JobStatic::bytes() const {
  int64_t sum = 0;
  for (const StaticBucket& bucket : buckets) sum += bucket.bytes;
  return sum;
}

int64_t JobStatic::bytes_of(const std::string& name) const {
  int64_t sum = 0;
  for (const StaticBucket& bucket : buckets) {
    if (bucket.name == name) sum += bucket.bytes;
  }
  return sum;
}

std::vector<int64_t> stages_held(const Job& job, int64_t pp_rank) {
  std::vector<int64_t> held = job.stages_of_rank(pp_rank);
  const int64_t mirror = job.layout.pp - 1 - pp_rank;
  if (job.pipeline == PipelineKind::kDualPipe && mirror != pp_rank) held.push_back(mirror);
  return held;
}

RankElements job_rank_elements(const Job& job, const ModelParameters& parameters, int64_t pp_rank) {
  const std::vector<int64_t> stages = stages_held(job, pp_rank);
  bool embedding = false;
  for (const int64_t s : stages) embedding |= job.stages[static_cast<size_t>(s)].embedding;
  ParameterSums sums;
  bool copied = false;
  for (const int64_t s : stages) {
    const StageContent& stage = job.stages[static_cast<size_t>(s)];
    sums += stage_parameters(job.model, parameters, stage, embedding || copied);
    copied = copied || stage.head || stage.mtp_layers > 0;
  }
  return rank_elements(sums, job.model, job.layout, job.padded_vocab());
}

int64_t job_static_bytes(const Job& job, const ModelParameters& parameters, int64_t pp_rank) {
  const RankElements elements = job_rank_elements(job, parameters, pp_rank);
  const Divisors by = divisors(job);
  int64_t bytes = 0;
  for (const StateOf& state : states(job.optimizer)) {
    bytes += state.element_bytes * (state.split ? divide_up(elements.dense, by.dense) +
                                                      divide_up(elements.expert, by.expert)
                                                : elements.total());
  }
  const std::vector<int64_t> stages = stages_held(job, pp_rank);
  const Held held = held_by(job, stages);
  return bytes + fp8_weight_bytes(job, parameters, stages) + stand_in_bytes(job, held) +
         workspace_bytes(job, held) + buffer_bytes(job, held);
}

JobStatic job_static(const Job& job, int64_t pp_rank) {
  JobStatic result;
  const ModelParameters parameters = model_parameters(job.model);
  result.elements = job_rank_elements(job, parameters, pp_rank);
  const Divisors by = divisors(job);
  for (const StateOf& state : states(job.optimizer)) {
    for (const bool expert : {false, true}) {
      const int64_t elements = expert ? result.elements.expert : result.elements.dense;
      const int64_t divisor = !state.split ? 1 : expert ? by.expert : by.dense;
      const int64_t bytes = divide_up(elements, divisor) * state.element_bytes;
      if (bytes == 0) continue;
      result.buckets.push_back(
          {state.name, expert ? "expert" : "dense", elements, divisor, state.element_bytes, bytes});
    }
  }
  const std::vector<int64_t> stages = stages_held(job, pp_rank);
  const Held held = held_by(job, stages);
  const auto add = [&](const char* name, int64_t bytes) {
    if (bytes > 0) result.buckets.push_back({name, "", bytes, 1, 1, bytes});
  };
  add("fp8_weights", fp8_weight_bytes(job, parameters, stages));
  add("weight_gradient_stand_ins", stand_in_bytes(job, held));
  add("gemm_workspaces", workspace_bytes(job, held));
  add("buffers", buffer_bytes(job, held));
  return result;
}

}  // namespace bagualu
