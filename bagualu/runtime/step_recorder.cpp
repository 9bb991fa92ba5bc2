#include "bagualu/runtime/step_recorder.h"

#include <fmt/format.h>

#include <map>
#include <tuple>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/runtime/clock.h"

namespace bagualu {
namespace {

// Passage, kind of the issuing action, its id.
using IssueKey = std::tuple<int, ActionKind, int>;

bool takes_time(ActionKind kind) {
  return kind != ActionKind::kFree && kind != ActionKind::kDrop && kind != ActionKind::kGate;
}

bool is_stage_op(OpKind kind) { return kind == OpKind::kStageRecv || kind == OpKind::kStageSend; }

// A stage's receive is posted and its send issued by the forward or the backward, depending on the
// side.
StepAction between_stages(ActionKind kind, OpKind op) {
  const bool forward = kind == ActionKind::kForward || kind == ActionKind::kForwardEnd;
  const bool end = kind == ActionKind::kForwardEnd || kind == ActionKind::kBackwardEnd;
  const bool receives = forward == (op == OpKind::kStageRecv);
  if (receives) return end ? StepAction::kReceive : StepAction::kPost;
  return end ? StepAction::kSent : StepAction::kSend;
}

StepAction step_action(const Action& action, const Graph& graph) {
  if (names_op(action.kind) && is_stage_op(graph.ops[action.id].kind)) {
    return between_stages(action.kind, graph.ops[action.id].kind);
  }
  switch (action.kind) {
    case ActionKind::kForward:
      return StepAction::kForward;
    case ActionKind::kForwardEnd:
      return StepAction::kForwardEnd;
    case ActionKind::kBackward:
      return StepAction::kBackward;
    case ActionKind::kBackwardEnd:
      return StepAction::kBackwardEnd;
    case ActionKind::kInputGrad:
      return StepAction::kInputGrad;
    case ActionKind::kWeightGrad:
      return StepAction::kWeightGrad;
    case ActionKind::kRecompute:
      return StepAction::kRecompute;
    case ActionKind::kOffload:
      return StepAction::kOffload;
    case ActionKind::kDrain:
      return StepAction::kDrain;
    case ActionKind::kReload:
      return StepAction::kReload;
    case ActionKind::kAwait:
      return StepAction::kAwait;
    case ActionKind::kEncode:
      return StepAction::kEncode;
    case ActionKind::kDecode:
      return StepAction::kDecode;
    default:
      return StepAction::kOther;
  }
}

// The action that issued what `kind` awaits; `kind` itself if it awaits nothing.
ActionKind issuer(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForwardEnd:
      return ActionKind::kForward;
    case ActionKind::kBackwardEnd:
      return ActionKind::kBackward;
    case ActionKind::kDrain:
      return ActionKind::kOffload;
    case ActionKind::kAwait:
      return ActionKind::kReload;
    default:
      return kind;
  }
}

}  // namespace

// Makes the text of one step.
class StepRecorder::Writer {
 public:
  Writer(const StepRecorder& from, std::map<std::pair<Direction, uint64_t>, CopyRecord> copies)
      : from_(from), copies_(std::move(copies)) {}

  RankStep write() {
    step_.rank = from_.rank_;
    step_.step = from_.step_;
    step_.start_ns = from_.begin_ns_;
    for (const Comm& comm : from_.comms_) add_comm(comm);
    for (const Copy& copy : from_.copies_) add_copy(copy);
    size_t phase = 0;
    for (size_t i = 0; i <= from_.happened_.size(); ++i) {
      for (; phase < from_.phases_.size() && from_.phases_[phase].before == i; ++phase) {
        add_phase(from_.phases_[phase]);
      }
      if (i < from_.happened_.size()) add_event(from_.happened_[i]);
    }
    step_.end_ns = steady_now_ns();
    return std::move(step_);
  }

 private:
  const std::string& name_of(const Action& action, const Graph& graph) const {
    return names_op(action.kind) ? graph.ops[action.id].name : graph.storages[action.id].name;
  }

  // What a stage sends is named by its pipeline and the pass that made it, on both sides.
  std::string transfer_key(const Passage& passage, const Action& issue) const {
    const bool forward = issue.kind == ActionKind::kForward;
    const bool recv_op = passage.graph->ops[issue.id].kind == OpKind::kStageRecv;
    const int maker = passage.stage + (forward ? (recv_op ? -1 : 0) : (recv_op ? 0 : 1));
    return fmt::format("p2p{}:{}{}{}", from_.dp_rank_, maker, forward ? 'F' : 'B',
                       passage.microbatch);
  }

  void add_comm(const Comm& comm) {
    const Passage& passage = from_.passages_.at(comm.passage);
    const Action& issue = comm.action.action;
    StepTransfer transfer;
    transfer.stream = TransferStream::kComm;
    transfer.name = name_of(issue, *passage.graph);
    transfer.channel = comm.times.channel;
    transfer.key = comm.times.channel.empty()
                       ? transfer_key(passage, issue)
                       : fmt::format("{}:{}", comm.times.channel, comm.times.sequence);
    transfer.bytes = comm.times.size_bytes;
    transfer.start_ns = comm.times.issued_ns;
    transfer.end_ns = comm.times.done_ns;
    issued_[{comm.passage, issue.kind, issue.id}] = add(std::move(transfer));
  }

