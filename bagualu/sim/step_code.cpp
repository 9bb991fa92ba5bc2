#include "bagualu/sim/step_code.h"

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

// Durations are rounded as doubles below 2^51 ns (26 days); with rows below 2^31 these slopes are.
constexpr double kSteepest = 1e6;

bool is_multiple(int64_t bytes) { return bytes % kAllocationGranularity == 0; }

bool depends_on_rows(const SimBytes& bytes) {
  return bytes.cell >= 0 && (bytes.formula.per_row != 0 || bytes.formula.per_piece_row != 0);
}

}  // namespace

void StepCode::clear(const StepProgram& program) {
  time_ops.clear();
  row_times.clear();
  pieces.clear();
  memory_ops.clear();
  rounded.clear();
  exchanges = copy_slots = messages = 0;
  operators = 0;
  uses_pieces = false;
  seen_.assign(program.transfers.size(), Seen{});
  free_slots_.clear();
  fixed_ns_.assign(program.times.size(), -1);
  pieces_of_.assign(program.times.size(), RowTime{});
  before_ns_ = common_ = high_ = 0;
}

void StepCode::compile(const StepProgram& program) {
  clear(program);
  const auto& instructions = program.instructions;
  for (size_t i = 0; i < instructions.size(); ++i) {
    if (instructions[i].step != SimStep::kAwait) continue;
    const int32_t id = instructions[i].transfer;
    BGL_CHECK(id >= 0 && id < static_cast<int32_t>(seen_.size()), i, id);
    seen_[static_cast<size_t>(id)].last_await = static_cast<int32_t>(i);
  }
  for (size_t i = 0; i < instructions.size(); ++i) {
    const SimInstruction& instruction = instructions[i];
    BGL_CHECK(instruction.bytes_begin >= 0 &&
                  instruction.bytes_begin <= instruction.peak_bytes_end &&
                  instruction.peak_bytes_end <= instruction.bytes_end &&
                  instruction.bytes_end <= static_cast<int32_t>(program.bytes.size()),
              i, "bytes outside the program");
    add_bytes(program, instruction.bytes_begin, instruction.peak_bytes_end);
    if (instruction.step == SimStep::kCompute) {
      add_time(program, instruction);
    } else {
      const int32_t id = instruction.transfer;
      BGL_CHECK(id >= 0 && id < static_cast<int32_t>(seen_.size()), i, id);
      const SimTransfer& transfer = program.transfers[static_cast<size_t>(id)];
      BGL_CHECK(transfer.cell < program.cells, i, transfer.cell);
      if (instruction.step == SimStep::kIssue) {
        add_issue(transfer, id);
      } else {
        add_await(transfer, id, static_cast<int32_t>(i));
      }
    }
    add_bytes(program, instruction.peak_bytes_end, instruction.bytes_end);
  }
  push({.kind = TimeOp::Kind::kEnd});
  last_high_bytes = high_;
}

void StepCode::push(TimeOp op) {
  op.before_ns = before_ns_;
  before_ns_ = 0;
  time_ops.push_back(op);
}

void StepCode::add_time(const StepProgram& program, const SimInstruction& instruction) {
  ++operators;
  const auto id = static_cast<size_t>(instruction.time);
  BGL_CHECK(id < program.times.size(), instruction.time);
  BGL_CHECK(instruction.cell < program.cells, instruction.cell);
  const OpTime& time = program.times[id];
  if (instruction.cell >= 0 && time.points.size() > 1) {
    add_row_time(time, id, instruction.cell);
    return;
  }
  int64_t& ns = fixed_ns_[id];
  if (ns < 0) ns = time.eval(program.tokens);
  before_ns_ += ns;
}

void StepCode::add_row_time(const OpTime& time, size_t id, int32_t cell) {
  // Fixed times before it may go first: nothing is issued in between.
  if (time_ops.empty() || time_ops.back().kind != TimeOp::Kind::kRows ||
      time_ops.back().cell != cell) {
    push({.kind = TimeOp::Kind::kRows,
          .cell = cell,
          .begin = static_cast<int32_t>(row_times.size())});
  } else {
    time_ops.back().before_ns += before_ns_;
    before_ns_ = 0;
  }
  RowTime& known = pieces_of_[id];
  if (known.begin == known.end) known = add_pieces(time);
  row_times.push_back(known);
  time_ops.back().end = static_cast<int32_t>(row_times.size());
}

