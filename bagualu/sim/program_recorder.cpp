#include "bagualu/sim/program_recorder.h"

#include <algorithm>
#include <string>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/cost/op_flops.h"
#include "bagualu/cost/residency_pricing.h"
#include "bagualu/sim/program_recorder_impl.h"

namespace bagualu {
namespace {

bool is_forward(ActionKind kind) {
  return kind == ActionKind::kForward || kind == ActionKind::kForwardEnd;
}

}  // namespace

ProgramRecorder::Impl::Impl(std::vector<RankStage> stages, int microbatches, const SendPlan& sends,
                            const RecorderOptions& options)
    : options_(options), microbatches_(microbatches) {
  for (const RankStage& stage : stages) {
    StageTables of;
    of.stage = stage.stage;
    of.graph = stage.context->graph;
    of.cost = stage.context->cost;
    of.gate_of.assign(static_cast<size_t>(of.graph->layers), -1);
    for (const GateSpec& gate : of.graph->gates) {
      of.gate_of[static_cast<size_t>(gate.layer)] = gates_++;
    }
    const size_t ids = std::max(of.graph->ops.size(), of.graph->storages.size());
    for (size_t kind = 0; kind < kActionKinds; ++kind) {
      of.times[kind].assign(of.graph->ops.size(), -1);
      of.names[kind].assign(ids, -1);
    }
    tables_.push_back(std::move(of));
  }
  for (size_t m = 0; m < sends.messages.size(); ++m) {
    const StageMessage& message = sends.messages[m];
    messages_[{message.to.stage, message.is_gradient(), message.to.microbatch}] =
        static_cast<int32_t>(m);
  }
}

int ProgramRecorder::Impl::index_of(int stage) const {
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (tables_[i].stage == stage) return static_cast<int>(i);
  }
  throw InternalError("stage that is not recorded: " + std::to_string(stage));
}

void ProgramRecorder::Impl::begin(const RankDriver& driver, CountsOf counts_of, Agree agree) {
  driver_ = &driver;
  counts_of_ = std::move(counts_of);
  agree_ = std::move(agree);
  slots_.clear();
  loads_.assign(static_cast<size_t>(microbatches_ * gates_), {});
  for (StageTables& of : tables_) {
    for (auto& names : of.names) std::fill(names.begin(), names.end(), -1);
  }
  writer_.begin(tables_.front().graph->tokens, microbatches_ * gates_, options_.static_bytes);
}

void ProgramRecorder::Impl::open(int slot, int stage, int microbatch) {
  const auto at = static_cast<size_t>(slot);
  if (slots_.size() <= at) slots_.resize(at + 1);
  const int index = index_of(stage);
  slots_[at] = {index, microbatch, {}, {}};
  slots_[at].copies.assign(tables_[static_cast<size_t>(index)].graph->storages.size(), -1);
}

GateCounts ProgramRecorder::Impl::counts(int slot, int layer) {
  const SlotState& of = slots_[static_cast<size_t>(slot)];
  const StageTables& tables = tables_[static_cast<size_t>(of.stage)];
  const GateCounts counts = counts_of_(tables.stage, of.microbatch, layer);
  loads_[static_cast<size_t>(cell_of(tables, of.microbatch, layer))] = counts.load;
  return counts;
}

bool ProgramRecorder::Impl::agree(bool mine) {
  if (options_.exchange_counts) {
    SimInstruction made;
    made.step = SimStep::kIssue;
    made.name = writer_.name("vote");
    made.transfer = writer_.transfer({.kind = SimTransferKind::kExchange, .name = made.name});
    writer_.instruction(made);
    made.step = SimStep::kAwait;
    writer_.instruction(made);
  }
  return agree_ ? agree_(mine) : mine;
}

void ProgramRecorder::Impl::decide(int slot, int64_t ns) {
  const SlotState& of = slots_[static_cast<size_t>(slot)];
  SimInstruction made;
  made.step = SimStep::kCompute;
  made.stage = static_cast<int16_t>(tables_[static_cast<size_t>(of.stage)].stage);
  made.microbatch = of.microbatch;
  made.name = writer_.name("decide");
  made.time = writer_.time({.points = {{0, ns}}});
  writer_.instruction(made);
}

