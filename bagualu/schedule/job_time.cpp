#include "bagualu/schedule/job_time.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "bagualu/schedule/pipeline.h"

namespace bagualu {
namespace {

constexpr double kNsPerS = 1e9;

int64_t whole(double ns) { return static_cast<int64_t>(std::llround(ns)); }

/// Sums over the virtual stages of one pipeline rank, for one micro-batch.
struct RankSums {
  double dense_weights = 0;  ///< elements
  double expert_weights = 0;
  double forward_ns = 0;
  double backward_ns = 0;
  StageTime stages;  ///< the parts that JobTime reports, added up
  double total_ns() const { return forward_ns + backward_ns; }
};

/// The passes of one job, stage by stage.
class JobTimer {
 public:
  JobTimer(const Job& job, const SystemSpec& system, const RoutedLoads& loads)
      : job_(job), system_(system), loads_(loads), cost_(job, system) {}

  JobTime time();

 private:
  PartTimes stage_parts(const StageContent& stage, const double* spike);
  void add_layers(const StageContent& stage, const double* spike, PartTimes& parts);
  StageTime stage_time(const PartTimes& parts, size_t stage) const;
  void add_to_rank(const PartTimes& parts, size_t stage);
  double spikes_ns();
  double exposed_copy_ns(double bytes, double bytes_per_s, double window_ns) const;
  void add_reductions(JobTime& time) const;
  double reduce_ns(double bytes, int64_t ranks, double bytes_per_s) const;
  double optimizer_ns(const RankSums& rank) const;
  void describe_longest(JobTime& time) const;
  void describe_rates(JobTime& time) const;

