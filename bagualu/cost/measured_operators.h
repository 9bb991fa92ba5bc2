#pragma once

#include <string>
#include <vector>

#include "bagualu/base/json.h"

namespace bagualu {

/// One measured time of an operator: its FLOPs (bytes for memory operators), all of it in ns.
struct MeasuredOperator {
  double work = 0;
  double ns = 0;
  bool operator==(const MeasuredOperator&) const = default;
};

/// Measured times of one machine by operator class, rising work; an empty class is priced by its
/// efficiency. Lists as [[work, ns], ...] under these names in a system file.
struct MeasuredOperators {
  std::vector<MeasuredOperator> gemm;
  std::vector<MeasuredOperator> grouped_gemm;
  std::vector<MeasuredOperator> attention_forward;
  std::vector<MeasuredOperator> attention_backward;
  std::vector<MeasuredOperator> memory;
  bool operator==(const MeasuredOperators&) const = default;
};

/// Time of `work`: ns per unit of work is interpolated over the logarithm of work, and beyond the
/// table stays what it is at its end.
/// Requires: a table that is not empty, work > 0.
double measured_ns(const std::vector<MeasuredOperator>& table, double work);

/// Throws: InvalidInput for unknown classes, lists that do not rise, numbers that are not > 0.
MeasuredOperators measured_operators_from_json(const Json& object, const std::string& where);
/// Without the empty classes.
Json to_json(const MeasuredOperators& operators);

}  // namespace bagualu