void ProgramRecorder::Impl::run(const StageAction& one) {
  slot_ = &slots_[static_cast<size_t>(one.slot)];
  of_ = &tables_[static_cast<size_t>(slot_->stage)];
  plan_ = &driver_->plan_of(one.slot);
  const Action& action = one.action;
  switch (action.kind) {
    case ActionKind::kForward:
    case ActionKind::kBackward:
    case ActionKind::kInputGrad:
    case ActionKind::kWeightGrad:
    case ActionKind::kRecompute: {
      const OpSpec& op = graph().ops[static_cast<size_t>(action.id)];
      op.stream == Stream::kComm ? communicate(action) : compute(action);
      return bytes_of_pass(action);
    }
    case ActionKind::kFree:
    case ActionKind::kDrop:
      return add_storage(writer_.at_end(), action.id, -1);
    case ActionKind::kOffload:
      return copy_out(action);
    case ActionKind::kReload:
      return copy_in(action);
    case ActionKind::kDrain:
      await_copy(action);
      return add_storage(writer_.at_end(), action.id, -1);
    case ActionKind::kAwait:
      return await_copy(action);
    case ActionKind::kEncode:
    case ActionKind::kDecode:
      return recode(action);
    case ActionKind::kGate:
      return exchange_counts(action);
    case ActionKind::kForwardEnd:
    case ActionKind::kBackwardEnd:
      return end_communication(action);
  }
}

// ---- instructions ----

SimInstruction ProgramRecorder::Impl::instruction(SimStep step, const Action& action,
                                                  int32_t cell) {
  SimInstruction made;
  made.step = step;
  made.stage = static_cast<int16_t>(of_->stage);
  made.microbatch = slot_->microbatch;
  made.name = name(action);
  made.cell = cell;
  return made;
}

int32_t ProgramRecorder::Impl::name(const Action& action) {
  if (action.kind == ActionKind::kGate) return writer_.name(action_text(graph(), action));
  int32_t& known = of_->names[static_cast<size_t>(action.kind)][static_cast<size_t>(action.id)];
  if (known < 0) known = writer_.name(action_text(graph(), action));
  return known;
}

void ProgramRecorder::Impl::compute(const Action& action) {
  const OpSpec& op = graph().ops[static_cast<size_t>(action.id)];
  SimInstruction made = instruction(SimStep::kCompute, action,
                                    scales_with_rows(op.kind) ? cell_of_op(action.id) : -1);
  made.time = time_of(action);
  writer_.instruction(made);
}

void ProgramRecorder::Impl::issue(const Action& action, SimTransfer transfer, int32_t cell) {
  SimInstruction made = instruction(SimStep::kIssue, action, cell);
  transfer.name = made.name;
  made.transfer = writer_.transfer(transfer);
  writer_.instruction(made);
}

void ProgramRecorder::Impl::communicate(const Action& action) {
  const OpSpec& op = graph().ops[static_cast<size_t>(action.id)];
  const bool forward = action.kind == ActionKind::kForward;
  SimTransfer transfer;
  if (op.kind == OpKind::kStageRecv || op.kind == OpKind::kStageSend) {
    const int storage = op.kind == OpKind::kStageRecv ? op.creates.front() : op.reads.front();
    transfer.kind = SimTransferKind::kMessage;
    transfer.message = message_of(op, forward);
    transfer.sends = (op.kind == OpKind::kStageSend) == forward;
    transfer.gradient = !forward;
    transfer.bytes = graph().storages[static_cast<size_t>(storage)].bytes.eval(graph().tokens, {});
    if (transfer.message < 0) {  // the other stage is here too
      SimInstruction made = instruction(SimStep::kCompute, action, -1);
      made.time = writer_.time({.points = {{0, 0}}});
      return writer_.instruction(made);
    }
  } else {
    transfer = exchange_of(op, !forward, cell_of_op(action.id));
    if (of_->cost->exchange_post_ns > 0) {
      SimInstruction post = instruction(SimStep::kCompute, action, -1);
      post.time = writer_.time({.points = {{0, of_->cost->exchange_post_ns}}});
      writer_.instruction(post);
    }
  }
  issue(action, transfer, transfer.cell);
  slot_->under_way.push_back({action.id, !forward, writer_.transfers() - 1});
}

int32_t ProgramRecorder::Impl::message_of(const OpSpec& op, bool forward) const {
  const bool receives = (op.kind == OpKind::kStageRecv) == forward;
  const int to = receives ? of_->stage : of_->stage + (forward ? 1 : -1);
  const auto found = messages_.find({to, !forward, slot_->microbatch});
  return found == messages_.end() ? -1 : found->second;
}

// Rows are what one side of an exchange has of them; without any, all that is received.
SimTransfer ProgramRecorder::Impl::exchange_of(const OpSpec& op, bool backward,
                                               int32_t cell) const {
  (void)backward;  // as long as the forward: what was received is returned
  SimTransfer transfer;
  transfer.kind = SimTransferKind::kExchange;
  int64_t fixed = 0;
  for (const auto* list : {&op.reads, &op.creates}) {
    for (int s : *list) {
      const ByteFormula& bytes = graph().storages[static_cast<size_t>(s)].bytes;
      transfer.bytes_per_row = std::max(transfer.bytes_per_row, bytes.per_row);
      fixed = std::max(fixed, bytes.eval(graph().tokens, {}));
    }
  }
  transfer.bytes_per_row /= options_.rows_per_received;
  if (transfer.bytes_per_row > 0) {
    transfer.cell = cell;
  } else {
    transfer.bytes = fixed;
  }
  return transfer;
}