  const Job& job_;
  const SystemSpec& system_;
  const RoutedLoads& loads_;
  JobCost cost_;
  std::vector<StageTime> stages_;
  std::vector<StagePasses> passes_;
  std::vector<RankSums> ranks_;
  double model_flops_ = 0;  ///< of one micro-batch's forward, one rank of every stage
};

StagePasses passes_of(const StageTime& stage) {
  return {static_cast<double>(stage.forward_ns),
          static_cast<double>(stage.input_gradient_ns + stage.recompute_ns),
          static_cast<double>(stage.weight_gradient_ns)};
}

/// Layers of a stage, each at its load: those that follow each other and are alike are priced once
/// and counted.
void JobTimer::add_layers(const StageContent& stage, const double* spike, PartTimes& parts) {
  const RecomputeSettings& recompute = job_.recompute;
  const bool some = recompute.granularity == RecomputeGranularity::kFull && recompute.block;
  const auto alike = [&](int64_t i) {
    const int64_t layer = stage.first_layer + i;
    const double factor = spike != nullptr          ? *spike
                          : loads_.by_layer.empty() ? loads_.factor
                                                    : loads_.by_layer[static_cast<size_t>(layer)];
    return std::tuple(layer_kind(job_.model, layer), factor, some && i >= recompute.layers);
  };
  for (int64_t i = 0; i < stage.layer_count;) {
    const auto run = alike(i);
    int64_t end = i + 1;
    while (end < stage.layer_count && alike(end) == run) ++end;
    const auto& [kind, factor, kept] = run;
    PartTimes times = cost_.layer(stage.first_layer + i, factor);
    if (kept) times.recompute_ns = times.recompute_exposed_ns = 0;
    parts.add(times, static_cast<double>(end - i));
    i = end;
  }
}

/// `spike`: the load of a spiked micro-batch in place of the others'.
PartTimes JobTimer::stage_parts(const StageContent& stage, const double* spike) {
  PartTimes parts;
  add_layers(stage, spike, parts);
  const double mtp_factor = spike != nullptr ? *spike : loads_.factor;
  if (stage.mtp_layers > 0) {
    parts.add(cost_.mtp_layer(mtp_factor), static_cast<double>(stage.mtp_layers));
  }
  const auto add_end = [&](PartTimes part) {
    part.recompute_ns = part.recompute_exposed_ns = part.offload_bytes = 0;
    parts += part;
  };
  if (stage.embedding) add_end(cost_.embedding());
  if (stage.head) add_end(cost_.head());
  return parts;
}

/// What a copy adds to a pass of `window_ns` that it runs beside.
double JobTimer::exposed_copy_ns(double bytes, double bytes_per_s, double window_ns) const {
  if (bytes == 0) return 0;
  const double copy = bytes * kNsPerS / bytes_per_s;
  return copy - std::min(copy * system_.copy_hidden_fraction, window_ns);
}

StageTime JobTimer::stage_time(const PartTimes& parts, size_t stage) const {
  // A pass that sends to another rank waits for it unless the framework overlaps it.
  const bool overlapped = job_.pipeline == PipelineKind::kInterleaved && job_.overlap.p2p;
  const auto send_between = [&](size_t from, size_t to) {
    const bool same = job_.rank_of_stage(static_cast<int64_t>(from)) ==
                      job_.rank_of_stage(static_cast<int64_t>(to));
    return overlapped || same ? 0.0 : cost_.send_ns();
  };
  const double forward_send = stage + 1 < job_.stages.size() ? send_between(stage, stage + 1) : 0.0;
  const double backward_send = stage > 0 ? send_between(stage, stage - 1) : 0.0;
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

void JobTimer::add_to_rank(const PartTimes& parts, size_t stage) {
  const int64_t home = job_.rank_of_stage(static_cast<int64_t>(stage));
  const auto add = [&](int64_t rank, double share) {
    RankSums& sums = ranks_[static_cast<size_t>(rank)];
    const StageTime& time = stages_[stage];
    sums.dense_weights += parts.dense_weights;
    sums.expert_weights += parts.expert_weights;
    sums.forward_ns += share * static_cast<double>(time.forward_ns);
    sums.backward_ns += share * static_cast<double>(time.backward_ns);
    const auto part = [&](int64_t ns) { return whole(share * static_cast<double>(ns)); };
    sums.stages.recompute_ns += part(time.recompute_ns);
    sums.stages.exposed_communication_ns += part(time.exposed_communication_ns);
    sums.stages.exposed_offload_ns += part(time.exposed_offload_ns);
  };
  if (job_.pipeline != PipelineKind::kDualPipe) return add(home, 1);
  // Two copies of the model, each for half of the micro-batches.
  add(home, 0.5);
  add(job_.layout.pp - 1 - home, 0.5);
}

/// How much longer the step takes for its spiked micro-batches: they are few and at known places,
/// so the order is simulated with and without them.
double JobTimer::spikes_ns() {
  const int pp = static_cast<int>(job_.layout.pp);
  const size_t m = static_cast<size_t>(job_.microbatches);
  const int per_rank = static_cast<int>(job_.stages_per_rank());
  const PipelineOrder order = make_order(job_.pipeline, pp, per_rank, static_cast<int>(m));
  PipelineTimes times;
  for (const StagePasses& stage : passes_) {
    times.forward_ns.emplace_back(m, whole(stage.forward_ns));
    times.backward_ns.emplace_back(m, whole(stage.backward_ns()));
    times.weight_grad_ns.emplace_back(m, whole(stage.weight_gradient_ns));
  }
  const int64_t calm_ns = simulate(order, times).makespan_ns;
  for (const auto& [microbatch, factor] : loads_.spikes) {
    if (microbatch < 0 || microbatch >= job_.microbatches) continue;
    const size_t at = static_cast<size_t>(microbatch);
    for (size_t s = 0; s < job_.stages.size(); ++s) {
      const StagePasses spiked = passes_of(stage_time(stage_parts(job_.stages[s], &factor), s));
      times.forward_ns[s][at] = whole(spiked.forward_ns);
      times.backward_ns[s][at] = whole(spiked.backward_ns());
      times.weight_grad_ns[s][at] = whole(spiked.weight_gradient_ns);
    }
  }
  return static_cast<double>(simulate(order, times).makespan_ns - calm_ns);
}

double JobTimer::reduce_ns(double bytes, int64_t ranks, double bytes_per_s) const {
  if (ranks == 1 || bytes == 0) return 0;
  const double share = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  return static_cast<double>(system_.collective_latency_ns) + bytes * share * kNsPerS / bytes_per_s;
}

/// Traffic of the step over the rank's shard, and of clearing the gradient buffer.
double JobTimer::optimizer_ns(const RankSums& rank) const {
  const OptimizerSettings& o = job_.optimizer;
  const double gradient = static_cast<double>(o.gradient_bytes);
  const double moments =
      o.name == "sgd" ? 0 : static_cast<double>(o.exp_avg_bytes + o.exp_avg_sq_bytes);
  const double main = static_cast<double>(o.main_gradient_bytes);
  // Read for the norm, read and written by the clipping, read by the step; where the optimizer
  // keeps gradients of its own, they are cast first and the rest is done on them.
  const double gradients = main > 0 ? gradient + 5 * main : 4 * gradient;
  const double parameters = 2 * (static_cast<double>(o.master_bytes) + moments) +
                            static_cast<double>(o.master_bytes + o.parameter_bytes);
  const JobLayout& l = job_.layout;
  const auto shared_by = [&](int64_t ranks) {
    return o.distributed ? static_cast<double>(std::max<int64_t>(1, ranks / o.instances)) : 1.0;
  };
  const double dense_ranks = shared_by(l.dp() * l.cp);
  const double expert_ranks = shared_by(l.expert_dp());
  const double bytes = (gradients + parameters) *
                           (rank.dense_weights / dense_ranks + rank.expert_weights / expert_ranks) +
                       gradient * (rank.dense_weights + rank.expert_weights);
  return bytes * kNsPerS / (system_.memory_bytes_per_s * system_.optimizer_efficiency_fraction);
}

/// Gradient sums, parameter gathers and the optimizer, of the rank that is through last.
void JobTimer::add_reductions(JobTime& time) const {
  const JobLayout& l = job_.layout;
  const OptimizerSettings& o = job_.optimizer;
  const JobLinks& links = cost_.links();
  const double hidden = system_.comm_overlap_fraction;
  double early_ns = 0;  // how long before the step's last pass this rank is through
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const RankSums& rank = ranks_[r];
    const auto collective = [&](int64_t bytes) {
      const double each = static_cast<double>(bytes);
      return reduce_ns(rank.dense_weights * each, l.dp() * l.cp, links.dp_bytes_per_s) +
             reduce_ns(rank.expert_weights * each, l.expert_dp(), links.expert_dp_bytes_per_s);
    };
    // An all-reduce is a reduce-scatter and a gather.
    double reduce = collective(o.gradient_bytes) * (o.distributed ? 1 : 2);
    double gather = o.distributed ? collective(o.parameter_bytes) : 0;
    if (job_.overlap_grad_reduce) reduce -= hidden * std::min(reduce, rank.backward_ns);
    if (job_.overlap_param_gather) gather -= hidden * std::min(gather, rank.forward_ns);
    time.gradient_reduce_ns = std::max(time.gradient_reduce_ns, whole(reduce - early_ns));
    time.parameter_gather_ns = std::max(time.parameter_gather_ns, whole(gather));
    time.optimizer_ns = std::max(time.optimizer_ns, whole(optimizer_ns(rank)));
    early_ns += passes_[r].backward_ns();
  }
}

void JobTimer::describe_longest(JobTime& time) const {
  const RankSums& longest = *std::max_element(
      ranks_.begin(), ranks_.end(),
      [](const RankSums& a, const RankSums& b) { return a.total_ns() < b.total_ns(); });
  const int64_t m = job_.microbatches;
  time.bubble_ns = time.pipeline_ns - whole(longest.total_ns() * static_cast<double>(m));
  time.exposed_communication_ns = m * longest.stages.exposed_communication_ns;
  time.recompute_ns = m * longest.stages.recompute_ns;
  time.exposed_offload_ns = m * longest.stages.exposed_offload_ns;
}

void JobTimer::describe_rates(JobTime& time) const {
  const JobLayout& l = job_.layout;
  const double seconds = static_cast<double>(time.iteration_ns) / kNsPerS;
  const double ranks_of_stage = static_cast<double>(l.world_size / l.pp);
  time.model_flops = 3 * model_flops_ * ranks_of_stage * static_cast<double>(job_.microbatches);
  time.model_flops_per_s_per_device =
      time.model_flops / seconds / static_cast<double>(l.world_size);
  time.mfu_fraction = time.model_flops_per_s_per_device / peak_flops_per_s(job_, system_);
  const double tokens = static_cast<double>(job_.micro_batch_size * job_.seq) *
                        static_cast<double>(job_.microbatches * l.dp());
  time.tokens_per_s = tokens / seconds;
}

JobTime JobTimer::time() {
  ranks_.resize(static_cast<size_t>(job_.layout.pp));
  stages_.reserve(job_.stages.size());
  passes_.reserve(job_.stages.size());
  for (size_t s = 0; s < job_.stages.size(); ++s) {
    const PartTimes parts = stage_parts(job_.stages[s], nullptr);
    model_flops_ += parts.model_flops;
    stages_.push_back(stage_time(parts, s));
    passes_.push_back(passes_of(stages_.back()));
    add_to_rank(parts, s);
  }
  JobTime time;
  time.pipeline_ns = whole(pipeline_ns(job_.pipeline, passes_, job_.layout.pp, job_.microbatches));
  if (!loads_.spikes.empty()) time.pipeline_ns += whole(spikes_ns());
  add_reductions(time);
  describe_longest(time);
  time.overhead_ns = system_.step_overhead_ns;
  time.iteration_ns = time.pipeline_ns + time.gradient_reduce_ns + time.parameter_gather_ns +
                      time.optimizer_ns + time.overhead_ns;
  describe_rates(time);
  time.stages = std::move(stages_);
  return time;
}

}  // namespace

double peak_flops_per_s(const Job& job, const SystemSpec& system) {
  if (job.fp8) return system.fp8_flops_per_s;
  return job.element_bytes == 4 ? system.fp32_flops_per_s : system.bf16_flops_per_s;
}

JobTime job_time(const Job& job, const SystemSpec& system, const RoutedLoads& loads) {
  return JobTimer(job, system, loads).time();
}

}  // namespace bagualu
