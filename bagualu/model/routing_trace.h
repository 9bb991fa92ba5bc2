// Recorded routing: how many rows each rank's experts received, by step, micro-batch and layer.
// routing_log.h reads it from logs, routing_stats.h describes it, routing_loads.h turns it into the
// loads that a planner asks for.
//
// Glossary
//   record   tokens that one rank received in one layer of one micro-batch
//   cell     the records of one layer in one micro-batch of one step
//   expert trace  counts per expert instead of per rank; fold_experts() makes a rank trace of it
// Invariants
//   Records are sorted by (step, micro-batch, layer, rank), each key once.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bagualu {

struct RoutedRecord {
  int32_t step = 0;
  int32_t microbatch = -1;  ///< -1: the log does not say
  int32_t layer = 0;        ///< as the log numbers it, see RoutingTrace::first_layer
  int32_t rank = 0;         ///< in an expert trace: the expert
  int64_t tokens = 0;       ///< rows received: a token routed to two experts counts twice

  bool operator==(const RoutedRecord&) const = default;
};

/// Why a line, or a record of it, is not in the trace.
enum class LeftOutReason : uint8_t {
  kTorn,          ///< fields are missing, cut or glued to another line
  kTooLong,       ///< a line over LineSource::kMaxLineBytes
  kOutOfRange,    ///< a number that no job can have
  kUnknownPlace,  ///< step, layer or rank is "unknown"
  kRepeated,      ///< the same record again (a copied line, or a forward pass run twice)
  kReplaced,      ///< a later line gives another count: a restarted job did its steps again
  kOtherForm,     ///< the same rows in a second form, or counts per expert beside counts per rank
};
inline constexpr int kLeftOutReasons = 7;
/// "torn", "too-long", "out-of-range", "unknown-place", "repeated", "replaced", "other-form".
std::string_view left_out_name(LeftOutReason reason);

struct LeftOut {
  LeftOutReason reason = LeftOutReason::kTorn;
  int64_t count = 0;
  std::vector<std::string> places;  ///< the first five, "FILE:LINE"

  bool operator==(const LeftOut&) const = default;
};

struct RoutingTrace {
  std::vector<RoutedRecord> records;
  bool per_expert = false;
  /// Number of the model's first layer: 1 where Megatron's lines were read (its layer_number counts
  /// from 1), else 0.
  int64_t first_layer = 0;
  /// Layers without experts are not counted: number 0 is the first layer with experts (counts per
  /// expert, as `bagualu train --routing-trace` takes them).
  bool moe_layers_only = false;
  /// Micro-batches were numbered in the order of their lines, since the log does not number them.
  bool numbered_by_order = false;

  int64_t lines = 0;               ///< read, of all files
  int64_t used_lines = 0;          ///< that gave records
  std::vector<LeftOut> left_out;   ///< in the order of LeftOutReason, none with count 0
  std::vector<std::string> notes;  ///< what a reader of the numbers should know, one line each

  int64_t left_out_count(LeftOutReason reason) const;
};

/// Experts of an expert trace: 1 + the largest number seen. 0 in a rank trace.
int64_t expert_count(const RoutingTrace& trace);

/// Rank trace of an expert trace: expert e lies on rank e / (experts / ep).
/// Requires: an expert trace.
/// Throws:   InvalidInput(where, field) unless ep divides the number of experts.
RoutingTrace fold_experts(const RoutingTrace& trace, int64_t ep, const std::string& where,
                          const std::string& field);

/// The trace as JSON lines (docs/formats.md, Routing trace): one object per cell.
std::string to_json_lines(const RoutingTrace& trace);

}  // namespace bagualu
