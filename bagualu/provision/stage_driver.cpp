#include "bagualu/provision/stage_driver.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/provision/floor.h"
#include "bagualu/provision/plan_cost.h"

namespace bagualu {
namespace {

/// A micro-batch in flight.
struct InFlight {
  int microbatch = -1;
  MicrobatchState state;
  Plan plan;
  const std::vector<LayerLoad>* loads = nullptr;
  MemoryTable table;
  MicrobatchBytes bytes;  ///< once it rests
  MicrobatchBytes least;
};

class StageDriver {
 public:
  StageDriver(const ProvisionContext& context, Policy& policy,
              const std::vector<PipelinePass>& passes,
              const std::vector<std::vector<LayerLoad>>& loads, const StageOptions& options)
      : context_(context),
        graph_(*context.graph),
        policy_(policy),
        passes_(passes),
        loads_(loads),
        options_(options),
        calm_rest_bytes_(rest_bytes(graph_, uniform_plan(graph_, kSave), at(context.balanced))),
        least_rest_bytes_(rest_bytes(graph_, survival_plan(graph_), at(context.worst_case))) {
    run_.microbatches.resize(loads.size());
  }

  StageRun run() {
    for (pass_ = 0; pass_ < passes_.size(); ++pass_) {
      run_.memory.peak_bytes = run_.memory.live_bytes;
      run_.memory.host_peak_bytes = run_.memory.host_live_bytes;
      passes_[pass_].kind == PassKind::kForward ? forward() : backward();
      note_death();
      if (options_.stop_at_death && !run_.deaths.empty()) break;
    }
    run_.memory.peak_bytes = peak_bytes_;
    run_.memory.host_peak_bytes = host_peak_bytes_;
    return std::move(run_);
  }

 private:
  std::vector<LayerLoad> at(const LayerLoad& load) const {
    return std::vector<LayerLoad>(static_cast<size_t>(graph_.layers), load);
  }

  void note_death() {
    peak_bytes_ = std::max(peak_bytes_, run_.memory.peak_bytes);
    host_peak_bytes_ = std::max(host_peak_bytes_, run_.memory.host_peak_bytes);
    const bool device = context_.activation_budget_bytes != 0 &&
                        run_.memory.peak_bytes > context_.activation_budget_bytes;
    const bool host =
        context_.host_budget_bytes != 0 && run_.memory.host_peak_bytes > context_.host_budget_bytes;
    if (device || host) run_.deaths.push_back(passes_[pass_]);
  }

  void forward() {
    InFlight one;
    one.microbatch = passes_[pass_].microbatch;
    one.loads = &loads_[static_cast<size_t>(one.microbatch)];
    one.state = initial_state(graph_);
    one.plan = uniform_plan(graph_, kSave);
    one.table = memory_table(graph_, *one.loads);
    std::vector<LayerLoad> known = at(context_.balanced);
    GateInput input;
    input.state = &one.state;
    input.plan = &one.plan;
    input.loads = &known;
    look_ahead(input);
    for (int gate = -1;;) {
      describe_gate(gate, *one.loads, known, input);
      decide(input, one);
      gate = append_forward(graph_, one.plan, one.state, timeline_);
      replay(one);
      if (gate < 0) break;
    }
    settle(one);
    run_.microbatches[static_cast<size_t>(one.microbatch)].rest_bytes = one.bytes.rest_bytes;
    flight_.push_back(std::move(one));
  }

  // The passes up to the backward of the micro-batch that begins now, and who is in flight then.
  void look_ahead(GateInput& input) const {
    int64_t later = 0;
    for (size_t p = pass_ + 1; p < passes_.size(); ++p) {
      input.ahead.push_back(passes_[p].kind);
      if (passes_[p].microbatch == passes_[pass_].microbatch) break;
      later += passes_[p].kind == PassKind::kForward ? 1 : 0;
    }
    input.backward_resting_bytes = later * calm_rest_bytes_;
    input.least_backward_resting_bytes = later * least_rest_bytes_;
  }

  void describe_gate(int gate, const std::vector<LayerLoad>& loads, std::vector<LayerLoad>& known,
                     GateInput& input) const {
    input.memory = run_.memory;
    reach_gate(context_, gate, loads, known, input);
    input.resting.clear();
    input.resting_bytes = input.least_resting_bytes = 0;
    for (const InFlight& other : flight_) {
      input.resting.push_back({&other.state, &other.plan, other.loads, other.bytes, other.least});
      input.resting_bytes += other.bytes.rest_bytes;
      input.least_resting_bytes += other.least.rest_bytes;
    }
  }

