#include "bagualu/runtime/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cost/profile.h"
#include "bagualu/model/static_memory.h"
#include "bagualu/runtime/clock.h"
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
  return {options.shape.micro_batch_size,
          options.shape.seq,
          options.shape.dtype,
          options.chunk_rows,
          {.verify_checksums = options.verify_checksums}};
}

std::vector<ExecutorStage> executor_stages(const std::vector<std::unique_ptr<TrainerStage>>& stages,
                                           const ParallelLayout& layout) {
  std::vector<ExecutorStage> list;
  const int64_t count = layout.stage_count();
  for (const auto& stage : stages) {
    ExecutorStage one;
    one.graph = &stage->graph;
    one.stage = stage->number;
    one.stages = count;
    if (stage->number > 0) one.previous_rank = layout.rank_of_stage(stage->number - 1);
    if (stage->number + 1 < count) one.next_rank = layout.rank_of_stage(stage->number + 1);
    list.push_back(one);
  }
  return list;
}

// A group of `size` ranks of the job, `step` apart, the first being `first`.
CommOptions comm_options(const TrainerOptions& options, const char* name, int64_t first,
                         int64_t size, int64_t step) {
  CommOptions comm;
  comm.name = name;
  for (int64_t i = 0; i < size; ++i) comm.job_ranks.push_back(first + i * step);
  comm.deadline_ns = options.deadline_ns;
  return comm;
}

// The ranks of a job that a rank communicates with.
struct Neighbours {
  explicit Neighbours(const TrainerOptions& options)
      : options(options), layout(options.layout), dp(layout.dp_size()) {
    stage_first = layout.pp_rank(options.rank) * dp;
    dp_rank = layout.dp_rank(options.rank);
    ep_rank = layout.ep_rank(options.rank);
  }

  Communicator ep_group(const std::string& name) const {
    CommOptions comm = comm_options(options, "ep", options.rank - ep_rank, layout.ep_size, 1);
    comm.link_bytes_per_s = options.link_bytes_per_s;
    comm.link_latency_ns = options.link_latency_ns;
    return {name, ep_rank, layout.ep_size, comm};
  }
  Communicator dp_group(const std::string& name) const {
    return {name, dp_rank, dp, comm_options(options, "dp", stage_first, dp, 1)};
  }
  Communicator edp_group(const std::string& name) const {
    const int64_t size = layout.expert_dp_size();
    return {name, layout.expert_dp_rank(options.rank), size,
            comm_options(options, "edp", stage_first + ep_rank, size, layout.ep_size)};
  }
  Communicator pp_group(const std::string& name) const {
    return {name, layout.pp_rank(options.rank), layout.pp_size,
            comm_options(options, "pp", dp_rank, layout.pp_size, dp)};
  }
  Communicator world_group(const std::string& name) const {
    return {name, options.rank, layout.world_size,
            comm_options(options, "world", 0, layout.world_size, 1)};
  }
  // First and last stage; a group of one where the rank holds neither or both.
  Communicator embedding_group(const std::string& name) const {
    if (name.empty()) return {name, 0, 1};
    const int64_t last = layout.rank_of_stage(layout.stage_count() - 1);
    return {name, layout.pp_rank(options.rank) == 0 ? 0 : 1, 2,
            comm_options(options, "embedding", dp_rank, 2, last * dp)};
  }

  const TrainerOptions& options;
  const ParallelLayout& layout;
  int64_t dp, stage_first = 0, dp_rank = 0, ep_rank = 0;
};

MemoryForecast checked_forecast(const std::vector<std::unique_ptr<TrainerStage>>& stages,
                                const RankProgram& program, const ModelSpec& spec,
                                const TrainerOptions& options) {
  MemoryForecast forecast = forecast_of(stages, program, spec, options);
  if (options.budget_bytes > 0 && options.budget_bytes < forecast.floor_bytes) {
    throw BudgetBelowFloor(
        options.budget_bytes, forecast.floor_bytes,
        "a smaller micro-batch, a shorter sequence or fewer chunk rows lowers it" +
            std::string(options.layout.pp_size > 1 || options.overlap
                            ? ", or an order with fewer micro-batches in flight"
                            : ""));
  }
  if (options.host_budget_bytes > 0 && options.budget_bytes > 0 &&
      options.host_budget_bytes < forecast.host_floor_bytes) {
    throw BudgetBelowFloor(options.host_budget_bytes, forecast.host_floor_bytes,
                           "this is the host budget: rows that no recompute restores go there");
  }
  return forecast;
}

}  // namespace

