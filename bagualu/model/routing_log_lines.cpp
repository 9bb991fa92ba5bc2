#include "bagualu/model/routing_log_lines.h"

#include <algorithm>
#include <cctype>

#include "bagualu/model/routing_log_number.h"

namespace bagualu {
namespace {

constexpr std::string_view kEventMark = "moe_token_event:";
constexpr std::string_view kStepMark = "step:";
constexpr std::string_view kSeparators = " \t,|;";

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// Ends before a separator, a quote, a bracket, an escape sequence.
bool is_value(char c) { return is_word(c) || c == '.' || c == '+' || c == '-'; }

/// A beginning of a record in a line.
struct Mark {
  size_t begin = std::string_view::npos;
  size_t after = std::string_view::npos;
  bool event = false;
};

/// The next mark at or after `from`; "global_step:" is none, "12step:" is another writer's.
Mark next_mark(std::string_view text, size_t from) {
  const size_t event = text.find(kEventMark, from);
  size_t step = text.find(kStepMark, from);
  while (step != std::string_view::npos && step > 0 && is_word(text[step - 1]) &&
         !is_digit(text[step - 1])) {
    step = text.find(kStepMark, step + 1);
  }
  if (event <= step && event != std::string_view::npos) {
    return {event, event + kEventMark.size(), true};
  }
  // The word itself is the first field of the record.
  return {step, step, false};
}

struct Field {
  std::string_view key;
  std::string_view value;
};

/// Takes "key=value" or "key: value" off the front; false at anything else.
bool next_field(std::string_view* rest, Field* field) {
  rest->remove_prefix(std::min(rest->find_first_not_of(kSeparators), rest->size()));
  const auto key_end = std::find_if_not(rest->begin(), rest->end(), is_word);
  const auto length = static_cast<size_t>(key_end - rest->begin());
  if (length == 0 || length == rest->size()) return false;
  const char assign = (*rest)[length];
  if (assign != '=' && assign != ':') return false;
  field->key = rest->substr(0, length);
  rest->remove_prefix(length + 1);
  rest->remove_prefix(std::min(rest->find_first_not_of(' '), rest->size()));
  const auto end = std::find_if_not(rest->begin(), rest->end(), is_value);
  field->value = rest->substr(0, static_cast<size_t>(end - rest->begin()));
  rest->remove_prefix(field->value.size());
  return true;
}

/// The fields of one record, as far as they stand in the text.
struct Record {
  std::string_view event_id, step, iteration, microbatch, event, layer, rank, tokens;
  bool summary = false;  ///< averages of a layer over its ranks
  bool twice = false;    ///< a field occurs again: two records run into each other
  bool cut = false;      ///< the text goes on without a separator

  std::string_view* slot(std::string_view key) {
    if (key == "event_id") return &event_id;
    if (key == "step") return &step;
    if (key == "iteration") return &iteration;
    if (key == "microbatch" || key == "micro_batch") return &microbatch;
    if (key == "event") return &event;
    if (key == "layer") return &layer;
    if (key == "rank") return &rank;
    if (key == "received_tokens") return &tokens;
    return nullptr;
  }
};

Record read_record(std::string_view text) {
  Record record;
  for (Field field; next_field(&text, &field);) {
    std::string_view* slot = record.slot(field.key);
    if (slot != nullptr) {
      record.twice = record.twice || slot->data() != nullptr;
      *slot = field.value;
      // What follows the count is another writer's text.
      if (slot == &record.tokens) break;
    }
    record.summary = record.summary || field.key == "average_received_tokens";
  }
  return record;
}

bool is_unknown(std::string_view value) { return value == "unknown" || value == "None"; }

/// Turns the texts into a row; the reason why not otherwise.
void finish_record(const Record& record, bool event, ParsedLine* line) {
  const std::string_view step =
      record.step.data() == nullptr || is_unknown(record.step) ? record.iteration : record.step;
  if (record.twice || record.cut || step.empty() || record.layer.empty() || record.rank.empty() ||
      record.tokens.empty() || (event && record.event.empty())) {
    line->left_out.push_back(LeftOutReason::kTorn);
    return;
  }
  if (is_unknown(step) || is_unknown(record.layer) || is_unknown(record.rank)) {
    line->left_out.push_back(LeftOutReason::kUnknownPlace);
    return;
  }
  LogRow row;
  row.form = !event                   ? RowForm::kStepLine
             : record.event == "free" ? RowForm::kFree
                                      : RowForm::kAlloc;
  NumberReader numbers;
  row.step = numbers.int32(step, kMaxStep);
  row.layer = numbers.int32(record.layer, kMaxLayer);
  row.rank = numbers.int32(record.rank, kMaxRank);
  row.tokens = numbers.int64(record.tokens, kMaxTokens);
  if (!record.event_id.empty() && !is_unknown(record.event_id)) {
    row.event_id = numbers.int64(record.event_id, INT64_MAX);
  }
  if (!record.microbatch.empty() && !is_unknown(record.microbatch) && record.microbatch != "-1") {
    row.microbatch = numbers.int32(record.microbatch, kMaxMicrobatch);
  }
  if (numbers.good()) {
    line->rows.push_back(row);
  } else {
    line->left_out.push_back(numbers.reason());
  }
}

/// "step: 5, loss: 2.1" is somebody else's line: ours goes on with the layer.
bool is_step_record(const Record& record) {
  return record.layer.data() != nullptr || record.tokens.data() != nullptr;
}

}  // namespace

bool parse_event_line(std::string_view text, ParsedLine* line) {
  bool any = false;
  for (Mark mark = next_mark(text, 0); mark.begin != std::string_view::npos;) {
    const size_t from = mark.event ? mark.after : mark.begin + kStepMark.size();
    const Mark next = next_mark(text, from);
    const size_t end = std::min(next.begin, text.size());
    Record record = read_record(text.substr(mark.after, end - mark.after));
    // A number that another line's beginning touches may have lost digits.
    record.cut = end < text.size() && record.tokens.data() != nullptr &&
                 record.tokens.data() + record.tokens.size() == text.data() + end;
    if (mark.event || is_step_record(record)) {
      any = true;
      if (!record.summary) finish_record(record, mark.event, line);
    }
    mark = next;
  }
  return any;
}

}  // namespace bagualu