void ProgramRecorder::Impl::end_communication(const Action& action) {
  auto& list = slot_->under_way;
  const bool backward = !is_forward(action.kind);
  const auto found = std::find_if(list.begin(), list.end(), [&](const auto& one) {
    return one.op == action.id && one.backward == backward;
  });
  if (found == list.end()) return;  // between two stages of this rank
  SimInstruction made = instruction(SimStep::kAwait, action, -1);
  made.transfer = found->transfer;
  list.erase(found);
  writer_.instruction(made);
}

void ProgramRecorder::Impl::exchange_counts(const Action& action) {
  if (!options_.exchange_counts) return;
  SimTransfer transfer;
  transfer.kind = SimTransferKind::kExchange;
  issue(action, transfer, -1);
  SimInstruction made = instruction(SimStep::kAwait, action, -1);
  made.transfer = writer_.transfers() - 1;
  writer_.instruction(made);
}

void ProgramRecorder::Impl::copy_out(const Action& action) {
  const ByteFormula& bytes = graph().storages[static_cast<size_t>(action.id)].bytes;
  SimTransfer transfer;
  transfer.kind =
      action.kind == ActionKind::kOffload ? SimTransferKind::kToHost : SimTransferKind::kToDevice;
  transfer.cell = bytes.per_row > 0 ? cell_of_storage(action.id) : -1;
  transfer.bytes = bytes.eval(graph().tokens, {});
  transfer.bytes_per_row = bytes.per_row;
  issue(action, transfer, transfer.cell);
  slot_->copies[static_cast<size_t>(action.id)] = writer_.transfers() - 1;
}

void ProgramRecorder::Impl::copy_in(const Action& action) {
  copy_out(action);
  add_storage(writer_.at_start(), action.id, 1);
}

void ProgramRecorder::Impl::await_copy(const Action& action) {
  SimInstruction made = instruction(SimStep::kAwait, action, -1);
  made.transfer = slot_->copies[static_cast<size_t>(action.id)];
  BGL_CHECK(made.transfer >= 0, action_text(graph(), action));
  writer_.instruction(made);
}

void ProgramRecorder::Impl::recode(const Action& action) {
  const StorageSpec& spec = graph().storages[static_cast<size_t>(action.id)];
  const int32_t cell = spec.bytes.per_row > 0 ? cell_of_storage(action.id) : -1;
  SimInstruction made = instruction(SimStep::kCompute, action, cell);
  OpTime time;
  // Linear in the rows: two points are exact.
  for (const int64_t rows : {int64_t{0}, int64_t{1} << 20}) {
    time.points.emplace_back(rows, transfer_ns(spec.bytes.eval(graph().tokens, {.rows = rows}),
                                               of_->cost->encode_bytes_per_s));
    if (cell < 0) break;
  }
  made.time = writer_.time(std::move(time));
  writer_.instruction(made);
  const bool encode = action.kind == ActionKind::kEncode;
  const int64_t encoded = encoded_bytes(action.id);
  if (encode) {
    writer_.at_start().add(encoded);
    add_storage(writer_.at_end(), action.id, -1);
  } else {
    add_storage(writer_.at_start(), action.id, 1);
    writer_.at_end().add(-encoded);
  }
}

// ---- the host ----

ProgramRecorder::ProgramRecorder(std::vector<RankStage> stages, int microbatches,
                                 const SendPlan& sends, const RecorderOptions& options)
    : impl_(std::make_unique<Impl>(std::move(stages), microbatches, sends, options)) {}
ProgramRecorder::~ProgramRecorder() = default;

int32_t ProgramRecorder::cells() const { return impl_->gates() * impl_->microbatches(); }
int32_t ProgramRecorder::cell(int stage, int microbatch, int layer) const {
  return impl_->cell(stage, microbatch, layer);
}
void ProgramRecorder::begin(const RankDriver& driver, CountsOf counts_of, Agree agree) {
  impl_->begin(driver, std::move(counts_of), std::move(agree));
}
StepProgram ProgramRecorder::take() { return impl_->take(); }

void ProgramRecorder::decide(int slot, int64_t ns) { impl_->decide(slot, ns); }

void ProgramRecorder::open(int slot, int stage, int microbatch) {
  impl_->open(slot, stage, microbatch);
}
void ProgramRecorder::run(const RankTimeline& actions) {
  for (const StageAction& action : actions) impl_->run(action);
}
GateCounts ProgramRecorder::counts(int slot, int layer) { return impl_->counts(slot, layer); }
bool ProgramRecorder::agree(bool mine) { return impl_->agree(mine); }
void ProgramRecorder::close(int) {}

}  // namespace bagualu
