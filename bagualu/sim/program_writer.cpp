#include "bagualu/sim/program_writer.h"

#include "bagualu/base/error.h"

namespace bagualu {

void ByteSum::add(const ByteFormula& formula, int32_t cell, int sign, int64_t tokens) {
  if (formula.per_row == 0 && formula.per_piece_row == 0) {
    fixed_ += sign * formula.eval(tokens, {});
    return;
  }
  BGL_CHECK(cell >= 0, "bytes that follow a load have no cell");
  const auto whole = [](int64_t bytes) { return bytes % kAllocationGranularity == 0; };
  if (!whole(formula.per_row) || !whole(formula.per_piece_row)) {
    rounded_.push_back({formula, cell, sign});
    return;
  }
  fixed_ += sign * formula.eval(tokens, {});
  for (Rows& one : rows_) {
    if (one.cell != cell) continue;
    one.per_row += sign * formula.per_row;
    one.per_piece_row += sign * formula.per_piece_row;
    return;
  }
  rows_.push_back({cell, sign * formula.per_row, sign * formula.per_piece_row});
}

void ByteSum::move_to(std::vector<SimBytes>& bytes) {
  for (const Rows& one : rows_) {
    if (one.per_row == 0 && one.per_piece_row == 0) continue;
    // One sign per entry: an entry is then never below 0.
    for (const int sign : {1, -1}) {
      const auto part = [sign](int64_t value) { return value * sign > 0 ? value * sign : 0; };
      SimBytes entry{
          {.per_row = part(one.per_row), .per_piece_row = part(one.per_piece_row)}, one.cell, sign};
      if (entry.formula.per_row == 0 && entry.formula.per_piece_row == 0) continue;
      if (fixed_ * sign > 0) {
        entry.formula.fixed = fixed_ * sign;
        fixed_ = 0;
      }
      bytes.push_back(entry);
    }
  }
  bytes.insert(bytes.end(), rounded_.begin(), rounded_.end());
  if (fixed_ != 0) {
    const int sign = fixed_ > 0 ? 1 : -1;
    bytes.push_back({{.fixed = fixed_ * sign}, -1, sign});
  }
  fixed_ = 0;
  rows_.clear();
  rounded_.clear();
}

int32_t ProgramWriter::time(OpTime time) {
  const auto [found, added] =
      time_of_.try_emplace(time.points, static_cast<int32_t>(times_.size()));
  if (added) times_.push_back(std::move(time));
  return found->second;
}

void ProgramWriter::begin(int64_t tokens, int32_t cells, int64_t static_bytes) {
  program_ = {};
  program_.tokens = tokens;
  program_.cells = cells;
  program_.static_bytes = static_bytes;
  start_ = end_ = {};
}

StepProgram ProgramWriter::take() {
  close();
  program_.times = times_;
  program_.instructions.shrink_to_fit();
  program_.bytes.shrink_to_fit();
  return std::exchange(program_, {});
}

int32_t ProgramWriter::name(std::string text) {
  program_.names.push_back(std::move(text));
  return static_cast<int32_t>(program_.names.size()) - 1;
}

int32_t ProgramWriter::transfer(SimTransfer transfer) {
  program_.transfers.push_back(transfer);
  return static_cast<int32_t>(program_.transfers.size()) - 1;
}

void ProgramWriter::instruction(SimInstruction instruction) {
  close();
  instruction.bytes_begin = static_cast<int32_t>(program_.bytes.size());
  program_.instructions.push_back(instruction);
}

void ProgramWriter::close() {
  if (program_.instructions.empty()) return;
  SimInstruction& last = program_.instructions.back();
  start_.move_to(program_.bytes);
  last.peak_bytes_end = static_cast<int32_t>(program_.bytes.size());
  end_.move_to(program_.bytes);
  last.bytes_end = static_cast<int32_t>(program_.bytes.size());
}

}  // namespace bagualu
