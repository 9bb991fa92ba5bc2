// CSV tables of routed tokens.

#include <algorithm>
#include <array>
#include <cctype>
#include <string>

#include "bagualu/model/routing_log_lines.h"
#include "bagualu/model/routing_log_number.h"

namespace bagualu {
namespace {

constexpr size_t kMaxCells = 8192;

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\"'";
  const size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

void split_cells(std::string_view text, std::vector<std::string_view>* cells) {
  cells->clear();
  while (cells->size() < kMaxCells) {
    const size_t comma = text.find(',');
    cells->push_back(trimmed(text.substr(0, comma)));
    if (comma == std::string_view::npos) return;
    text.remove_prefix(comma + 1);
  }
}

/// "Micro-Batch" -> "microbatch": letters and digits only.
std::string plain_name(std::string_view text) {
  std::string name;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte)) name += static_cast<char>(std::tolower(byte));
  }
  return name;
}

bool is_any(const std::string& name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Number of "expert12", "e12"; kNone if it is no such name.
int expert_of(const std::string& name) {
  const size_t digits = name.find_first_of("0123456789");
  if (digits == std::string::npos || !is_any(name.substr(0, digits), {"expert", "e"})) return kNone;
  NumberReader numbers;
  const int expert = numbers.int32(std::string_view(name).substr(digits), kMaxExpert);
  return numbers.good() ? expert : kNone;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// "12 0 7": at least two numbers.
bool is_list(std::string_view cell) {
  return !cell.empty() && is_digit(cell.front()) && cell.find(' ') != std::string_view::npos &&
         cell.find_first_not_of("0123456789 ") == std::string_view::npos;
}

bool is_number(std::string_view cell) {
  return !cell.empty() && std::all_of(cell.begin(), cell.end(), is_digit);
}

}  // namespace

bool CsvLineParser::read_header(std::string_view text) {
  const bool comment = text.front() == '#';
  if (comment) text.remove_prefix(1);
  split_cells(text, &cells_);
  Column found;
  int iteration = kNone;
  int last = kNone;
  for (int i = 0; i < static_cast<int>(cells_.size()); ++i) {
    const std::string name = plain_name(cells_[static_cast<size_t>(i)]);
    int* slot = nullptr;
    if (is_any(name, {"step"})) slot = &found.step;
    if (is_any(name, {"iteration", "iter"})) slot = &iteration;
    if (is_any(name, {"microbatch", "microbatchid", "mb"})) slot = &found.microbatch;
    if (is_any(name, {"layer", "layerid", "layernumber"})) slot = &found.layer;
    if (is_any(name, {"rank", "eprank", "globalrank"})) slot = &found.rank;
    if (is_any(name, {"expert", "expertid"})) slot = &found.expert;
    if (is_any(name, {"receivedtokens", "tokens", "rows", "numtokens"})) slot = &found.tokens;
    if (is_any(name, {"counts"}) || name.rfind("tokensperexpert", 0) == 0) slot = &found.list;
    if (slot != nullptr && *slot == kNone) *slot = last = i;
    const int expert = expert_of(name);
    if (expert != kNone && expert == static_cast<int>(found.expert_columns.size())) {
      found.expert_columns.push_back(last = i);
    }
  }
  if (found.step == kNone) found.step = iteration;
  const bool counts = found.list != kNone || !found.expert_columns.empty() ||
                      (found.tokens != kNone && (found.rank != kNone || found.expert != kNone));
  if (found.step == kNone || found.layer == kNone || !counts) return false;
  columns_ = found;
  // A comment goes on in words behind the last name.
  width_ = comment ? static_cast<size_t>(last) + 1 : cells_.size();
  return true;
}

bool CsvLineParser::number(int column, int64_t max, bool optional, int32_t* value,
                           ParsedLine* line) const {
  if (column == kNone) return true;
  const std::string_view cell = cells_[static_cast<size_t>(column)];
  if (optional && (cell.empty() || cell == "-1" || cell == "unknown")) return true;
  NumberReader numbers;
  *value = numbers.int32(cell, max);
  if (!numbers.good()) line->left_out.push_back(numbers.reason());
  return numbers.good();
}

bool CsvLineParser::read_counts(LogRow row, ParsedLine* line) const {
  const size_t before = line->rows.size();
  NumberReader numbers;
  const auto add = [&](std::string_view word) {
    row.tokens = numbers.int64(word, kMaxTokens);
    if (row.expert >= kMaxExpert) numbers.int64("1", 0);  // more experts than a model may have
    ++row.expert;
    if (numbers.good()) line->rows.push_back(row);
  };
  if (columns_.list != kNone) {
    std::string_view list = cells_[static_cast<size_t>(columns_.list)];
    while (!list.empty() && numbers.good()) {
      const size_t end = std::min(list.find(' '), list.size());
      add(list.substr(0, end));
      list.remove_prefix(end);
      list.remove_prefix(std::min(list.find_first_not_of(' '), list.size()));
    }
  } else {
    for (const int column : columns_.expert_columns) add(cells_[static_cast<size_t>(column)]);
  }
  if (numbers.good() && line->rows.size() > before) return true;
  line->rows.resize(before);
  line->left_out.push_back(numbers.reason());
  return false;
}

bool CsvLineParser::read_row(ParsedLine* line) const {
  LogRow row;
  if (!number(columns_.step, kMaxStep, false, &row.step, line) ||
      !number(columns_.microbatch, kMaxMicrobatch, true, &row.microbatch, line) ||
      !number(columns_.layer, kMaxLayer, false, &row.layer, line) ||
      !number(columns_.rank, kMaxRank, false, &row.rank, line)) {
    return false;
  }
  if (columns_.tokens == kNone) return read_counts(row, line);
  if (!number(columns_.expert, kMaxExpert, false, &row.expert, line)) return false;
  NumberReader numbers;
  row.tokens = numbers.int64(cells_[static_cast<size_t>(columns_.tokens)], kMaxTokens);
  if (numbers.good()) {
    line->rows.push_back(row);
  } else {
    line->left_out.push_back(numbers.reason());
  }
  return numbers.good();
}

/// A broken row rather than another writer's line: it begins with a number, or the step and layer
/// stand where they should.
bool CsvLineParser::looks_like_data() const {
  const auto at = [&](int column) {
    return static_cast<size_t>(column) < cells_.size() ? cells_[static_cast<size_t>(column)]
                                                       : std::string_view();
  };
  return is_number(cells_.front()) || (columns_.step > 0 && is_number(at(columns_.step)));
}

bool CsvLineParser::parse(std::string_view text, ParsedLine* line) {
  text = trimmed(text);
  if (text.empty()) return false;
  const bool names_layers =
      text.find("ayer") != std::string_view::npos || text.find("AYER") != std::string_view::npos;
  if (!is_digit(text.front()) && names_layers && read_header(text)) {
    return true;
  }
  if (text.front() == '#') return false;
  split_cells(text, &cells_);
  if (width_ == 0) {
    // The shape without a header line: run, step, micro-batch, layer, counts.
    if (cells_.size() != 5 || !is_number(cells_[1]) || !is_number(cells_[2]) ||
        !is_number(cells_[3]) || !is_list(cells_[4])) {
      return false;
    }
    columns_ = {1, 2, 3, kNone, kNone, kNone, 4, {}};
    width_ = 5;
  }
  if (cells_.size() == width_ && is_number(cells_[static_cast<size_t>(columns_.step)])) {
    read_row(line);
    return true;
  }
  if (!looks_like_data()) return false;
  line->left_out.push_back(LeftOutReason::kTorn);
  return true;
}

}  // namespace bagualu
