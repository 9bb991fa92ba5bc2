#include "bagualu/sim/pipeline_rank.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/cost/job_graph_costs.h"
#include "bagualu/graph/megatron_moe.h"
#include "bagualu/provision/floor.h"
#include "bagualu/provision/job_survival.h"
#include "bagualu/provision/rank_votes.h"

namespace bagualu {
namespace {

constexpr const char* kWhere = "simulation";

// Layers of the multi-token prediction, behind the model's own.
ModelSpec with_mtp_layers(const ModelSpec& model) {
  ModelSpec spec = model;
  spec.layers += spec.mtp_layers;
  spec.moe_layer.resize(static_cast<size_t>(spec.layers), spec.has_moe() ? 1 : 0);
  if (!spec.windowed_layer.empty()) {
    spec.windowed_layer.resize(static_cast<size_t>(spec.layers), 0);
  }
  return spec;
}

void check_job(const Job& job) {
  if (job.pipeline == PipelineKind::kDualPipe) {
    throw InvalidInput(kWhere, "pipeline", std::string(pipeline_kind_name(job.pipeline)),
                       "an order in which a rank holds one copy of the model, as dualpipe-v");
  }
  for (size_t s = 0; s < job.stages.size(); ++s) {
    const StageContent& stage = job.stages[s];
    if (stage.layer_count + stage.mtp_layers == 0 && !stage.head) {
      throw InvalidInput(kWhere, "stages[" + std::to_string(s) + "]", "no layer",
                         "a layer on every stage but that of the head");
    }
  }
  const JobLayout& l = job.layout;
  if (l.ep > 1 && l.ep * l.etp % (l.tp * l.cp) != 0) {
    throw InvalidInput(kWhere, "layout", layout_text(l),
                       "ep * etp a multiple of tp * cp: else ranks of several expert groups wait "
                       "for each other within a layer");
  }
}

bool remembers(const std::string& policy) { return policy == "adaptive"; }

bool is_fitted(const SimPolicy& policy) {
  const PolicyOptions& options = policy.options;
  return (policy.policy == "static" && options.plan.is_null()) ||
         (policy.policy == "kwai" && !options.kwai_offload_ratio) || policy.policy == "adapipe";
}

double fit_factor(const SimPolicy& policy) {
  if (policy.policy == "static") return policy.options.static_fit_imbalance;
  if (policy.policy == "kwai") return policy.options.kwai_fit_imbalance;
  return policy.options.adapipe_fit_imbalance;
}

// A plan for the whole model, without the units of other stages.
Json plan_of_stage(Json plan, const Graph& graph) {
  if (!plan.is_object() || !plan.contains("units") || !plan["units"].is_object()) return plan;
  const Json units = plan["units"];
  for (const auto& [name, value] : units.items()) {
    if (graph.find_unit(name) < 0) plan["units"].erase(name);
  }
  return plan;
}

}  // namespace

PipelinePlan::PipelinePlan(const Job& of, const SystemSpec& machine, const SimPolicy& by,
                           int64_t budget, int64_t host_budget)
    : job(of), system(machine), policy(by), budget_bytes(budget), host_budget_bytes(host_budget) {
  check_job(job);
  order = make_overlap_order(job.pipeline, static_cast<int>(job.layout.pp),
                             static_cast<int>(job.layout.vpp), static_cast<int>(job.microbatches),
                             policy.overlap);
  sends = send_plan(order);
  if (job.model.has_moe()) {
    balanced.rows = job.balanced_rows();
    worst_case.rows = static_cast<int64_t>(
        std::ceil(worst_imbalance(job) * static_cast<double>(balanced.rows) - 1e-6));
    balanced.piece_rows = balanced.rows;
    worst_case.piece_rows = worst_case.rows;
  }
  message_bytes = job.sequence_tokens() * job.model.hidden * job.element_bytes;
  spec = with_mtp_layers(job.model);
  int32_t moe = 0;
  for (int64_t layer = 0; layer < spec.layers; ++layer) {
    moe_index.push_back(spec.has_moe() && spec.is_moe(layer) ? moe++ : -1);
  }
}

PipelineRank::PipelineRank(const PipelinePlan& plan, const JobMemory& memory, int pp_rank)
    : plan_(plan),
      static_bytes_(memory.static_bytes(pp_rank)),
      program_(rank_program(plan.order, plan.sends, pp_rank)) {
  const std::vector<int64_t> numbers = plan.job.stages_of_rank(pp_rank);
  for (const int64_t number : numbers) {
    add_stage(static_cast<int>(number), static_cast<int64_t>(numbers.size()));
  }
  set_budgets();
  for (int m = 0; m < plan.job.microbatches; ++m) {
    for (const auto& stage : stages_) {
      for (const GateSpec& gate : stage->graph.gates) {
        const auto layer = static_cast<size_t>(stage->graph.first_layer + gate.layer);
        places_.push_back({m, plan.moe_index[layer]});
      }
    }
  }
  policies_ = make_policies(list_);
  if (plan.budget_bytes > 0 && is_fitted(plan.policy)) fit_policies(fit_factor(plan.policy));
  seats_.push_back(make_seat());
  BGL_CHECK(cells() == seats_[0]->recorder->cells(), cells(), seats_[0]->recorder->cells());
}

void PipelineRank::add_stage(int number, int64_t stages) {
  const Job& job = plan_.job;
  const StageContent& content = job.stages[static_cast<size_t>(number)];
  MegatronGraphOptions options = megatron_options(job);
  options.layer_count = content.layer_count + content.mtp_layers;
  options.first_layer = content.layer_count > 0 ? content.first_layer : job.model.layers;
  options.has_embedding = content.embedding;
  options.has_head = content.head;
  options.split_weight_grads = plan_.policy.overlap || job.pipeline != PipelineKind::k1F1B;
  auto stage = std::make_unique<Stage>();
  stage->graph = options.layer_count > 0 ? build_megatron_graph(plan_.spec, options)
                                         : build_megatron_head(plan_.spec, options);
  stage->cost = job_graph_costs(stage->graph, job, plan_.system, plan_.worst_case.rows);
  ProvisionContext& context = stage->context;
  context.graph = &stage->graph;
  context.cost = &stage->cost;
  context.host_budget_bytes = plan_.host_budget_bytes / stages;  // as the trainer does
  context.balanced = plan_.balanced;
  context.worst_case = plan_.worst_case;
  stage->options = plan_.policy.options;
  stage->options.plan = plan_of_stage(stage->options.plan, stage->graph);
  list_.push_back({number, &context, nullptr});
  stages_.push_back(std::move(stage));
}

void PipelineRank::set_budgets() {
  std::vector<int> numbers;
  std::vector<const Graph*> graphs;
  for (size_t s = 0; s < stages_.size(); ++s) {
    numbers.push_back(list_[s].stage);
    graphs.push_back(&stages_[s]->graph);
  }
  const RankFloor floor =
      rank_floor(program_, numbers, graphs, plan_.worst_case, plan_.message_bytes);
  options_.stop_at_death = true;
  options_.host_budget_bytes = plan_.host_budget_bytes;
  std::vector<int64_t> budgets(stages_.size(), 0);
  if (plan_.budget_bytes > 0) {
    // 0 would be no limit at all.
    options_.activation_budget_bytes = std::max<int64_t>(1, plan_.budget_bytes - static_bytes_);
    if (plan_.policy.policy == "adaptive") {
      short_by_bytes_ =
          std::max<int64_t>(0, static_bytes_ + floor.activation_bytes - plan_.budget_bytes);
    }
    budgets = stage_budgets(floor, stage_calm_bytes(floor, graphs, plan_.balanced),
                            options_.activation_budget_bytes);
  }
  for (size_t s = 0; s < stages_.size(); ++s) {
    stages_[s]->context.activation_budget_bytes = budgets[s];
    stages_[s]->options.adapipe_in_flight =
        std::max<int64_t>(stages_[s]->options.adapipe_in_flight, floor.in_flight[s]);
  }
}

PipelineRank::Policies PipelineRank::make_policies(std::vector<RankStage>& stages) const {
  Policies policies;
  for (size_t s = 0; s < stages_.size(); ++s) {
    const Stage& stage = *stages_[s];
    policies.push_back(make_policy(plan_.policy.policy, stage.context, stage.options));
    stages[s].policy = policies.back().get();
  }
  return policies;
}

bool PipelineRank::fits_at(double factor) {
  const LayerLoad load = scaled_load(plan_.balanced, plan_.worst_case, factor);
  const LoadOf load_of = [load](int, int, int) { return load; };
  return replay_rank(list_, options_, program_, load_of).deaths.empty();
}

// Policies with one plan for the whole run look at one micro-batch; several share the budget. So
// they are given the largest part of it with which the whole rank survives the load that they are
// fitted for, found to 1/256.
void PipelineRank::fit_policies(double factor) {
  if (fits_at(factor)) return;
  std::vector<int64_t> budgets;
  for (const auto& stage : stages_) budgets.push_back(stage->context.activation_budget_bytes);
  const auto give = [&](int part) {
    for (size_t s = 0; s < stages_.size(); ++s) {
      stages_[s]->context.activation_budget_bytes = std::max<int64_t>(1, budgets[s] / 256 * part);
    }
    policies_ = make_policies(list_);
  };
  int fits = 0, fails = 256;
  while (fails - fits > 1) {
    const int part = (fits + fails) / 2;
    give(part);
    (fits_at(factor) ? fits : fails) = part;
  }
  give(fits);
  // What was planned with less is judged by all that there is.
  for (size_t s = 0; s < stages_.size(); ++s) {
    stages_[s]->context.activation_budget_bytes = budgets[s];
  }
}

std::unique_ptr<PipelineRank::Seat> PipelineRank::make_seat() const {
  auto seat = std::make_unique<Seat>();
  seat->stages = list_;
  RecorderOptions options;
  options.static_bytes = static_bytes_;
  options.rows_per_received = plan_.job.layout.etp;
  seat->recorder = std::make_unique<ProgramRecorder>(
      list_, static_cast<int>(plan_.job.microbatches), plan_.sends, options);
  return seat;
}

std::vector<RankOutcome> PipelineRank::decide(const std::vector<MemberRows>& members) {
  while (seats_.size() < members.size()) seats_.push_back(make_seat());
  std::vector<RankOutcome> outcomes(members.size());
  RankVotes votes(members.size());
  std::mutex turn;  // whoever waits for the others hands it on
  drive_ranks(members.size(), votes, [&](size_t m) {
    std::unique_lock lock(turn);
    outcomes[m] = drive(*seats_[m], members[m], [&](bool mine) {
      lock.unlock();
      const bool all = votes.agree(mine);
      lock.lock();
      return all;
    });
  });
  return outcomes;
}

RankOutcome PipelineRank::drive(Seat& seat, const MemberRows& member,
                                const ProgramRecorder::Agree& agree) const {
  // Plans that a policy remembers would make an outcome depend on what was asked before.
  if (remembers(plan_.policy.policy)) seat.policies = make_policies(seat.stages);
  ProgramRecorder& recorder = *seat.recorder;
  RankDriver driver(seat.stages, options_, recorder);
  const auto balanced = static_cast<double>(std::max<int64_t>(1, plan_.balanced.rows));
  recorder.begin(
      driver,
      [&](int stage, int microbatch, int layer) {
        const int32_t cell = recorder.cell(stage, microbatch, layer);
        const int64_t received = member.rows[cell * member.stride];
        const double over = member.imbalance != nullptr ? member.imbalance[cell]
                                                        : static_cast<double>(received) / balanced;
        return GateCounts{{received, received}, over};
      },
      agree);
  const RankRun run = driver.run(program_);
  RankOutcome outcome = outcome_of(run);
  StepProgram program = recorder.take();
  program.dies = outcome.died;
  prepare(&program);
  outcome.program = std::make_shared<const StepProgram>(std::move(program));
  return outcome;
}

RankOutcome PipelineRank::outcome_of(const RankRun& run) const {
  RankOutcome outcome;
  outcome.died = !run.deaths.empty();
  outcome.peak_bytes = static_bytes_ + run.memory.peak_bytes;
  outcome.serialised_segments = run.serialised_segments;
  outcome.decisions = static_cast<int64_t>(run.decisions.size());
  for (const RankDecision& one : run.decisions) {
    outcome.mitigated_gates += one.decision.mitigated ? 1 : 0;
  }
  for (const RankFlight& flight : run.flights) {
    outcome.exposed_ns += flight.exposed_ns;
    outcome.repeat_step = outcome.repeat_step || flight.repeat_step;
  }
  return outcome;
}

}  // namespace bagualu