  void add_copy(const Copy& copy) {
    const auto found = copies_.find({copy.ticket.direction, copy.ticket.sequence});
    BGL_CHECK(found != copies_.end(), direction_name(copy.ticket.direction), copy.ticket.sequence,
              "has no record");
    const bool out = copy.ticket.direction == Direction::kD2H;
    StepTransfer transfer;
    transfer.stream = out ? TransferStream::kToHost : TransferStream::kToDevice;
    transfer.name = name_of(copy.action.action, *from_.passages_.at(copy.passage).graph);
    transfer.channel = out ? "d2h" : "h2d";
    transfer.bytes = copy.size_bytes;
    transfer.start_ns = found->second.begin_ns;
    transfer.end_ns = found->second.end_ns;
    issued_[{copy.passage, copy.action.action.kind, copy.action.action.id}] =
        add(std::move(transfer));
  }

  void add_event(const Happened& happened) {
    const Passage& passage = from_.passages_.at(happened.passage);
    const auto [kind, id] = happened.action.action;
    StepEvent event;
    event.action = step_action(happened.action.action, *passage.graph);
    event.slot = happened.action.slot;
    event.stage = passage.stage;
    event.microbatch = passage.microbatch;
    event.op = names_op(kind) ? id : -1;
    event.name = name_of(happened.action.action, *passage.graph);
    event.start_ns = happened.begin_ns;
    event.end_ns = happened.end_ns;
    const auto found = issued_.find({happened.passage, issuer(kind), id});
    if (found != issued_.end()) {
      const bool ends = issuer(kind) != kind;
      // A router's exchange of counts has no end of its own.
      const bool both =
          !ends && names_op(kind) && passage.graph->ops[id].stream == Stream::kCompute;
      if (!ends) event.issues.push_back(found->second);
      if (ends || both) event.awaits.push_back(found->second);
    }
    step_.events.push_back(std::move(event));
  }

  void add_phase(const Phase& phase) {
    step_.events.push_back(phase.event);
    if (phase.transfer.key.empty()) return;
    const int number = add(phase.transfer);
    step_.events.back().issues.push_back(number);
    step_.events.back().awaits.push_back(number);
  }

  int add(StepTransfer transfer) {
    step_.transfers.push_back(std::move(transfer));
    return static_cast<int>(step_.transfers.size()) - 1;
  }

  const StepRecorder& from_;
  const std::map<std::pair<Direction, uint64_t>, CopyRecord> copies_;
  std::map<IssueKey, int> issued_;
  RankStep step_;
};

StepRecorder::StepRecorder(Executor& executor, TransferEngine& transfers, int rank, int dp_rank)
    : executor_(executor), transfers_(transfers), rank_(rank), dp_rank_(dp_rank) {
  transfers_.set_recording(true);
  executor_.add_observer(this);
}

StepRecorder::~StepRecorder() {
  executor_.remove_observer(this);
  transfers_.set_recording(false);
}

void StepRecorder::begin(int64_t step) {
  transfers_.take_records();
  open_.clear();
  passages_.clear();
  happened_.clear();
  comms_.clear();
  copies_.clear();
  phases_.clear();
  step_ = step;
  begin_ns_ = steady_now_ns();
}

void StepRecorder::add_phase(StepAction action, const std::string& name, int64_t start_ns,
                             int64_t end_ns, const Communicator* comm) {
  Phase phase;
  phase.before = happened_.size();
  phase.event.action = action;
  phase.event.name = name;
  phase.event.start_ns = start_ns;
  phase.event.end_ns = end_ns;
  if (comm != nullptr && comm->size() > 1) {
    const CommTimes& times = comm->last_blocking();
    phase.transfer.stream = TransferStream::kComm;
    phase.transfer.name = name;
    phase.transfer.channel = times.channel;
    phase.transfer.key = fmt::format("{}:{}", times.channel, times.sequence);
    phase.transfer.bytes = times.size_bytes;
    phase.transfer.start_ns = times.issued_ns;
    phase.transfer.end_ns = times.done_ns;
  }
  phases_.push_back(std::move(phase));
}

RankStep StepRecorder::take() {
  std::map<std::pair<Direction, uint64_t>, CopyRecord> records;
  for (const CopyRecord& record : transfers_.take_records()) {
    records[{record.ticket.direction, record.ticket.sequence}] = record;
  }
  return Writer(*this, std::move(records)).write();
}

void StepRecorder::on_open(int slot, const ExecutorStage& stage, const MicrobatchInput& input) {
  if (open_.size() <= static_cast<size_t>(slot)) open_.resize(static_cast<size_t>(slot) + 1, -1);
  open_[slot] = static_cast<int>(passages_.size());
  passages_.push_back(
      {stage.graph, static_cast<int>(stage.stage), static_cast<int>(input.microbatch)});
}

void StepRecorder::on_action(const StageAction& action, int64_t begin_ns, int64_t end_ns) {
  if (!takes_time(action.action.kind)) return;
  happened_.push_back({action, open_.at(action.slot), begin_ns, end_ns});
}

void StepRecorder::on_comm(const StageAction& action, const CommTimes& times) {
  comms_.push_back({action, open_.at(action.slot), times});
}

void StepRecorder::on_copy(const StageAction& action, CopyTicket ticket, int64_t bytes) {
  copies_.push_back({action, open_.at(action.slot), ticket, bytes});
}

}  // namespace bagualu
