// The engine: runs the step programs of one replica's ranks against each other. Integer
// nanoseconds; the same input gives the same output, whatever the machine.
//
// Glossary
//   replica  ranks that depend on each other before the gradients are exchanged: of every pipeline
//            rank one expert group. Replicas are independent until then, exactly.
//   member   a rank of an expert group.
// Invariants
//   A stream of a rank runs one thing at a time, in the order of issue. An exchange takes as long
//   as its slowest member. Members that share a program run it side by side, instruction by
//   instruction; those with one of their own run it alone between exchanges, whose order is the
//   same on all members. Bytes depend on the order of a program alone, never on times.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bagualu/sim/step_program.h"

namespace bagualu {

/// Times of what ranks send to each other.
/// Units: bytes per second of one rank, one direction.
struct SimLinks {
  int64_t node_size = 8;
  int64_t first_member_in_node = 0;  ///< where in its node the group's first rank lies
  int64_t ranks_between = 1;         ///< members are that many ranks apart (tp * cp)
  double node_bytes_per_s = 0;
  double network_bytes_per_s = 0;
  int64_t latency_ns = 0;
  double message_bytes_per_s = 0;  ///< between pipeline ranks
  int64_t message_latency_ns = 0;
  double d2h_bytes_per_s = 0;
  double h2d_bytes_per_s = 0;
};

/// Duration of an exchange in which all members send equally many rows and member m receives
/// rows[m]: latency, and over members the largest of what it sends and receives inside its node and
/// between nodes, the two kinds of links at once. From i to m go rows[m] / members; what a member
/// keeps costs nothing, and so does an exchange of one member alone. Combine is the same backwards
/// and as long.
int64_t exchange_ns(const SimLinks& links, int64_t bytes_per_row, const int32_t* rows,
                    int64_t members);

/// One expert group of one pipeline rank.
struct SimGroup {
  std::vector<const StepProgram*> programs;  ///< by member; equal pointers run side by side
  /// rows[cell * members + member]; piece_rows the same, or nullptr: equal to rows.
  const int32_t* rows = nullptr;
  const int32_t* piece_rows = nullptr;
};

struct SimMemberResult {
  int64_t end_ns = 0;
  int64_t peak_bytes = 0;  ///< static bytes included
  int64_t busy_ns[kSimStreams] = {};
  int64_t comm_wait_ns = 0;  ///< of the compute stream, for exchanges and messages
  int64_t copy_wait_ns = 0;
};

struct SimReplicaResult {
  /// If it died: when the first rank whose program `dies` is through it. Bytes are those of whole
  /// programs.
  int64_t end_ns = 0;
  bool died = false;
  int64_t events = 0;  ///< operators and transfers, of all members
  int64_t members = 0;
  std::vector<SimMemberResult> by_member;  ///< [pp_rank * members + member]
};

/// One interval on one stream of one rank. Bytes are those of an instruction: for a transfer, of
/// the one that issued it. Static bytes included.
struct SimTraceEvent {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t live_bytes = 0;  ///< behind it
  int64_t peak_bytes = 0;  ///< inside it
  int32_t name = -1;
  int32_t microbatch = -1;
  int16_t stage = -1;
  SimStream stream{};
};

/// What is recorded of a run; nothing by default. Events come in the order of the program, names
/// are those of the member's program.
struct SimTrace {
  int pp_rank = 0;
  int member = 0;
  std::vector<SimTraceEvent> events{};
};

/// Buffers of a run, reused: one per thread.
/// Threads: one at a time per object; objects share nothing.
/// Ensures: a message starts when both ends have been issued and the one before it from that rank
///          to that one is over, activations and gradients apart; it takes latency + bytes / rate.
///          A copy starts when it is issued and the one before it in its direction is over. An
///          exchange starts when all members have issued it and the one before it is over.
/// Cost:    no allocation after the first run of a shape; see bench/engine_bench.cpp.
class SimEngine {
 public:
  explicit SimEngine(const SimLinks& links);
  ~SimEngine();
  /// Requires: groups by pipeline rank, the same members in each; instructions of a group's
  ///           programs issue equal exchanges and messages in the same order, and messages have
  ///           both ends. Between two ranks, both ends are issued in one order.
  /// Throws:   InternalError naming ranks and transfers if they wait for each other, unless a
  ///           program died.
  SimReplicaResult run(const std::vector<SimGroup>& groups,
                       std::vector<SimTrace>* traces = nullptr);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bagualu
