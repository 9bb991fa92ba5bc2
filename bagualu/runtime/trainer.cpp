#include "bagualu/runtime/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cost/profile.h"
#include "bagualu/model/static_memory.h"
#include "bagualu/runtime/machine.h"
#include "bagualu/runtime/seeds.h"

namespace bagualu {
namespace {

DeviceArena& installed_arena() {
  DeviceArena* arena = DeviceArena::installed();
  BGL_CHECK(arena != nullptr, "install the device arena before the first trainer");
  return *arena;
}

ExecutorOptions executor_options(const TrainerOptions& options) {
  return {options.shape.micro_batch_size, options.shape.seq, options.shape.dtype,
          options.chunk_rows};
}

// Samples of one step, which an exception must not leave recording into a report that is gone.
class RecordMemory {
 public:
  RecordMemory(MicrobatchRunner& runner, std::vector<MemorySample>* samples) : runner_(runner) {
    runner_.record_memory(samples);
  }
  ~RecordMemory() { runner_.record_memory(nullptr); }
  RecordMemory(const RecordMemory&) = delete;
  RecordMemory& operator=(const RecordMemory&) = delete;

 private:
  MicrobatchRunner& runner_;
};

MemoryForecast checked_forecast(const Graph& graph, const ModelSpec& spec,
                                const TrainerOptions& options) {
  const MemoryForecast forecast = forecast_of(graph, spec, options);
  if (options.budget_bytes > 0 && options.budget_bytes < forecast.floor_bytes) {
    throw BudgetBelowFloor(options.budget_bytes, forecast.floor_bytes,
                           "a smaller micro-batch, a shorter sequence or fewer chunk rows lowers it");
  }
  if (options.host_budget_bytes > 0 && options.budget_bytes > 0 &&
      options.host_budget_bytes < forecast.host_floor_bytes) {
    throw BudgetBelowFloor(options.host_budget_bytes, forecast.host_floor_bytes,
                           "this is the host budget: rows that no recompute restores go there");
  }
  return forecast;
}

}  // namespace

Trainer::Trainer(const ModelSpec& spec, const TrainerOptions& options, const std::string& ep_group,
                 const std::string& dp_group, const std::string& edp_group)
    : spec_(spec),
      options_(options),
      graph_((validate(spec, "model"), validate(spec, options.shape, options.layout, "layout"),
              trainer_graph(spec, options))),
      balanced_(balanced_load(spec, options)),
      worst_case_(bounding_load(spec, options)),
      forecast_(checked_forecast(graph_, spec, options)),
      arena_(installed_arena()),
      ep_(ep_group, options.layout.ep_rank(options.rank), options.layout.ep_size),
      dp_(dp_group, options.rank, options.layout.world_size),
      edp_(edp_group, options.rank / options.layout.ep_size, options.layout.expert_dp_size()),
      model_(spec_, options.layout, options.shape.dtype),
      host_(HostArenaOptions{.limit_bytes = options.host_budget_bytes}),
      store_(arena_, host_, transfers_, {.verify_checksums = options.verify_checksums}),
      executor_(graph_, spec_, executor_options(options), model_, ep_, store_),
      runner_(graph_, executor_, arena_, host_),
      policy_name_(options.policy),
      policy_options_(options.policy_options),
      budget_bytes_(options.budget_bytes) {
  ids_ = at::zeros({graph_.tokens}, at::kLong);
  targets_ = at::zeros({graph_.tokens}, at::kLong);
  reduced_ = at::zeros({kReducedScalars}, at::kDouble);
  expert_counts_ = at::zeros({std::max<int64_t>(spec.moe_layers(), 1), spec.experts}, at::kDouble);
  ep_.reserve_gather(spec.experts);
  model_.init_parameters(options.seed, ep_.rank());
  profile_ = options.profile;
  if (profile_.is_null()) {
    profile_ = measure_profile();
  } else {
    check_profile(profile_, this_machine(), profile_key(spec_, graph_options(options_)), "profile");
  }
  cost_ = costs_from_profile(graph_, profile_, "profile");
}

Trainer::~Trainer() = default;

void Trainer::set_policy(const std::string& name, const PolicyOptions& options,
                         int64_t budget_bytes) {
  policy_name_ = name;
  policy_options_ = options;
  budget_bytes_ = budget_bytes;
  policy_.reset();
  arena_.set_budget(budget_bytes);
}

void Trainer::ensure_policy() {
  const int64_t base = arena_.live_bytes();
  if (policy_ && base == policy_base_bytes_) return;
  policy_base_bytes_ = base;
  context_.graph = &graph_;
  context_.cost = &cost_;
  context_.activation_budget_bytes =
      budget_bytes_ > 0 ? std::max<int64_t>(budget_bytes_ - base, 1) : 0;
  context_.host_budget_bytes = options_.host_budget_bytes;
  context_.balanced = balanced_;
  context_.worst_case = worst_case_;
  context_.allow_quantise = options_.allow_quantise;
  policy_ = make_policy(policy_name_, context_, policy_options_);
}

MicrobatchInput Trainer::microbatch_input(const StepInput& input, int64_t microbatch) {
  const TrainShape& shape = options_.shape;
  const at::Tensor tokens = input.tokens.select(0, microbatch);
  at::Tensor ids = ids_.view({shape.micro_batch_size, shape.seq});
  at::Tensor targets = targets_.view({shape.micro_batch_size, shape.seq});
  ids.copy_(tokens.narrow(1, 0, shape.seq));
  targets.copy_(tokens.narrow(1, 1, shape.seq));
  const double share = 1.0 / static_cast<double>(options_.layout.world_size * input.tokens.size(0));
  MicrobatchInput result;
  result.step = input.step;
  result.microbatch = microbatch;
  result.ids = ids_;
  result.targets = targets_;
  result.routing = input.routing.empty() ? nullptr : &input.routing[microbatch];
  result.dropout_seed = mix_seed(
      mix_seed(mix_seed(mix_seed(options_.seed, "dropout"), input.step), microbatch),
      options_.rank);
  result.loss_scale = share / static_cast<double>(shape.tokens());
  result.router_loss_scale = share;
  return result;
}

StepReport Trainer::step(const StepInput& input) {
  const TrainShape& shape = options_.shape;
  BGL_CHECK(input.tokens.dim() == 3 && input.tokens.size(1) == shape.micro_batch_size &&
                input.tokens.size(2) == shape.seq + 1,
            input.tokens.dim());
  ensure_policy();
  StepReport report;
  const RecordMemory recording(runner_, input.want_memory ? &report.memory : nullptr);
  run_microbatches(input, *policy_, report);
  if (reduce_gradients(input, report)) repeat_microbatches(input, report);
  apply_gradients(input, report);
  report.end_bytes = arena_.live_bytes();
  report.host_end_bytes = host_.live_bytes();
  report.comm_ns = ep_.take_busy_ns() + dp_.take_busy_ns() + edp_.take_busy_ns();
  return report;
}

void Trainer::run_microbatches(const StepInput& input, Policy& policy, StepReport& report) {
  step_rows_per_rank_.assign(spec_.layers, {});
  expert_counts_.zero_();
  model_.zero_gradients();
  for (int64_t m = 0; m < input.tokens.size(0); ++m) {
    report.microbatches.push_back(runner_.train(microbatch_input(input, m), policy, balanced_));
    const MicrobatchReport& done = report.microbatches.back();
    report.predicted_peak_bytes = std::max(report.predicted_peak_bytes, done.predicted_peak_bytes);
    report.measured_peak_bytes = std::max(report.measured_peak_bytes, done.measured_peak_bytes);
    count_routing(report);
  }
}

// Weights and biases are as they were, so this gives the numbers that the first run would have.
void Trainer::repeat_microbatches(const StepInput& input, StepReport& report) {
  report.discarded = std::move(report.microbatches);
  report.microbatches.clear();
  report.rows.clear();
  const auto again = make_policy("full-recompute", context_, {});
  run_microbatches(input, *again, report);
  reduce_gradients(input, report);
  report.repeated = true;
}

void Trainer::count_routing(StepReport& report) {
  std::vector<int64_t> rows(spec_.layers, 0);
  auto counts = expert_counts_.accessor<double, 2>();
  int64_t moe_layer = 0;
  for (int64_t layer = 0; layer < spec_.layers; ++layer) {
    if (!spec_.is_moe(layer)) continue;
    const LayerRouting& routing = executor_.routing(static_cast<int>(layer));
    rows[layer] = routing.load.rows;
    std::vector<int64_t>& sums = step_rows_per_rank_[layer];
    sums.resize(routing.rows_per_rank.size(), 0);
    for (size_t r = 0; r < sums.size(); ++r) sums[r] += routing.rows_per_rank[r];
    for (int64_t e = 0; e < spec_.experts; ++e) {
      counts[moe_layer][e] += static_cast<double>(routing.tokens_per_expert[e]);
    }
    ++moe_layer;
  }
  report.rows.push_back(std::move(rows));
}

// Returns: true if the step is to be repeated, the same on every rank.
bool Trainer::reduce_losses(const StepInput& input, double expert_square, StepReport& report,
                            double& expert_square_sum) {
  double* scalars = reduced_.data_ptr<double>();
  std::fill(scalars, scalars + kReducedScalars, 0.0);
  for (const MicrobatchReport& microbatch : report.microbatches) {
    scalars[0] += microbatch.losses.cross_entropy_sum;
    scalars[1] += microbatch.losses.aux;
    scalars[2] += microbatch.losses.z;
    scalars[5] += microbatch.repeat_step ? 1.0 : 0.0;
  }
  scalars[3] = expert_square;
  scalars[4] = input.stop_requested ? 1.0 : 0.0;
  dp_.all_reduce_sum(reduced_);
  const double share = 1.0 / static_cast<double>(options_.layout.world_size * input.tokens.size(0));
  report.loss = scalars[0] * share / static_cast<double>(options_.shape.tokens());
  report.aux_loss = scalars[1] * share;
  report.z_loss = scalars[2] * share;
  // Every copy of an expert contributed its (equal) gradient.
  expert_square_sum = scalars[3] / static_cast<double>(options_.layout.expert_dp_size());
  report.stop = scalars[4] > 0.0;
  return scalars[5] > 0.0;
}

// Sums gradients and losses over the ranks. Returns: as reduce_losses().
bool Trainer::reduce_gradients(const StepInput& input, StepReport& report) {
  ModelState::Group& dense = model_.group(ParameterGroup::kDense);
  ModelState::Group& expert = model_.group(ParameterGroup::kExpert);
  dp_.all_reduce_sum(dense.grad);
  if (expert.grad.numel() > 0) edp_.all_reduce_sum(expert.grad);
  const double expert_square = expert.grad.numel() > 0 ? ops::squared_norm(expert.grad) : 0.0;
  double expert_square_sum = 0.0;
  const bool repeat = reduce_losses(input, expert_square, report, expert_square_sum);
  report.grad_norm = std::sqrt(ops::squared_norm(dense.grad) + expert_square_sum);
  return repeat;
}

void Trainer::apply_gradients(const StepInput& input, StepReport& report) {
  ModelState::Group& dense = model_.group(ParameterGroup::kDense);
  ModelState::Group& expert = model_.group(ParameterGroup::kExpert);
  for (const std::vector<int64_t>& rows : step_rows_per_rank_) {
    int64_t hottest = 0, sum = 0;
    for (int64_t r : rows) {
      hottest = std::max(hottest, r);
      sum += r;
    }
    report.imbalance.push_back(
        sum == 0 ? 1.0 : static_cast<double>(hottest * static_cast<int64_t>(rows.size())) / sum);
  }
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

// DeepSeek-V3's loss-free balancing: an expert above the mean load is made a little less likely to be
// chosen in the next step, one below a little more. Gate values do not see the bias.
void Trainer::update_router_biases() {
  if (spec_.router_bias_rate == 0.0) return;
  edp_.all_reduce_sum(expert_counts_);
  auto counts = expert_counts_.accessor<double, 2>();
  int64_t moe_layer = 0;
  for (int64_t layer = 0; layer < spec_.layers; ++layer) {
    if (!spec_.is_moe(layer)) continue;
    auto bias = model_.layer(layer).router_bias.accessor<float, 1>();
    double sum = 0.0;
    for (int64_t e = 0; e < spec_.experts; ++e) sum += counts[moe_layer][e];
    const double mean = sum / static_cast<double>(spec_.experts);
    for (int64_t e = 0; e < spec_.experts; ++e) {
      const double excess = counts[moe_layer][e] - mean;
      const double direction = excess > 0.0 ? -1.0 : (excess < 0.0 ? 1.0 : 0.0);
      bias[e] += static_cast<float>(spec_.router_bias_rate * direction);
    }
    ++moe_layer;
  }
}

double Trainer::evaluate(const at::Tensor& tokens) {
  StepInput input;
  input.tokens = tokens;
  double sum = 0.0;
  for (int64_t m = 0; m < tokens.size(0); ++m) {
    MicrobatchInput microbatch = microbatch_input(input, m);
    microbatch.train = false;
    sum += runner_.evaluate(microbatch).cross_entropy_sum;
  }
  double* scalars = reduced_.data_ptr<double>();
  std::fill(scalars, scalars + kReducedScalars, 0.0);
  scalars[0] = sum;
  dp_.all_reduce_sum(reduced_);
  return scalars[0] / static_cast<double>(graph_.tokens * tokens.size(0) *
                                          options_.layout.world_size);
}

at::Tensor Trainer::log_probs(const at::Tensor& tokens) {
  const TrainShape& shape = options_.shape;
  BGL_CHECK(tokens.dim() == 2 && tokens.size(0) <= shape.micro_batch_size &&
                tokens.size(1) <= shape.seq,
            tokens.dim());
  ids_.zero_();
  targets_.zero_();
  ids_.view({shape.micro_batch_size, shape.seq})
      .narrow(0, 0, tokens.size(0))
      .narrow(1, 0, tokens.size(1))
      .copy_(tokens);
  MicrobatchInput input;
  input.ids = ids_;
  input.targets = targets_;
  input.train = false;
  executor_.capture_log_probs();
  runner_.evaluate(input);
  return executor_.take_log_probs()
      .view({shape.micro_batch_size, shape.seq, spec_.vocab})
      .narrow(0, 0, tokens.size(0))
      .narrow(1, 0, tokens.size(1));
}

Json Trainer::plan_json() {
  ensure_policy();
  const MicrobatchState state = initial_state(graph_);
  const Plan save_all = uniform_plan(graph_, kSave);
  const std::vector<LayerLoad> loads(graph_.layers, balanced_);
  GateInput input;
  input.state = &state;
  input.plan = &save_all;
  input.loads = &loads;
  const Decision decision = policy_->decide(input);
  return {{"policy", policy_name_},
          {"plan", plan_to_json(graph_, decision.plan)},
          {"predicted_peak_bytes", policy_base_bytes_ + decision.predicted_peak_bytes},
          {"predicted_exposed_ns", decision.exposed_ns}};
}

}  // namespace bagualu
