// What the engine executes: a step program with all that does not depend on loads worked out, times
// and bytes apart (bytes depend on the order of a program alone, never on times).
//
// Glossary
//   own     bytes of a member that depend on its rows; the others are common to all members and
//           known here.
//   rounded a byte formula whose rounding to the granularity depends on the rows; all others are
//           linear, and sums of them are too.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "bagualu/sim/step_program.h"

namespace bagualu {

/// A piece of a piecewise linear time: ns = y0 + slope * (x - x0), for x above `above`.
struct RowPiece {
  double above = 0;
  double x0 = 0;
  double y0 = 0;
  double slope = 0;
};

/// In StepCode::pieces.
struct RowTime {
  int32_t begin = 0;
  int32_t end = 0;
};

/// A byte formula of rows that is rounded up to the granularity: what is fixed of it in `fixed`.
struct RoundedBytes {
  int64_t fixed = 0;
  int64_t per_row = 0;
  int64_t per_piece_row = 0;
  int64_t sign = 1;
};

struct TimeOp {
  enum class Kind : uint8_t {
    kRows,  ///< operators whose times depend on the rows of one cell, one after the other
    kIssueExchange,
    kAwaitExchange,
    kIssueSend,
    kIssueReceive,
    kAwaitMessage,
    kIssueCopy,
    kAwaitCopy,
    kEnd,
  };
  Kind kind{};
  int64_t before_ns = 0;  ///< fixed compute times since the op before
  int32_t cell = -1;      ///< kRows; of a transfer
  int32_t begin = 0;      ///< kRows: in StepCode::row_times
  int32_t end = 0;
  int32_t transfer = -1;  ///< in StepProgram::transfers
  /// Exchanges: their number in the order of issue. Copies: where their end is kept until it is
  /// awaited, -1 if nobody does. Messages: their number.
  int32_t slot = -1;
};

/// peak = max(peak, own + high_bytes); own += what the rows of `cell` make of the rest.
struct MemoryOp {
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::min() / 4;
  int64_t high_bytes = kNone;  ///< largest common value since the op before
  int64_t per_row = 0;
  int64_t per_piece_row = 0;
  int32_t cell = -1;
  int32_t begin = 0;  ///< in StepCode::rounded
  int32_t end = 0;
};

class StepCode {
 public:
  /// Throws: as prepare(). Buffers are reused.
  void compile(const StepProgram& program);

  std::vector<TimeOp> time_ops;  ///< ends with kEnd
  std::vector<RowTime> row_times;
  std::vector<RowPiece> pieces;
  std::vector<MemoryOp> memory_ops;
  std::vector<RoundedBytes> rounded;
  int64_t last_high_bytes = 0;  ///< common, since the last memory op
  int32_t exchanges = 0;
  int32_t copy_slots = 0;
  int32_t messages = 0;   ///< largest number of a message, plus one
  int64_t operators = 0;  ///< and transfers
  bool uses_pieces = false;

 private:
  struct Seen {  // of a transfer
    int32_t slot = -1;
    int32_t last_await = -1;
    bool issued = false;
  };
  struct Change {  // of own bytes, in one cell
    int32_t cell = -1;
    int64_t per_row = 0;
    int64_t per_piece_row = 0;
    int32_t begin = 0;
    int32_t end = 0;
  };

  void clear(const StepProgram& program);
  void add_time(const StepProgram& program, const SimInstruction& instruction);
  void add_row_time(const OpTime& time, size_t id, int32_t cell);
  RowTime add_pieces(const OpTime& time);
  void add_issue(const SimTransfer& transfer, int32_t id);
  void add_await(const SimTransfer& transfer, int32_t id, int32_t at);
  void add_bytes(const StepProgram& program, int32_t begin, int32_t end);
  void add_linear(const SimBytes& bytes);
  void push(TimeOp op);

  // Of the compilation alone.
  std::vector<Seen> seen_;
  std::vector<int32_t> free_slots_;
  std::vector<int64_t> fixed_ns_;   // by time; -1: not yet evaluated
  std::vector<RowTime> pieces_of_;  // by time; empty: not yet known
  std::vector<Change> changes_;
  int64_t before_ns_ = 0;
  int64_t common_ = 0;
  int64_t high_ = 0;
};

}  // namespace bagualu
