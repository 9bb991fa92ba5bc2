#pragma once

#include <cstdint>

#include "bagualu/sim/step_program.h"

namespace bagualu {

/// Live bytes of a program run alone with these rows by cell (stride apart): the highest, static
/// bytes included, and what is left at its end beyond them. piece_rows nullptr: rows.
struct ProgramBytes {
  int64_t peak_bytes = 0;
  int64_t end_bytes = 0;
};
ProgramBytes program_bytes(const StepProgram& program, const int32_t* rows,
                           const int32_t* piece_rows = nullptr, int64_t stride = 1);

}  // namespace bagualu
