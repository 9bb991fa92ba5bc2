// Parsers of single lines of routing logs: text in, rows out. Which rows belong together, and which
// repeat another, is routing_log.cpp's business.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/model/routing_trace.h"

namespace bagualu {

/// What kind of line a row stands in.
enum class RowForm : uint8_t {
  kAlloc,     ///< moe_token_event with event=alloc
  kFree,      ///< the same rows given back; counts only where the alloc line is lost
  kStepLine,  ///< step: N, layer: L, rank: R, received_tokens: T
  kTable,     ///< CSV or JSON
};

inline constexpr int32_t kNone = -1;

struct LogRow {
  int32_t step = kNone;
  int32_t microbatch = kNone;  ///< kNone: not said
  int32_t layer = kNone;
  int32_t rank = kNone;    ///< kNone: counts per expert
  int32_t expert = kNone;  ///< kNone: of the whole rank
  RowForm form = RowForm::kTable;
  int64_t tokens = -1;
  int64_t event_id = kNone;
};

/// Largest numbers a row may have; above them it is out of range. Sums of rows stay below 2^63.
inline constexpr int64_t kMaxStep = (int64_t{1} << 31) - 2;
inline constexpr int64_t kMaxMicrobatch = (int64_t{1} << 20) - 1;
inline constexpr int64_t kMaxLayer = 65'535;
inline constexpr int64_t kMaxRank = (int64_t{1} << 20) - 1;
inline constexpr int64_t kMaxExpert = 4'095;
inline constexpr int64_t kMaxTokens = int64_t{1} << 36;

/// What one line gave.
struct ParsedLine {
  std::vector<LogRow> rows;
  std::vector<LeftOutReason> left_out;
  int64_t first_layer = kNone;  ///< a header of our own format says it
  bool run_log = false;         ///< rows are a training log's: most of any micro-batch

  void clear() { *this = {std::move(rows), std::move(left_out), kNone, false}; }
};

/// `moe_token_event: event_id=1, step=0, ...` and `step: 0, layer: 1, rank: 2, received_tokens: 3`,
/// anywhere in the line and more than once; separators are spaces, commas or bars.
/// Returns: false if the line has no such beginning.
bool parse_event_line(std::string_view text, ParsedLine* line);

/// An object of our own format, of `bagualu train --routing-trace`, or a `step` of a training log.
/// Returns: false if the line is no JSON object or one about something else.
bool parse_json_line(std::string_view text, ParsedLine* line);

/// CSV; remembers the header.
class CsvLineParser {
 public:
  /// Returns: false for a line that has nothing to do with the table.
  bool parse(std::string_view text, ParsedLine* line);
  void reset() { *this = {}; }

 private:
  struct Column {
    int step = kNone;
    int microbatch = kNone;
    int layer = kNone;
    int rank = kNone;
    int expert = kNone;
    int tokens = kNone;               ///< a number
    int list = kNone;                 ///< counts of all experts, spaces between
    std::vector<int> expert_columns;  ///< column of expert e, one each
  };

  bool read_header(const std::string_view text);
  bool read_row(ParsedLine* line) const;
  bool read_counts(LogRow row, ParsedLine* line) const;
  bool number(int column, int64_t max, bool optional, int32_t* value, ParsedLine* line) const;
  bool looks_like_data() const;

  Column columns_;
  size_t width_ = 0;  ///< cells of a row; 0: no header yet
  std::vector<std::string_view> cells_;
};

}  // namespace bagualu
