#include "bagualu/provision/predictor.h"

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/provision/floor.h"

namespace bagualu {
namespace {

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

}  // namespace

int64_t due_backward_bytes(const GateInput& input) {
  int64_t most = 0, gone = 0;
  for (size_t i = 0; i < input.ahead.size() && i < input.resting.size(); ++i) {
    if (input.ahead[i] != PassKind::kBackward) break;
    const MicrobatchBytes& bytes = input.resting[i].bytes;
    most = std::max(most, bytes.backward_peak_bytes - bytes.rest_bytes - gone);
    gone += bytes.rest_bytes;
  }
  return most;
}

Predictor::Predictor(const ProvisionContext& context)
    : context_(context),
      graph_(*context.graph),
      dependence_(graph_),
      survival_(survival_plan(graph_)),
      loads_(every_layer(graph_, context.balanced)),
      table_(memory_table(graph_, loads_)),
      balanced_table_(table_),
      worst_table_(memory_table(graph_, every_layer(graph_, context.worst_case))),
      survival_bytes_(microbatch_bytes(graph_, survival_, worst_table_)) {}

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
  turn_ = timeline_.size();
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
  const int64_t due = due_backward_bytes(input);
  if (backward_shift(input) == 0 && due == 0) {
    replay_memory(graph_, plan, table, timeline_, 0, replay);
    return;
  }
  span_.assign(timeline_.begin(), timeline_.begin() + static_cast<int64_t>(turn_));
  replay_memory(graph_, plan, table, span_, 0, replay);
  replay.peak_bytes = std::max(replay.peak_bytes, replay.live_bytes + due);
  replay.live_bytes += backward_shift(input);
  replay.peak_bytes = std::max(replay.peak_bytes, replay.live_bytes);
  replay_memory(graph_, plan, table, timeline_, turn_, replay);
}

Prediction Predictor::profile(const GateInput& input, const Plan& plan,
                              std::vector<int64_t>& high_by_point) {
  build_rest(input, plan);
  MemoryReplay replay = start_of(input);
  replay_profile(graph_, plan, table_, timeline_, replay, high_by_action_);
  const int ops = static_cast<int>(graph_.ops.size());
  high_by_point.assign(2 * graph_.ops.size(), 0);
  const int64_t shift = backward_shift(input);
  Prediction prediction{input.memory.live_bytes, replay.host_peak_bytes};
  int64_t high = 0;
  for (size_t i = 0; i < timeline_.size(); ++i) {
    const Action& action = timeline_[i];
    const int64_t at = high_by_action_[i] + (i >= turn_ ? shift : 0);
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
  const int64_t due = due_backward_bytes(input);
  if (due > 0 && ops > 0) {
    const int64_t at_turn = input.memory.live_bytes + due +
                            replay_span(graph_, plan, table_, timeline_, 0, turn_).net_bytes;
    prediction.peak_bytes = std::max(prediction.peak_bytes, at_turn);
    int64_t& last_forward = high_by_point[static_cast<size_t>(ops - 1)];
    last_forward = std::max(last_forward, at_turn);
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
  if (!more_gates && input.ahead.empty()) return true;  // nothing unknown is left
  if (!fits(replay.peak_bytes, replay.host_peak_bytes)) return false;

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
  const size_t turn = timeline_.size();
  append_backward(graph_, survival, state_, timeline_);
  span_.assign(timeline_.begin(), timeline_.begin() + static_cast<int64_t>(turn));

  // From here on without the others.
  for (const RestingMicrobatch& resting : input.resting) {
    replay.live_bytes -= resting.bytes.rest_bytes;
    replay.host_live_bytes -= resting.bytes.host_rest_bytes;
  }
  MicrobatchBytes own;
  replay.peak_bytes = replay.live_bytes;
  replay.host_peak_bytes = replay.host_live_bytes;
  replay_memory(graph_, survival, worst_table_, span_, 0, replay);
  own.forward_peak_bytes = replay.peak_bytes;
  own.rest_bytes = replay.peak_bytes = replay.live_bytes;
  own.host_rest_bytes = replay.host_live_bytes;
  replay_memory(graph_, survival, worst_table_, timeline_, turn, replay);
  own.backward_peak_bytes = replay.peak_bytes;
  own.host_peak_bytes = replay.host_peak_bytes;
  return survives_ahead(input, own, more_gates);
}

// Walks the rank's next passes until those in flight now are through; with only new ones in flight
// the floor says that they fit.
bool Predictor::survives_ahead(const GateInput& input, const MicrobatchBytes& own,
                               bool more_gates) const {
  std::vector<const MicrobatchBytes*> flight;  // oldest first
  int64_t rest = 0, host = 0;
  for (const RestingMicrobatch& resting : input.resting) {
    flight.push_back(&resting.least);
    rest += resting.least.rest_bytes;
    host += resting.least.host_rest_bytes;
  }
  if (more_gates && !fits(rest + own.forward_peak_bytes, host + own.host_peak_bytes)) return false;
  const auto begin = [&](const MicrobatchBytes& bytes) {
    flight.push_back(&bytes);
    rest += bytes.rest_bytes;
    host += bytes.host_rest_bytes;
  };
  begin(own);
  // Without a gate in between, these backwards run as things stand: part of the prediction.
  bool due = !more_gates;
  size_t oldest = 0;
  const size_t known = flight.size();
  for (size_t i = 0; oldest < known; ++i) {
    // A list that stops short: all that is left is backward.
    const PassKind pass = i < input.ahead.size() ? input.ahead[i] : PassKind::kBackward;
    due = due && pass == PassKind::kBackward;
    if (pass == PassKind::kForward) {
      if (!fits(rest + survival_bytes_.forward_peak_bytes,
                host + survival_bytes_.host_peak_bytes)) {
        return false;
      }
      begin(survival_bytes_);
      continue;
    }
    const MicrobatchBytes& bytes = *flight[oldest++];
    if (!due && !fits(rest - bytes.rest_bytes + bytes.backward_peak_bytes, host)) return false;
    rest -= bytes.rest_bytes;
    host -= bytes.host_rest_bytes;
  }
  return true;
}

bool Predictor::fits(int64_t device_bytes, int64_t host_bytes) const {
  return fits(Prediction{device_bytes, host_bytes});
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
