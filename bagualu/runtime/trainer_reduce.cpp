// What ranks add up at the end of a step, and what comes of it: gradients, losses, loads; then the
// optimizer and the router biases.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "bagualu/model/static_memory.h"
#include "bagualu/runtime/ops/optimizer.h"
#include "bagualu/runtime/trainer.h"

namespace bagualu {

void Trainer::count_routing(const StepReport& report) {
  auto counts = expert_counts_.accessor<double, 2>();
  for (const MicrobatchReport& microbatch : report.passes.microbatches) {
    int64_t held = 0;  // MoE layers of the stages before
    for (int s = 0; s < microbatch.stage; ++s) {
      held += static_cast<int64_t>(stages_[static_cast<size_t>(s)]->graph.gates.size());
    }
    const TrainerStage& stage = *stages_[static_cast<size_t>(microbatch.stage)];
    for (const GateSpec& gate : stage.graph.gates) {
      const LayerRouting& routing = *microbatch.routing[static_cast<size_t>(gate.layer)];
      std::vector<int64_t>& sums =
          step_rows_per_rank_[static_cast<size_t>(stage.layer(gate.layer))];
      sums.resize(routing.rows_per_rank.size(), 0);
      for (size_t r = 0; r < sums.size(); ++r) sums[r] += routing.rows_per_rank[r];
      for (int64_t e = 0; e < spec_.experts; ++e) {
        counts[held][e] += static_cast<double>(routing.tokens_per_expert[static_cast<size_t>(e)]);
      }
      ++held;
    }
  }
}

// Returns: true if the step is to be repeated, the same on every rank.
bool Trainer::reduce_losses(const StepInput& input, double dense_square, double expert_square,
                            StepReport& report) {
  double* scalars = reduced_.data_ptr<double>();
  std::fill(scalars, scalars + kReducedScalars, 0.0);
  for (const MicrobatchReport& microbatch : report.passes.microbatches) {
    scalars[0] += microbatch.losses.cross_entropy_sum;
    scalars[1] += microbatch.losses.aux;
    scalars[2] += microbatch.losses.z;
    scalars[5] += microbatch.repeat_step ? 1.0 : 0.0;
  }
  scalars[3] = expert_square;
  scalars[4] = input.stop_requested ? 1.0 : 0.0;
  world_.all_reduce_sum(reduced_);
  const ParallelLayout& layout = options_.layout;
  const double share = 1.0 / static_cast<double>(layout.dp_size() * input.tokens.size(0));
  report.loss = scalars[0] * share / static_cast<double>(options_.shape.tokens());
  report.aux_loss = scalars[1] * share;
  report.z_loss = scalars[2] * share;
  // Every copy of an expert contributed its (equal) gradient.
  const double experts = scalars[3] / static_cast<double>(layout.expert_dp_size());
  report.grad_norm = std::sqrt(dense_square + experts);
  report.stop = scalars[4] > 0.0;
  return scalars[5] > 0.0;
}

// Sums gradients and losses over the ranks. Returns: as reduce_losses().
bool Trainer::reduce_gradients(const StepInput& input, StepReport& report) {
  ModelState::Group& dense = model_.group(ParameterGroup::kDense);
  ModelState::Group& expert = model_.group(ParameterGroup::kExpert);
  dp_.all_reduce_sum(dense.grad);
  if (expert.grad.numel() > 0) edp_.all_reduce_sum(expert.grad);
  if (embedding_.size() > 1) {
    at::Tensor shared = model_.tied_gradient();
    embedding_.all_reduce_sum(shared);
  }
  const double expert_square = expert.grad.numel() > 0 ? ops::squared_norm(expert.grad) : 0.0;
  double dense_square = ops::squared_norm(model_.counted_dense_gradient());
  report.imbalance.clear();
  for (int64_t layer = 0; layer < spec_.layers; ++layer) {
    const std::vector<int64_t>& rows = step_rows_per_rank_[static_cast<size_t>(layer)];
    int64_t hottest = 0, sum = 0;
    for (int64_t r : rows) {
      hottest = std::max(hottest, r);
      sum += r;
    }
    report.imbalance.push_back(
        sum == 0 ? 1.0 : static_cast<double>(hottest * static_cast<int64_t>(rows.size())) / sum);
  }
  if (options_.layout.pp_size > 1) dense_square = reduce_over_stages(dense_square, report);
  return reduce_losses(input, dense_square, expert_square, report);
}

// Every stage knows the loads of its own layers, and the norm of its own gradients.
double Trainer::reduce_over_stages(double dense_square, StepReport& report) {
  double* sums = imbalance_.data_ptr<double>();
  for (int64_t layer = 0; layer < spec_.layers; ++layer) {
    const bool mine = !step_rows_per_rank_[static_cast<size_t>(layer)].empty();
    sums[layer] = mine ? report.imbalance[static_cast<size_t>(layer)] : 0.0;
  }
  sums[spec_.layers] = dense_square;
  pp_.all_reduce_sum(imbalance_);
  for (int64_t layer = 0; layer < spec_.layers; ++layer) {
    if (spec_.is_moe(layer)) report.imbalance[static_cast<size_t>(layer)] = sums[layer];
  }
  return sums[spec_.layers];
}

void Trainer::apply_gradients(const StepInput& input, StepReport& report) {
  ModelState::Group& dense = model_.group(ParameterGroup::kDense);
  ModelState::Group& expert = model_.group(ParameterGroup::kExpert);
  // A norm that is not finite would turn every weight into NaN; the caller stops the run instead.
  if (!std::isfinite(report.grad_norm)) return;
  if (options_.clip > 0.0) {
    const double factor = ops::clip_factor(report.grad_norm, options_.clip);
    ops::scale_inplace(dense.grad, factor);
    ops::scale_inplace(expert.grad, factor);
  }
  adamw(dense, ParameterGroup::kDense, input.step + 1, input.lr);
  adamw(expert, ParameterGroup::kExpert, input.step + 1, input.lr);
  model_.refresh_working_copies();
  update_router_biases();
}

// AdamW over runs of neighbouring parameters that share their weight decay.
void Trainer::adamw(ModelState::Group& group, ParameterGroup which, int64_t step, double lr) {
  const auto& parameters = model_.parameter_layout().parameters;
  int64_t begin = -1, end = -1;
  bool decay = true;
  const auto flush = [&] {
    if (begin < 0) return;
    ops::AdamwOptions options = options_.adamw;
    options.lr = lr;
    if (!decay) options.weight_decay = 0.0;
    at::Tensor master = group.master.narrow(0, begin, end - begin);
    at::Tensor exp_avg = group.exp_avg.narrow(0, begin, end - begin);
    at::Tensor exp_avg_sq = group.exp_avg_sq.narrow(0, begin, end - begin);
    ops::adamw_step(master, group.grad.narrow(0, begin, end - begin), exp_avg, exp_avg_sq, step,
                    options);
  };
  for (const Parameter& parameter : parameters) {
    if (parameter.group != which) continue;
    if (begin < 0 || parameter.decay != decay) {
      flush();
      begin = parameter.offset_elements;
      decay = parameter.decay;
    }
    end = parameter.offset_elements + parameter.elements;
  }
  flush();
}

// DeepSeek-V3's loss-free balancing: an expert above the mean load is made a little less likely to
// be chosen in the next step, one below a little more. Gate values do not see the bias.
void Trainer::update_router_biases() {
  if (spec_.router_bias_rate == 0.0) return;
  edp_.all_reduce_sum(expert_counts_);
  auto counts = expert_counts_.accessor<double, 2>();
  int64_t held = 0;
  for (const auto& stage : stages_) {
    for (const GateSpec& gate : stage->graph.gates) {
      auto bias = model_.layer(stage->layer(gate.layer)).router_bias.accessor<float, 1>();
      double sum = 0.0;
      for (int64_t e = 0; e < spec_.experts; ++e) sum += counts[held][e];
      const double mean = sum / static_cast<double>(spec_.experts);
      for (int64_t e = 0; e < spec_.experts; ++e) {
        const double excess = counts[held][e] - mean;
        const double direction = excess > 0.0 ? -1.0 : (excess < 0.0 ? 1.0 : 0.0);
        bias[e] += static_cast<float>(spec_.router_bias_rate * direction);
      }
      ++held;
    }
  }
}

}  // namespace bagualu
