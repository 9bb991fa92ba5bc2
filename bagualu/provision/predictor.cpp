#include "bagualu/provision/predictor.h"

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/provision/floor.h"

namespace bagualu {
namespace {

std::vector<LayerLoad> every_layer(const Graph& graph, const LayerLoad& load) {
  return std::vector<LayerLoad>(static_cast<size_t>(graph.layers), load);
}

// What only returns bytes is no peak of the point that follows: between the first and the last of a
// row of frees, storages seem to be live there that are not.
bool takes_bytes(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
    case ActionKind::kBackward:
    case ActionKind::kRecompute:
    case ActionKind::kReload:
    case ActionKind::kEncode:
    case ActionKind::kDecode:
      return true;
    default:
      return false;
  }
}

// Other micro-batches come and go between this one's forward and its backward.
int64_t backward_shift(const GateInput& input) {
  return input.backward_resting_bytes - input.resting_bytes;
}

size_t first_backward(const Timeline& timeline) {
  size_t at = 0;
  while (at < timeline.size() && timeline[at].kind != ActionKind::kBackward) ++at;
  return at;
}

}  // namespace

Predictor::Predictor(const ProvisionContext& context)
    : context_(context),
      graph_(*context.graph),
      dependence_(graph_),
      survival_(survival_plan(graph_)),
      loads_(every_layer(graph_, context.balanced)),
      table_(memory_table(graph_, loads_)),
      balanced_table_(table_),
      worst_table_(memory_table(graph_, every_layer(graph_, context.worst_case))) {}

void Predictor::set_loads(const std::vector<LayerLoad>& loads) {
  BGL_CHECK(loads.size() == loads_.size(), loads.size(), loads_.size());
  size_t changed = 0;
  bool all_balanced = true;
  for (size_t layer = 0; layer < loads.size(); ++layer) {
    changed += loads[layer] == loads_[layer] ? 0 : 1;
    all_balanced = all_balanced && loads[layer] == context_.balanced;
  }
  if (changed == 0) return;
  if (all_balanced) {
    table_ = balanced_table_;
  } else {
    for (size_t layer = 0; layer < loads.size(); ++layer) {
      if (loads[layer] == loads_[layer]) continue;
      update_layer(graph_, dependence_, static_cast<int>(layer), loads[layer], table_);
    }
  }
  loads_ = loads;
}

MemoryReplay Predictor::start_of(const GateInput& input) const {
  MemoryReplay replay = input.memory;
  replay.peak_bytes = replay.live_bytes;
  replay.host_peak_bytes = replay.host_live_bytes;
  return replay;
}

void Predictor::build_rest(const GateInput& input, const Plan& plan) {
  state_ = *input.state;
  timeline_.clear();
  append_demotions(graph_, plan, state_, timeline_);
  while (append_forward(graph_, plan, state_, timeline_) >= 0) {
  }
  append_backward(graph_, plan, state_, timeline_);
}

Prediction Predictor::predict(const GateInput& input, const Plan& plan) {
  build_rest(input, plan);
  MemoryReplay replay = start_of(input);
  replay_rest(input, plan, table_, replay);
  return {replay.peak_bytes, replay.host_peak_bytes};
}

void Predictor::replay_rest(const GateInput& input, const Plan& plan, const MemoryTable& table,
                            MemoryReplay& replay) {
  if (backward_shift(input) == 0) {
    replay_memory(graph_, plan, table, timeline_, 0, replay);
    return;
  }
  const size_t turn = first_backward(timeline_);
  span_.assign(timeline_.begin(), timeline_.begin() + static_cast<int64_t>(turn));
  replay_memory(graph_, plan, table, span_, 0, replay);
  replay.live_bytes += backward_shift(input);
  replay_memory(graph_, plan, table, timeline_, turn, replay);
}

Prediction Predictor::profile(const GateInput& input, const Plan& plan,
                              std::vector<int64_t>& high_by_point) {
  build_rest(input, plan);
  MemoryReplay replay = start_of(input);
  replay_profile(graph_, plan, table_, timeline_, replay, high_by_action_);
  const int ops = static_cast<int>(graph_.ops.size());
  high_by_point.assign(2 * graph_.ops.size(), 0);
  const int64_t shift = backward_shift(input);
  const size_t turn = first_backward(timeline_);
  Prediction prediction{input.memory.live_bytes, replay.host_peak_bytes};
  int64_t high = 0;
  for (size_t i = 0; i < timeline_.size(); ++i) {
    const Action& action = timeline_[i];
    const int64_t at = high_by_action_[i] + (i >= turn ? shift : 0);
    prediction.peak_bytes = std::max(prediction.peak_bytes, at);
    if (takes_bytes(action.kind)) high = std::max(high, at);
    if (action.kind == ActionKind::kForward) {
      high_by_point[static_cast<size_t>(action.id)] = high;
      high = 0;
    } else if (action.kind == ActionKind::kBackward) {
      high_by_point[static_cast<size_t>(2 * ops - 1 - action.id)] = high;
      high = 0;
    }
  }
  return prediction;
}

bool Predictor::survives_worst_case(const GateInput& input, const Plan& plan) {
  state_ = *input.state;
  timeline_.clear();
  append_demotions(graph_, plan, state_, timeline_);
  const bool more_gates = append_forward(graph_, plan, state_, timeline_) >= 0;
  MemoryReplay replay = start_of(input);
  replay_memory(graph_, plan, table_, timeline_, 0, replay);
  if (!more_gates) return true;  // nothing unknown is left

  for (int layer = 0; layer < graph_.layers; ++layer) {
    const bool known = input.gate >= 0 && layer <= graph_.gates[input.gate].layer;
    update_layer(graph_, dependence_, layer, known ? loads_[layer] : context_.worst_case,
                 worst_table_);
  }
  Plan survival = survival_;
  keep_past_choices(graph_, state_, survival);
  timeline_.clear();
  append_demotions(graph_, survival, state_, timeline_);
  while (append_forward(graph_, survival, state_, timeline_) >= 0) {
  }
  append_backward(graph_, survival, state_, timeline_);
  GateInput worst = input;
  replay.live_bytes -= input.resting_bytes - input.least_resting_bytes;
  worst.resting_bytes = input.least_resting_bytes;
  worst.backward_resting_bytes = input.least_backward_resting_bytes;
  replay_rest(worst, survival, worst_table_, replay);
  return fits({replay.peak_bytes, replay.host_peak_bytes});
}

int64_t Predictor::excess_bytes(const Prediction& prediction) const {
  if (context_.activation_budget_bytes == 0) return 0;
  return std::max<int64_t>(0, prediction.peak_bytes - context_.activation_budget_bytes);
}

bool Predictor::fits(const Prediction& prediction) const {
  return excess_bytes(prediction) == 0 &&
         (context_.host_budget_bytes == 0 ||
          prediction.host_peak_bytes <= context_.host_budget_bytes);
}

}  // namespace bagualu
