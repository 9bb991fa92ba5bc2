#include "bagualu/schedule/job_time.h"

#include <algorithm>
#include <cmath>

namespace bagualu {
namespace {

constexpr double kNsPerS = 1e9;

int64_t whole(double ns) { return static_cast<int64_t>(std::llround(ns)); }

/// What one pipeline rank holds, in elements.
struct RankWeights {
  double dense = 0;
  double expert = 0;
};

/// The passes of one job, stage by stage.
class JobTimer {
 public:
  JobTimer(const Job& job, const SystemSpec& system, const RoutedLoads& loads)
      : job_(job), system_(system), loads_(loads), cost_(job, system) {}

  JobTime time();

 private:
  PartTimes stage_parts(const StageContent& stage);
  StageTime stage_time(const PartTimes& parts, const StageContent& stage) const;
  double exposed_copy_ns(double bytes, double bytes_per_s, double window_ns) const;
  void add_reductions(JobTime& time) const;
  double reduce_ns(double bytes, int64_t ranks, double bytes_per_s) const;
  double optimizer_ns(const RankWeights& weights) const;
  void describe_longest(JobTime& time) const;
  double longest_rank_ns(int64_t* rank) const;

  const Job& job_;
  const SystemSpec& system_;
  const RoutedLoads& loads_;
  JobCost cost_;
  std::vector<StageTime> stages_;
  std::vector<StagePasses> passes_;
  std::vector<RankWeights> weights_;  ///< by pipeline rank
  double model_flops_ = 0;            ///< forward of one micro-batch on one replica's rank
};

PartTimes JobTimer::stage_parts(const StageContent& stage) {
  PartTimes parts;
  const RecomputeSettings& recompute = job_.recompute;
  const bool full = recompute.granularity == RecomputeGranularity::kFull;
  for (int64_t i = 0; i < stage.layer_count; ++i) {
    const int64_t layer = stage.first_layer + i;
    const double factor =
        loads_.by_layer.empty() ? loads_.factor : loads_.by_layer[static_cast<size_t>(layer)];
    const PartTimes& times = cost_.layer(layer, factor);
    parts += times;
    if (full && recompute.block && i >= recompute.layers) {
      parts.recompute_ns -= times.recompute_ns;
      parts.recompute_exposed_ns -= times.recompute_exposed_ns;
    }
  }
  for (int64_t i = 0; i < stage.mtp_layers; ++i) parts += cost_.mtp_layer(loads_.factor);
  const auto add_ends = [&](const PartTimes& times) {
    PartTimes part = times;
    part.recompute_ns = part.recompute_exposed_ns = part.offload_bytes = 0;
    parts += part;
  };
  if (stage.embedding) add_ends(cost_.embedding());
  if (stage.head) add_ends(cost_.head());
  return parts;
}

/// Of a copy that may run beside a pass of `window_ns`.
double JobTimer::exposed_copy_ns(double bytes, double bytes_per_s, double window_ns) const {
  if (bytes == 0) return 0;
  const double copy = bytes * kNsPerS / bytes_per_s;
  return copy - std::min(copy * system_.copy_hidden_fraction, window_ns);
}

StageTime JobTimer::stage_time(const PartTimes& parts, const StageContent& stage) const {
  // A pass that sends to the next rank waits for it unless the framework overlaps it.
  const bool overlapped = job_.pipeline == PipelineKind::kInterleaved && job_.overlap.p2p;
  const double send = overlapped ? 0 : cost_.send_ns();
  const double forward_send = stage.head ? 0 : send;
  const double backward_send = stage.embedding ? 0 : send;
  const double backward = parts.backward_ns() + parts.recompute_ns;
  const double out =
      exposed_copy_ns(parts.offload_bytes, system_.d2h_bytes_per_s, parts.forward_ns);
  const double in = exposed_copy_ns(parts.offload_bytes, system_.h2d_bytes_per_s, backward);
  StageTime time;
  time.forward_ns = whole(parts.forward_ns + forward_send + out);
  time.recompute_ns = whole(parts.recompute_ns);
  time.weight_gradient_ns = whole(parts.weight_gradient_ns);
  time.input_gradient_ns = whole(parts.input_gradient_ns + backward_send + in);
  time.backward_ns = time.input_gradient_ns + time.weight_gradient_ns + time.recompute_ns;
  time.exposed_communication_ns = whole(parts.forward_exposed_ns + parts.backward_exposed_ns +
                                        parts.recompute_exposed_ns + forward_send + backward_send);
  time.exposed_offload_ns = whole(in + out);
  time.offload_bytes = whole(parts.offload_bytes);
  return time;
}

double JobTimer::reduce_ns(double bytes, int64_t ranks, double bytes_per_s) const {
  if (ranks == 1 || bytes == 0) return 0;
  const double share = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  return static_cast<double>(system_.collective_latency_ns) + bytes * share * kNsPerS / bytes_per_s;
}

/// Traffic of the step over the rank's shard, and of clearing the gradient buffer.
double JobTimer::optimizer_ns(const RankWeights& weights) const {
  const OptimizerSettings& o = job_.optimizer;
  const double gradient = static_cast<double>(o.gradient_bytes);
  const bool adam = o.name != "sgd";
  const double moments = adam ? static_cast<double>(o.exp_avg_bytes + o.exp_avg_sq_bytes) : 0;
  const double main = static_cast<double>(o.main_gradient_bytes);
  // Read for the norm, read and written by the clipping, read by the step; where the optimizer
  // keeps gradients of its own, they are cast first and the rest is done on them.
  const double gradients = main > 0 ? gradient + 5 * main : 4 * gradient;
  const double parameters = 2 * (static_cast<double>(o.master_bytes) + moments) +
                            static_cast<double>(o.master_bytes + o.parameter_bytes);
  const double per_element = gradients + parameters;
  const JobLayout& l = job_.layout;
  const double dense_ranks = o.distributed ? static_cast<double>(l.dp() * l.cp) : 1;
  const double expert_ranks = o.distributed ? static_cast<double>(l.expert_dp()) : 1;
  const double bytes = per_element * (weights.dense / dense_ranks + weights.expert / expert_ranks) +
                       gradient * (weights.dense + weights.expert);
  return bytes * kNsPerS / (system_.memory_bytes_per_s * system_.optimizer_efficiency_fraction);
}

/// Gradient sums, parameter gathers and the optimizer, of the rank that is through last.
void JobTimer::add_reductions(JobTime& time) const {
  const JobLayout& l = job_.layout;
  const OptimizerSettings& o = job_.optimizer;
  const JobLinks& links = cost_.links();
  const double passes = o.distributed ? 1 : 2;  // reduce-scatter, or all-reduce
  double early_ns = 0;  // how long before the last pass of the step this rank is through
  for (int64_t rank = 0; rank < l.pp; ++rank) {
    const RankWeights& w = weights_[static_cast<size_t>(rank)];
    const auto both = [&](double bytes, double times) {
      return times * (reduce_ns(w.dense * bytes, l.dp() * l.cp, links.dp_bytes_per_s) +
                      reduce_ns(w.expert * bytes, l.expert_dp(), links.expert_dp_bytes_per_s));
    };
    double reduce = both(static_cast<double>(o.gradient_bytes), passes);
    double gather = o.distributed ? both(static_cast<double>(o.parameter_bytes), 1) : 0;
    double forward = 0, backward = 0;
    for (const int64_t stage : job_.stages_of_rank(rank)) {
      forward += passes_[static_cast<size_t>(stage)].forward_ns;
      backward += passes_[static_cast<size_t>(stage)].backward_ns();
    }
    const double hidden = system_.comm_overlap_fraction;
    if (job_.overlap_grad_reduce) reduce -= hidden * std::min(reduce, backward);
    if (job_.overlap_param_gather) gather -= hidden * std::min(gather, forward);
    time.gradient_reduce_ns = std::max(time.gradient_reduce_ns, whole(reduce - early_ns));
    time.parameter_gather_ns = std::max(time.parameter_gather_ns, whole(gather));
    time.optimizer_ns = std::max(time.optimizer_ns, whole(optimizer_ns(w)));
    early_ns += passes_[static_cast<size_t>(rank)].backward_ns();
  }
}

double JobTimer::longest_rank_ns(int64_t* rank) const {
  double longest = 0;
  for (int64_t r = 0; r < job_.layout.pp; ++r) {
    double busy = 0;
    for (const int64_t stage : job_.stages_of_rank(r)) {
      busy += passes_[static_cast<size_t>(stage)].total_ns();
    }
    if (busy > longest) {
      longest = busy;
      *rank = r;
    }
  }
  return longest;
}

void JobTimer::describe_longest(JobTime& time) const {
  int64_t rank = 0;
  const double busy = longest_rank_ns(&rank);
  const int64_t m = job_.microbatches;
  time.bubble_ns = time.pipeline_ns - whole(busy * static_cast<double>(m));
  for (const int64_t stage : job_.stages_of_rank(rank)) {
    const StageTime& s = stages_[static_cast<size_t>(stage)];
    time.exposed_communication_ns += m * s.exposed_communication_ns;
    time.recompute_ns += m * s.recompute_ns;
    time.exposed_offload_ns += m * s.exposed_offload_ns;
  }
}

JobTime JobTimer::time() {
  weights_.resize(static_cast<size_t>(job_.layout.pp));
  for (size_t s = 0; s < job_.stages.size(); ++s) {
    const PartTimes parts = stage_parts(job_.stages[s]);
    RankWeights& weights =
        weights_[static_cast<size_t>(job_.rank_of_stage(static_cast<int64_t>(s)))];
    weights.dense += parts.dense_weights;
    weights.expert += parts.expert_weights;
    model_flops_ += parts.model_flops;
    stages_.push_back(stage_time(parts, job_.stages[s]));
    const StageTime& stage = stages_.back();
    passes_.push_back({static_cast<double>(stage.forward_ns),
                       static_cast<double>(stage.input_gradient_ns + stage.recompute_ns),
                       static_cast<double>(stage.weight_gradient_ns)});
  }
  JobTime time;
  time.pipeline_ns = whole(pipeline_ns(job_.pipeline, passes_, job_.layout.pp, job_.microbatches));
  add_reductions(time);
  describe_longest(time);
  time.overhead_ns = system_.step_overhead_ns;
  time.iteration_ns = time.pipeline_ns + time.gradient_reduce_ns + time.parameter_gather_ns +
                      time.optimizer_ns + time.overhead_ns;
  const JobLayout& l = job_.layout;
  const double seconds = static_cast<double>(time.iteration_ns) / kNsPerS;
  const double replicas = static_cast<double>(l.world_size / l.pp);
  time.model_flops = 3 * model_flops_ * replicas * static_cast<double>(job_.microbatches);
  time.model_flops_per_s_per_device =
      time.model_flops / seconds / static_cast<double>(l.world_size);
  const double peak = job_.fp8                  ? system_.fp8_flops_per_s
                      : job_.element_bytes == 4 ? system_.fp32_flops_per_s
                                                : system_.bf16_flops_per_s;
  time.mfu_fraction = time.model_flops_per_s_per_device / peak;
  time.tokens_per_s =
      static_cast<double>(job_.micro_batch_size * job_.seq * job_.microbatches * l.dp()) / seconds;
  time.stages = std::move(stages_);
  return time;
}

/// Longest of the paths that run down to a rank, through all its passes, and back up; a rank's
/// passes are bounded below by what it does and by what it waits for.
double one_f_one_b_ns(const std::vector<StagePasses>& stages, double microbatches) {
  double below = 0;  // forward and backward of the stages behind
  for (const StagePasses& stage : stages) below += stage.total_ns();
  double above = 0;  // of the stages before
  double longest = 0;
  const double p = static_cast<double>(stages.size());
  for (size_t s = 0; s < stages.size(); ++s) {
    const StagePasses& stage = stages[s];
    below -= stage.total_ns();
    // In flight at once: further forwards run between the backwards.
    const double ahead = std::min(microbatches, p - static_cast<double>(s));
    const double filling = std::max(ahead * stage.forward_ns, stage.forward_ns + below);
    const double rest =
        microbatches * stage.backward_ns() + (microbatches - ahead) * stage.forward_ns;
    longest = std::max(longest, above + filling + rest);
    above += stage.total_ns();
  }
  return longest;
}

/// busy + ramp of the rank for which it is longest; a ramp is what the others' passes at both ends
/// add, less the weight gradients that fill them.
double ramped_ns(const std::vector<StagePasses>& stages, int64_t pp, double microbatches,
                 double ramp_ranks, double filled_weight_gradients, bool v_shaped) {
  double longest = 0;
  double chunks = 0;
  for (const StagePasses& stage : stages) chunks += stage.forward_ns + stage.input_gradient_ns;
  chunks /= static_cast<double>(stages.size());
  for (int64_t rank = 0; rank < pp; ++rank) {
    double busy = 0, weight = 0;
    int64_t held = 0;
    const int64_t all = static_cast<int64_t>(stages.size());
    for (int64_t s = rank; s < all; s += pp, ++held) {
      const int64_t at = v_shaped && s >= pp ? 2 * pp - 1 - rank : s;
      const StagePasses& stage = stages[static_cast<size_t>(at)];
      busy += stage.total_ns();
      weight += stage.weight_gradient_ns;
    }
    weight /= static_cast<double>(held);
    const double ramp = ramp_ranks * (chunks + weight - filled_weight_gradients * weight);
    longest = std::max(longest, microbatches * busy + std::max(0.0, ramp));
  }
  return longest;
}

}  // namespace

double pipeline_ns(PipelineKind kind, const std::vector<StagePasses>& stages, int64_t pp,
                   int64_t microbatches) {
  const double m = static_cast<double>(microbatches);
  const double others = static_cast<double>(pp - 1);
  switch (kind) {
    case PipelineKind::k1F1B:
      return one_f_one_b_ns(stages, m);
    case PipelineKind::kInterleaved:
      return ramped_ns(stages, pp, m, others, 0, false);
    case PipelineKind::kZbH1:
      return ramped_ns(stages, pp, m, others, 2, false);
    case PipelineKind::kZbH2:
      return ramped_ns(stages, pp, m, others, 3, false);
    case PipelineKind::kZbV:
      return ramped_ns(stages, pp, m, others, 3, true);
    case PipelineKind::kVHalf:
      return ramped_ns(stages, pp, m, others, 1, true);
    case PipelineKind::kDualPipe:
      return ramped_ns(stages, pp, m, others / 2, 3, false);
    case PipelineKind::kDualPipeV:
      return ramped_ns(stages, pp, m, others / 2, 3, true);
  }
  return 0;
}

JobTime job_time(const Job& job, const SystemSpec& system, const RoutedLoads& loads) {
  return JobTimer(job, system, loads).time();
}

}  // namespace bagualu
