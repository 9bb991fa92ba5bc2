#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cli/command_line.h"
#include "bagualu/model/routing_stats.h"
#include "bagualu/model/routing_trace.h"

namespace bagualu {

/// What was asked of `bagualu trace`, beside the files.
struct TraceRequest {
  std::vector<std::string> logs;
  int64_t layers = 0;  ///< of the model; 0: not said
  int64_t ep = 0;      ///< ranks that share one copy of the experts; 0: not said
  int64_t balanced_rows = 0;
};

/// `bagualu trace`: routing logs to one format, with statistics of the imbalance.
/// Returns: exit code.
/// Throws:  InvalidInput; then nothing was printed and no file written.
int run_trace(const std::vector<std::string>& arguments, const Streams& streams);

Json to_json(const TraceRequest& request, const RoutingTrace& trace, const RoutingStats& stats);
void print_table(const TraceRequest& request, const RoutingTrace& trace, const RoutingStats& stats,
                 std::ostream& out);

/// "0-3, 7, 9-11 and 5 more": neighbours joined, at most `most` parts.
std::string number_ranges(const std::vector<int32_t>& numbers, size_t most = 8);
/// Layers 0 to layers - 1 of the model without a record, as the log numbers them.
std::vector<int32_t> absent_layers(const RoutingTrace& trace, const RoutingStats& stats,
                                   int64_t layers);

}  // namespace bagualu
