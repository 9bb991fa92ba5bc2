#include "bagualu/sim/program_bytes.h"

#include <algorithm>

namespace bagualu {

ProgramBytes program_bytes(const StepProgram& program, const int32_t* rows,
                           const int32_t* piece_rows, int64_t stride) {
  if (piece_rows == nullptr) piece_rows = rows;
  int64_t live = program.static_bytes, peak = live;
  const auto add = [&](int32_t begin, int32_t end) {
    for (int32_t b = begin; b < end; ++b) {
      const SimBytes& one = program.bytes[static_cast<size_t>(b)];
      LayerLoad load;
      if (one.cell >= 0) load = {rows[one.cell * stride], piece_rows[one.cell * stride]};
      live += one.sign * one.formula.eval(program.tokens, load);
    }
    peak = std::max(peak, live);
  };
  for (const SimInstruction& one : program.instructions) {
    add(one.bytes_begin, one.peak_bytes_end);
    add(one.peak_bytes_end, one.bytes_end);
  }
  return {peak, live - program.static_bytes};
}

}  // namespace bagualu
