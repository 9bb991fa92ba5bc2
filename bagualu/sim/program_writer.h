#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/sim/step_program.h"

namespace bagualu {

/// Sum of byte formulas, with as few entries of a program as exactness allows: what does not
/// depend on a load is one number, and formulas that round nothing add up by cell.
class ByteSum {
 public:
  void add(const ByteFormula& formula, int32_t cell, int sign, int64_t tokens);
  void add(int64_t bytes) { fixed_ += bytes; }
  /// Appends to a program and is empty then.
  void move_to(std::vector<SimBytes>& bytes);

 private:
  struct Rows {
    int32_t cell = -1;
    int64_t per_row = 0;
    int64_t per_piece_row = 0;
  };
  int64_t fixed_ = 0;
  std::vector<Rows> rows_;
  std::vector<SimBytes> rounded_;
};

/// Writes one StepProgram, instruction by instruction. Times are kept from program to program.
class ProgramWriter {
 public:
  /// Returns: index of an equal OpTime in every program from now on.
  int32_t time(OpTime time);

  void begin(int64_t tokens, int32_t cells, int64_t static_bytes);
  StepProgram take();

  int32_t name(std::string text);
  int32_t transfer(SimTransfer transfer);
  /// Appends; the bytes added by at_start() from here on are taken when it starts, those added by
  /// at_end() change when it ends.
  void instruction(SimInstruction instruction);
  ByteSum& at_start() { return start_; }
  ByteSum& at_end() { return end_; }
  /// Transfers so far.
  int32_t transfers() const { return static_cast<int32_t>(program_.transfers.size()); }

 private:
  void close();

  std::map<std::vector<std::pair<int64_t, int64_t>>, int32_t> time_of_;
  std::vector<OpTime> times_;
  StepProgram program_;
  ByteSum start_, end_;
};

}  // namespace bagualu