// As OpTime::eval(), to the last bit.
RowTime StepCode::add_pieces(const OpTime& time) {
  const auto begin = static_cast<int32_t>(pieces.size());
  const auto& points = time.points;
  for (size_t k = 0; k + 1 < points.size(); ++k) {
    const auto& [x0, y0] = points[k];
    const auto& [x1, y1] = points[k + 1];
    const double slope = static_cast<double>(y1 - y0) / static_cast<double>(x1 - x0);
    BGL_CHECK(slope < kSteepest, slope);
    const auto x = static_cast<double>(x0);
    pieces.push_back({x, x, static_cast<double>(y0), slope});
  }
  return {begin, static_cast<int32_t>(pieces.size())};
}

void StepCode::add_issue(const SimTransfer& transfer, int32_t id) {
  ++operators;
  Seen& seen = seen_[static_cast<size_t>(id)];
  BGL_CHECK(!seen.issued, id, "a transfer is issued twice");
  seen.issued = true;
  TimeOp op{.cell = transfer.cell, .transfer = id};
  switch (transfer.kind) {
    case SimTransferKind::kExchange:
      op.kind = TimeOp::Kind::kIssueExchange;
      op.slot = exchanges++;
      break;
    case SimTransferKind::kMessage:
      BGL_CHECK(transfer.message >= 0 && transfer.bytes_per_row == 0, id, transfer.message);
      op.kind = transfer.sends ? TimeOp::Kind::kIssueSend : TimeOp::Kind::kIssueReceive;
      op.slot = transfer.message;
      messages = std::max(messages, transfer.message + 1);
      break;
    case SimTransferKind::kToHost:
    case SimTransferKind::kToDevice:
      op.kind = TimeOp::Kind::kIssueCopy;
      if (seen.last_await < 0) break;
      if (free_slots_.empty()) free_slots_.push_back(copy_slots++);
      op.slot = free_slots_.back();
      free_slots_.pop_back();
      break;
  }
  seen.slot = op.slot;
  push(op);
}

void StepCode::add_await(const SimTransfer& transfer, int32_t id, int32_t at) {
  const Seen& seen = seen_[static_cast<size_t>(id)];
  BGL_CHECK(seen.issued, id, "a transfer is awaited before it is issued");
  TimeOp op{.transfer = id, .slot = seen.slot};
  switch (transfer.kind) {
    case SimTransferKind::kExchange:
      op.kind = TimeOp::Kind::kAwaitExchange;
      break;
    case SimTransferKind::kMessage:
      op.kind = TimeOp::Kind::kAwaitMessage;
      break;
    case SimTransferKind::kToHost:
    case SimTransferKind::kToDevice:
      op.kind = TimeOp::Kind::kAwaitCopy;
      if (seen.last_await == at) free_slots_.push_back(seen.slot);
      break;
  }
  push(op);
}

// A linear formula is a multiple of the granularity for all rows, so it needs no rounding.
void StepCode::add_linear(const SimBytes& bytes) {
  const int64_t sign = bytes.sign;
  const auto& formula = bytes.formula;
  if (changes_.empty() || changes_.back().cell != bytes.cell) {
    const auto at = static_cast<int32_t>(rounded.size());
    changes_.push_back({.cell = bytes.cell, .begin = at, .end = at});
  }
  changes_.back().per_row += sign * formula.per_row;
  changes_.back().per_piece_row += sign * formula.per_piece_row;
}

void StepCode::add_bytes(const StepProgram& program, int32_t begin, int32_t end) {
  if (begin == end) return;
  changes_.clear();
  int64_t fixed_change = 0;
  for (int32_t i = begin; i < end; ++i) {
    const SimBytes& bytes = program.bytes[static_cast<size_t>(i)];
    BGL_CHECK(bytes.cell < program.cells, i, bytes.cell);
    if (!depends_on_rows(bytes)) {
      fixed_change += bytes.sign * bytes.formula.eval(program.tokens, {});
      continue;
    }
    const auto& formula = bytes.formula;
    if (formula.per_piece_row != 0) uses_pieces = true;
    const int64_t fixed = formula.fixed + formula.per_token * program.tokens;
    if (is_multiple(fixed) && is_multiple(formula.per_row) && is_multiple(formula.per_piece_row)) {
      fixed_change += bytes.sign * fixed;
      add_linear(bytes);
      continue;
    }
    add_linear({.formula = {}, .cell = bytes.cell});  // finds or makes the cell's change
    rounded.push_back({fixed, formula.per_row, formula.per_piece_row, bytes.sign});
    changes_.back().end = static_cast<int32_t>(rounded.size());
  }
  for (const Change& change : changes_) {
    memory_ops.push_back(
        {high_, change.per_row, change.per_piece_row, change.cell, change.begin, change.end});
    high_ = MemoryOp::kNone;
  }
  common_ += fixed_change;
  high_ = std::max(high_, common_);
}

void prepare(StepProgram* program) {
  auto code = std::make_shared<StepCode>();
  code->compile(*program);
  program->code = std::move(code);
}

}  // namespace bagualu