BudgetBelowFloor::BudgetBelowFloor(int64_t budget_bytes, int64_t floor_bytes,
                                   const std::string& what_would_fit)
    : std::runtime_error("budget " + format_bytes(budget_bytes) + " (" +
                         std::to_string(budget_bytes) + " bytes) is below the floor " +
                         format_bytes(floor_bytes) + " (" + std::to_string(floor_bytes) +
                         " bytes): " + std::to_string(floor_bytes - budget_bytes) +
                         " bytes missing; " + what_would_fit),
      budget_bytes(budget_bytes),
      floor_bytes(floor_bytes) {}

// Samples and the trace of one step, which an exception must not leave recording into a report that
// is gone.
class Trainer::Watch final : public ExecutorObserver {
 public:
  Watch(Trainer& trainer, const StepInput& input, StepReport& report)
      : trainer_(trainer),
        report_(report),
        samples_(input.want_memory),
        begin_ns_(steady_now_ns()) {
    traced_ = !input.trace_path.empty();
    if (traced_ && trainer.trace_path_ != input.trace_path) {
      trainer.trace_writer_ = std::make_unique<StepTraceWriter>(input.trace_path);
      trainer.trace_path_ = input.trace_path;
    }
    const TrainerOptions& options = trainer.options_;
    if (traced_ || options.overlap || options.layout.stage_count() > 1) {
      const int64_t rank = trainer.options_.rank;
      recorder_ = std::make_unique<StepRecorder>(
          trainer.executor_, trainer.transfers_, static_cast<int>(rank),
          static_cast<int>(trainer.options_.layout.dp_rank(rank)));
      recorder_->begin(input.step);
      trainer.runner_.set_recorder(recorder_.get());
    }
    if (samples_) trainer.executor_.add_observer(this);
  }
  ~Watch() override {
    if (samples_) trainer_.executor_.remove_observer(this);
    trainer_.runner_.set_recorder(nullptr);
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Runs a part of the step that the executor does not see. `comm`: what it mostly waits for.
  template <class Run>
  auto phase(const char* name, const Communicator* comm, Run&& run) {
    const int64_t begin_ns = steady_now_ns();
    struct End {
      ~End() {
        if (recorder != nullptr) {
          recorder->add_phase(StepAction::kOther, name, begin_ns, steady_now_ns(), comm);
        }
      }
      StepRecorder* recorder;
      const char* name;
      const Communicator* comm;
      int64_t begin_ns;
    } const end{recorder_.get(), name, comm, begin_ns};
    return run();
  }

  void finish() {
    if (!recorder_) return;
    const RankStep step = recorder_->take();
    report_.times = step_times(step);
    if (traced_) trainer_.trace_writer_->write(step);
  }

  void on_action(const StageAction& action, int64_t, int64_t end_ns) override {
    report_.memory.push_back({end_ns - begin_ns_, trainer_.arena_.live_bytes(),
                              action_text(trainer_.executor_.graph(action.slot), action.action)});
  }

 private:
  Trainer& trainer_;
  StepReport& report_;
  const bool samples_;
  const int64_t begin_ns_;
  bool traced_ = false;
  std::unique_ptr<StepRecorder> recorder_;
};

Trainer::Trainer(const ModelSpec& spec, const TrainerOptions& options, const TrainerGroups& groups)
    : spec_(spec),
      options_(options),
      stages_(make_stages(spec, options_)),
      program_(make_program(options_, options_.shape.microbatches)),
      program_microbatches_(options_.shape.microbatches),
      balanced_(balanced_load(spec, options_)),
      worst_case_(bounding_load(spec, options_)),
      forecast_(checked_forecast(stages_, program_, spec, options_)),
      arena_(installed_arena()),
      ep_(Neighbours(options_).ep_group(groups.ep)),
      dp_(Neighbours(options_).dp_group(groups.dp)),
      edp_(Neighbours(options_).edp_group(groups.edp)),
      pp_(Neighbours(options_).pp_group(groups.pp)),
      world_(Neighbours(options_).world_group(groups.world)),
      embedding_(Neighbours(options_).embedding_group(groups.embedding)),
      model_(spec_, options_.layout, options_.shape.dtype, options_.layout.pp_rank(options_.rank)),
      host_(HostArenaOptions{.limit_bytes = options_.host_budget_bytes}),
      executor_(executor_stages(stages_, options_.layout), spec_, executor_options(options_),
                model_, {ep_, &pp_}, {arena_, host_, transfers_}),
      runner_(executor_, arena_, host_, ep_),
      policy_name_(options_.policy),
      policy_options_(options_.policy_options),
      budget_bytes_(options_.budget_bytes) {
  const int slots = most_flights(program_);
  for (int i = 0; i < slots; ++i) {
    const bool first = stages_.front()->slice.embedding, last = stages_.back()->slice.head;
    const int64_t tokens = options_.shape.tokens();
    ids_.push_back(first ? at::zeros({tokens}, at::kLong) : at::Tensor());
    targets_.push_back(last ? at::zeros({tokens}, at::kLong) : at::Tensor());
  }
  int64_t moe_layers = 0;
  for (const auto& stage : stages_) moe_layers += static_cast<int64_t>(stage->graph.gates.size());
  reduced_ = at::zeros({kReducedScalars}, at::kDouble);
  expert_counts_ = at::zeros({std::max<int64_t>(moe_layers, 1), spec.experts}, at::kDouble);
  if (options_.layout.pp_size > 1) imbalance_ = at::zeros({spec.layers + 1}, at::kDouble);
  ep_.reserve_gather(spec.experts);
  model_.init_parameters(options_.seed, ep_.rank());
  profile_ = options_.profile;
  if (profile_.is_null()) {
    profile_ = measure_profile();
  } else {
    check_profile(profile_, this_machine(), profile_key(spec_, graph_options(options_)), "profile");
  }
  for (auto& stage : stages_) stage->cost = costs_from_profile(stage->graph, profile_, "profile");
}

Trainer::~Trainer() = default;

void Trainer::set_policy(const std::string& name, const PolicyOptions& options,
                         int64_t budget_bytes) {
  policy_name_ = name;
  policy_options_ = options;
  budget_bytes_ = budget_bytes;
  policy_base_bytes_ = -1;
  arena_.set_budget(budget_bytes);
}

void Trainer::ensure_policy() {
  const int64_t base = arena_.live_bytes();
  if (base == policy_base_bytes_) return;
  policy_base_bytes_ = base;
  set_policies(policy_name_, policy_options_);
}

void Trainer::set_policies(const std::string& name, const PolicyOptions& options) {
  TrainingSetup setup = options_;
  setup.policy = name;
  setup.policy_options = options;
  setup.budget_bytes = budget_bytes_;
  RankOptions rank;
  std::vector<RankStage> list =
      make_policies(stages_, spec_, setup, forecast_, policy_base_bytes_, rank);
  runner_.set_stages(std::move(list), rank);
}

const RankProgram& Trainer::program(int64_t microbatches) {
  if (microbatches != program_microbatches_) {
    program_ = make_program(options_, microbatches);
    program_microbatches_ = microbatches;
  }
  return program_;
}

PipelineRunner::InputOf Trainer::inputs(const StepInput& input, bool train) {
  const TrainShape& shape = options_.shape;
  BGL_CHECK(input.tokens.dim() == 3 && input.tokens.size(1) == shape.micro_batch_size &&
                input.tokens.size(2) == shape.seq + 1,
            input.tokens.dim());
  return [this, &input, train](int slot, int stage, int64_t microbatch) {
    const TrainShape& shape = options_.shape;
    const auto at = static_cast<size_t>(slot);
    BGL_CHECK(at < ids_.size(), slot, ids_.size());
    const at::Tensor tokens = input.tokens.select(0, microbatch);
    const StageSlice& slice = stages_[static_cast<size_t>(stage)]->slice;
    const auto fill = [&](const at::Tensor& into, int64_t first) {
      into.view({shape.micro_batch_size, shape.seq}).copy_(tokens.narrow(1, first, shape.seq));
      return into;
    };
    const int64_t dp = options_.layout.dp_size();
    const double share = 1.0 / static_cast<double>(dp * input.tokens.size(0));
    MicrobatchInput result;
    result.step = input.step;
    result.microbatch = microbatch;
    if (slice.embedding) result.ids = fill(ids_[at], 0);
    if (slice.head) result.targets = fill(targets_[at], 1);
    result.routing = input.routing.empty() ? nullptr : &input.routing[microbatch];
    result.dropout_seed =
        mix_seed(mix_seed(mix_seed(mix_seed(options_.seed, "dropout"), input.step), microbatch),
                 options_.layout.dp_rank(options_.rank));
    result.loss_scale = share / static_cast<double>(shape.tokens());
    result.router_loss_scale = share;
    result.train = train;
    return result;
  };
}

StepReport Trainer::step(const StepInput& input) {
  ensure_policy();
  StepReport report;
  report.begin_ns = steady_now_ns();
  Watch watch(*this, input, report);
  run_microbatches(input, report);
  if (watch.phase("reduce gradients", &dp_, [&] { return reduce_gradients(input, report); })) {
    repeat_microbatches(input, report);
  }
  watch.phase("optimizer", nullptr, [&] { apply_gradients(input, report); });
  watch.finish();
  report.end_ns = steady_now_ns();
  report.end_bytes = arena_.live_bytes();
  report.host_end_bytes = host_.live_bytes();
  for (Communicator* group : {&ep_, &dp_, &edp_, &pp_, &world_, &embedding_}) {
    report.comm_ns += group->take_busy_ns();
  }
  return report;
}

void Trainer::run_microbatches(const StepInput& input, StepReport& report) {
  step_rows_per_rank_.assign(spec_.layers, {});
  expert_counts_.zero_();
  model_.zero_gradients();
  report.passes = runner_.train(program(input.tokens.size(0)), inputs(input, true));
  report.passes_end_ns = steady_now_ns();
  report.pass_bytes.insert(report.pass_bytes.end(), report.passes.pass_bytes.begin(),
                           report.passes.pass_bytes.end());
  // Sums over micro-batches are then the same whatever the order of passes was.
  std::sort(report.passes.microbatches.begin(), report.passes.microbatches.end(),
            [](const MicrobatchReport& a, const MicrobatchReport& b) {
              return std::pair(a.microbatch, a.stage) < std::pair(b.microbatch, b.stage);
            });
  for (const MicrobatchReport& done : report.passes.microbatches) {
    report.predicted_peak_bytes = std::max(report.predicted_peak_bytes, done.predicted_peak_bytes);
    report.measured_peak_bytes = std::max(report.measured_peak_bytes, done.measured_peak_bytes);
  }
  count_routing(report);
}

// Weights and biases are as they were, so this gives the numbers that the first run would have.
void Trainer::repeat_microbatches(const StepInput& input, StepReport& report) {
  report.discarded = std::move(report.passes.microbatches);
  set_policies("full-recompute", {});
  run_microbatches(input, report);
  reduce_gradients(input, report);
  set_policies(policy_name_, policy_options_);
  report.repeated = true;
}

double Trainer::evaluate(const at::Tensor& tokens) {
  ensure_policy();
  StepInput input;
  input.tokens = tokens;
  const MicrobatchLosses losses = runner_.evaluate(tokens.size(0), inputs(input, false));
  double* scalars = reduced_.data_ptr<double>();
  std::fill(scalars, scalars + kReducedScalars, 0.0);
  scalars[0] = losses.cross_entropy_sum;
  world_.all_reduce_sum(reduced_);
  return scalars[0] /
         static_cast<double>(options_.shape.tokens() * tokens.size(0) * options_.layout.dp_size());
}

at::Tensor Trainer::log_probs(const at::Tensor& tokens) {
  const TrainShape& shape = options_.shape;
  BGL_CHECK(stages_.size() == 1 && options_.layout.stage_count() == 1, "a whole model");
  BGL_CHECK(
      tokens.dim() == 2 && tokens.size(0) <= shape.micro_batch_size && tokens.size(1) <= shape.seq,
      tokens.dim());
  ensure_policy();
  ids_[0].zero_();
  targets_[0].zero_();
  ids_[0]
      .view({shape.micro_batch_size, shape.seq})
      .narrow(0, 0, tokens.size(0))
      .narrow(1, 0, tokens.size(1))
      .copy_(tokens);
  executor_.capture_log_probs();
  runner_.evaluate(1, [this](int, int, int64_t) {
    MicrobatchInput input;
    input.ids = ids_[0];
    input.targets = targets_[0];
    input.train = false;
    return input;
  });
  return executor_.take_log_probs()
      .view({shape.micro_batch_size, shape.seq, spec_.vocab})
      .narrow(0, 0, tokens.size(0))
      .narrow(1, 0, tokens.size(1));
}

Json Trainer::plan_json() {
  ensure_policy();
  Json units = Json::object();
  Json plan;
  int64_t peak_bytes = 0, exposed_ns = 0;
  for (auto& stage : stages_) {
    const MicrobatchState state = initial_state(stage->graph);
    const Plan save_all = uniform_plan(stage->graph, kSave);
    const std::vector<LayerLoad> loads(static_cast<size_t>(stage->graph.layers), balanced_);
    GateInput input;
    input.state = &state;
    input.plan = &save_all;
    input.loads = &loads;
    const Decision decision = stage->policy->decide(input);
    plan = plan_to_json(stage->graph, decision.plan);
    units.update(plan["units"]);
    peak_bytes = std::max(peak_bytes, decision.predicted_peak_bytes);
    exposed_ns += decision.exposed_ns;
  }
  plan["units"] = units;
  return {{"policy", policy_name_},
          {"plan", plan},
          {"predicted_peak_bytes", policy_base_bytes_ + peak_bytes},
          {"predicted_exposed_ns", exposed_ns}};
}

}  // namespace bagualu
