// What one rank does in one step, compiled for the engine: instructions in the order in which the
// rank driver emitted them, transfers beside them, bytes. Durations are formulas of the load, so
// that one program serves every rank and iteration that decides alike.
//
// Glossary
//   cell      a micro-batch in a layer that has experts; its load is the rows of a rank there.
//   transfer  an exchange within the expert group, a message to another pipeline rank, or a copy to
//             or from the host; issued by one instruction, awaited by a later one (or never).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/cost/op_cost.h"
#include "bagualu/graph/graph.h"

namespace bagualu {

/// The exchanges of the expert group are on kComm. Messages are on none of the four streams of a
/// rank but on links of their own, one per direction and neighbour: kSend and kReceive are where
/// traces show them.
enum class SimStream : uint8_t { kCompute, kComm, kToHost, kToDevice, kSend, kReceive };
inline constexpr int kSimStreams = 6;
/// "compute", "comm", "d2h", "h2d", "send", "receive".
std::string_view sim_stream_name(SimStream stream);

enum class SimTransferKind : uint8_t {
  kExchange,  ///< between all ranks of the expert group; starts when the last has issued it
  kMessage,   ///< between two pipeline ranks; starts when both ends have been issued
  kToHost,
  kToDevice,
};

struct SimTransfer {
  SimTransferKind kind{};
  int32_t name = -1;     ///< in StepProgram::names
  int32_t cell = -1;     ///< kExchange of rows: whose load; -1: `bytes` alone
  int32_t message = -1;  ///< kMessage: number in the step's SendPlan, the same on both ends
  bool sends = false;    ///< kMessage
  /// kMessage: activations and gradients between the same two ranks travel apart.
  bool gradient = false;
  int64_t bytes = 0;  ///< fixed part
  int64_t bytes_per_row = 0;
};

enum class SimStep : uint8_t { kCompute, kIssue, kAwait };

/// Bytes taken or returned by an instruction.
struct SimBytes {
  ByteFormula formula;
  int32_t cell = -1;  ///< whose load; -1: none
  int32_t sign = 1;
};

struct SimInstruction {
  SimStep step{};
  int16_t stage = -1;  ///< virtual stage
  int32_t microbatch = -1;
  int32_t name = -1;      ///< in StepProgram::names: "layer3.expert_fc1"
  int32_t cell = -1;      ///< whose load gives the time; -1: fixed
  int32_t time = -1;      ///< kCompute: in StepProgram::times
  int32_t transfer = -1;  ///< kIssue, kAwait: in StepProgram::transfers
  /// In StepProgram::bytes; those before `peak_bytes_end` are taken at the instruction's start (its
  /// workspace among them), the rest changed at its end.
  int32_t bytes_begin = 0;
  int32_t peak_bytes_end = 0;
  int32_t bytes_end = 0;
};

class StepCode;

struct StepProgram {
  int64_t tokens = 0;  ///< of a micro-batch: T of the byte formulas
  std::vector<SimInstruction> instructions;
  std::vector<SimTransfer> transfers;
  std::vector<OpTime> times;
  std::vector<SimBytes> bytes;
  std::vector<std::string> names;
  int32_t cells = 0;         ///< micro-batches * layers with experts that this pipeline rank holds
  int64_t static_bytes = 0;  ///< part of every peak
  bool dies = false;  ///< the rank runs out of memory at the program's end: exchanges and messages
                      ///< that its partners still wait for never come
  /// Optional, made by prepare(): what the engine executes. An engine compiles what has none, at
  /// about the cost of running it for one member; worth it for programs that many runs share.
  std::shared_ptr<const StepCode> code;
};

/// Makes `program->code`, anew if it has some. Call after the last change to the program.
/// Throws: InternalError for what is no program: indices outside, an await before its issue.
void prepare(StepProgram* program);

}  // namespace bagualu
