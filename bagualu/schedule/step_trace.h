// What a rank really did in a step: actions of its compute thread in the order in which it ran
// them, and what ran beside it (collectives, sends, copies) with times of its own. The runtime
// writes it, step_replay.h predicts it, pages and Perfetto draw it. File: docs/formats.md, Step
// trace.
//
// Glossary
//   event     what the compute thread does from start_ns to end_ns, waiting included
//   transfer  a collective, a send with its receive, or a copy, between its issue and its end
// Invariants
//   Events of a rank do not overlap and stand in the order of time. Every transfer is issued by one
//   event of its rank. Times are ns of one clock, the same for all ranks of a machine.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/base/event_log.h"

namespace bagualu {

enum class StepAction : uint8_t {
  kForward,
  kForwardEnd,  ///< a communication's forward is awaited
  kBackward,
  kBackwardEnd,
  kInputGrad,
  kWeightGrad,
  kRecompute,
  kOffload,  ///< copy to the host issued
  kDrain,    ///< copy to the host awaited
  kReload,   ///< copy to the device issued
  kAwait,    ///< copy to the device awaited
  kEncode,
  kDecode,
  kPost,     ///< receive from another stage posted
  kReceive,  ///< that receive awaited
  kSend,     ///< send to another stage issued
  kSent,     ///< that send awaited
  kDecide,   ///< plans and schedules made
  kOther,    ///< anything else, by its name: gradients reduced, optimizer
};
/// "forward", "forward_end", ...
std::string_view step_action_name(StepAction action);

struct StepEvent {
  StepAction action = StepAction::kOther;
  int slot = -1;   ///< of the rank driver; -1: belongs to no micro-batch
  int stage = -1;  ///< virtual stage
  int microbatch = -1;
  int op = -1;       ///< of the stage's graph; -1: none
  std::string name;  ///< of the operator, storage or phase: "layer3.expert_fc1"
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  /// Transfers by their number in RankStep::transfers. Issued at the end of the event; one that the
  /// same event also awaits, at its start.
  std::vector<int> issues;
  std::vector<int> awaits;
  bool operator==(const StepEvent&) const = default;
};

enum class TransferStream : uint8_t { kComm, kToHost, kToDevice };
/// "comm", "d2h", "h2d".
std::string_view transfer_stream_name(TransferStream stream);

struct StepTransfer {
  TransferStream stream = TransferStream::kComm;
  std::string name;  ///< as StepEvent::name
  /// Transfers of one channel run one after the other, in the order of their issue: a communicator,
  /// a copy engine. "": runs at once.
  std::string channel;
  /// Joins the parts that ranks have in one transfer: the same on every member of a collective, on
  /// sender and receiver; unique within the step, as "ep1:17", "p2p0:2F0". "": of this rank alone.
  std::string key;
  int64_t bytes = 0;     ///< that this rank gives, or takes if it only receives
  int64_t start_ns = 0;  ///< issued on this rank
  int64_t end_ns = 0;
  bool operator==(const StepTransfer&) const = default;
};

struct RankStep {
  int rank = 0;
  int64_t step = 0;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  std::vector<StepEvent> events;
  std::vector<StepTransfer> transfers;
  bool operator==(const RankStep&) const = default;
};

/// Appends steps of one rank to a file, each when it is over.
class StepTraceWriter {
 public:
  /// Throws: InvalidInput if the file cannot be opened for writing.
  explicit StepTraceWriter(const std::filesystem::path& path);
  /// Throws: InvalidInput if the bytes cannot be written; InternalError if the invariants fail.
  void write(const RankStep& step);

 private:
  EventLog log_;
};

/// Steps of all files, by step and then rank. A torn last line and what follows a step's last
/// complete line are skipped, as are lines of other types.
/// Throws:  InvalidInput naming file, line and key for what is not a trace, and for a rank's step
///          that is in two files.
std::vector<RankStep> read_step_trace(const std::vector<std::filesystem::path>& files);

/// What is wrong with a rank's step, in one line; nothing if the invariants hold.
std::string step_fault(const RankStep& step);

/// How much of a rank's transfers ran beside its compute, and how much of its time it waited.
struct StepOverlap {
  int64_t compute_ns = 0;  ///< events that await nothing
  int64_t comm_ns = 0;     ///< while at least one communication is under way
  int64_t comm_beside_ns = 0;
  int64_t copy_ns = 0;  ///< while at least one copy is under way
  int64_t copy_beside_ns = 0;
  int64_t comm_wait_ns = 0;  ///< inside events that await communication
  int64_t copy_wait_ns = 0;
};
StepOverlap step_overlap(const RankStep& step);

/// Where the time of a rank's step went. Units: ns
struct StepTimes {
  StepOverlap overlap;      ///< its comm_wait_ns without p2p_wait_ns
  int64_t p2p_wait_ns = 0;  ///< for another stage's messages
  int64_t bubble_ns = 0;    ///< neither computing nor waiting for a transfer
};
StepTimes step_times(const RankStep& step);

}  // namespace bagualu
