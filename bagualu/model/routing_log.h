#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <unordered_map>
#include <vector>

#include "bagualu/base/line_source.h"
#include "bagualu/model/routing_log_lines.h"
#include "bagualu/model/routing_trace.h"

namespace bagualu {

/// Makes a RoutingTrace of the lines of one or more logs, whatever mix of forms they hold
/// (docs/formats.md, Routing logs). Lines about other things are passed over; those about routing
/// that cannot be used are counted with their reason and first places.
///
/// Rows without a number of their micro-batch are numbered in the order of their lines, and of
/// these the last run through a step counts if a restarted job did it again.
/// Memory: about 60 bytes per row kept; nothing of the text.
class RoutingLogReader {
 public:
  /// Throws InvalidInput(name) from end_file() if the file gave no row.
  void begin_file(std::string name);
  void add(const TextLine& line);
  /// `damage`: LineSource::damage() of the file.
  void end_file(const std::string& damage = "");

  /// The trace of all files. The reader is empty afterwards.
  RoutingTrace finish();

 private:
  struct RawRow {
    LogRow row;
    uint64_t place = 0;  ///< file and line, rising as they were read
    int32_t epoch = 0;   ///< how often the job went back to an earlier step
  };
  struct Progress {
    int32_t step = -1;
    int32_t epoch = 0;
  };

  void parse(const TextLine& line);
  void keep(const LogRow& row);
  void leave_out(LeftOutReason reason, uint64_t place, int64_t count = 1);
  std::string place_text(uint64_t place) const;
  uint64_t here() const;
  void resolve(RawRow* begin, RawRow* end);
  void resolve_numbered(RawRow* begin, RawRow* end);
  void resolve_ordered(RawRow* begin, RawRow* end);
  void emit(const RawRow& raw, int32_t microbatch);
  void finish_records();
  void finish_notes();

  std::vector<std::string> names_;
  int64_t line_ = 0;
  int64_t file_rows_ = 0;
  ParsedLine parsed_;
  CsvLineParser csv_;
  std::vector<RawRow> rows_;
  std::unordered_map<uint64_t, Progress> progress_;  ///< of unnumbered rows, by layer and rank
  std::array<LeftOut, kLeftOutReasons> left_out_;
  int64_t stand_ins_ = 0;    ///< free lines used in place of lost alloc lines
  bool several_ = false;     ///< some step has more than one unnumbered row of a rank and layer
  bool per_expert_ = false;  ///< valid once there are rows
  bool megatron_lines_ = false;
  bool run_log_ = false;
  int64_t first_layer_ = -1;
  RoutingTrace trace_;
};

/// All files in the order given; "-" is standard input.
/// Throws: InvalidInput for a file that cannot be read or has nothing usable.
RoutingTrace read_routing_logs(const std::vector<std::filesystem::path>& paths);

}  // namespace bagualu