  void decide(const GateInput& input, InFlight& one) {
    Decision decision = policy_.decide(input);
    run_.decisions.push_back({one.microbatch, input.gate, decision, run_.memory.live_bytes});
    StageMicrobatch& outcome = run_.microbatches[static_cast<size_t>(one.microbatch)];
    outcome.exposed_ns = decision.resting_plans.empty()
                             ? decision.exposed_ns
                             : plan_cost_ns(context_, *input.loads, one.state, decision.plan);
    outcome.repeat_step = outcome.repeat_step || decision.repeat_step;
    for (size_t i = 0; i < decision.resting_plans.size(); ++i) {
      demote(flight_[i], std::move(decision.resting_plans[i]));
    }
    one.plan = std::move(decision.plan);
    keep_past_choices(graph_, one.state, one.plan);
    append_demotions(graph_, one.plan, one.state, timeline_);
  }

  void demote(InFlight& resting, Plan plan) {
    keep_past_choices(graph_, resting.state, plan);
    if (plan == resting.plan) return;
    int64_t& exposed_ns = run_.microbatches[static_cast<size_t>(resting.microbatch)].exposed_ns;
    for (int u = 0; u < static_cast<int>(graph_.units.size()); ++u) {
      if (plan.residency[u] == resting.plan.residency[u]) continue;
      exposed_ns += unit_cost_ns(context_, *resting.loads, u, plan.residency[u],
                                 /*drains_now=*/true, plan.prefetch);
    }
    resting.plan = std::move(plan);
    append_demotions(graph_, resting.plan, resting.state, timeline_);
    replay(resting);
    settle(resting);
  }

  void backward() {
    BGL_CHECK(!flight_.empty() && flight_.front().microbatch == passes_[pass_].microbatch,
              pass_text(passes_[pass_]));
    InFlight& oldest = flight_.front();
    const auto& fates = oldest.state.storage;
    run_.microbatches[static_cast<size_t>(oldest.microbatch)].demotions =
        static_cast<int>(std::count_if(fates.begin(), fates.end(), [](StorageFate fate) {
          return fate != StorageFate::kLive && fate != StorageFate::kGone &&
                 fate != StorageFate::kAbsent;
        }));
    append_backward(graph_, oldest.plan, oldest.state, timeline_);
    replay(oldest);
    flight_.pop_front();
  }

  void replay(const InFlight& one) {
    MemoryReplay& memory = run_.memory;
    const int64_t before = std::exchange(memory.peak_bytes, memory.live_bytes);
    replay_memory(graph_, one.plan, one.table, timeline_, 0, memory);
    if (!run_.decisions.empty()) {
      int64_t& peak = run_.decisions.back().peak_bytes;
      peak = std::max(peak, memory.peak_bytes);
    }
    memory.peak_bytes = std::max(memory.peak_bytes, before);
    timeline_.clear();
  }

  void settle(InFlight& one) const {
    Plan survival = survival_plan(graph_);
    keep_past_choices(graph_, one.state, survival);
    one.bytes = resting_microbatch_bytes(graph_, one.state, one.plan, one.table);
    one.least = resting_microbatch_bytes(graph_, one.state, survival, one.table);
  }

  const ProvisionContext& context_;
  const Graph& graph_;
  Policy& policy_;
  const std::vector<PipelinePass>& passes_;
  const std::vector<std::vector<LayerLoad>>& loads_;
  const StageOptions options_;
  const int64_t calm_rest_bytes_;
  const int64_t least_rest_bytes_;
  size_t pass_ = 0;
  std::deque<InFlight> flight_;  ///< oldest first
  Timeline timeline_;            ///< not replayed yet
  int64_t peak_bytes_ = 0;
  int64_t host_peak_bytes_ = 0;
  StageRun run_;
};

}  // namespace

StageRun drive_stage(const ProvisionContext& context, Policy& policy, const PipelineOrder& order,
                     int rank, const std::vector<std::vector<LayerLoad>>& loads,
                     const StageOptions& options) {
  BGL_CHECK(rank >= 0 && rank < static_cast<int>(order.ranks.size()), rank, order.ranks.size());
  BGL_CHECK(static_cast<int>(loads.size()) == order.microbatches, loads.size(), order.microbatches);
  for (const auto& layers : loads) {
    BGL_CHECK(static_cast<int>(layers.size()) == context.graph->layers, layers.size());
  }
  return StageDriver(context, policy, order.ranks[static_cast<size_t>(rank)], loads, options).run();
}

}  // namespace bagualu
