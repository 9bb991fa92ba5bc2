// JSON lines of routed tokens.

#include <algorithm>

#include "bagualu/base/json.h"
#include "bagualu/model/routing_log_lines.h"

namespace bagualu {
namespace {

/// Reads members of one object and remembers the first thing that was wrong.
class Members {
 public:
  explicit Members(const Json& object) : object_(object) {}

  const Json* find(std::initializer_list<const char*> keys) const {
    for (const char* key : keys) {
      const auto found = object_.find(key);
      if (found != object_.end() && !found->is_null()) return &*found;
    }
    return nullptr;
  }

  int64_t number(const Json* value, int64_t max) {
    if (value == nullptr || !value->is_number_integer()) {
      fail(LeftOutReason::kTorn);
      return 0;
    }
    const bool in_range = value->is_number_unsigned()
                              ? value->get<uint64_t>() <= static_cast<uint64_t>(max)
                              : value->get<int64_t>() >= 0 && value->get<int64_t>() <= max;
    if (!in_range) {
      fail(LeftOutReason::kOutOfRange);
      return 0;
    }
    return value->get<int64_t>();
  }
  int32_t small(const Json* value, int64_t max) { return static_cast<int32_t>(number(value, max)); }

  void fail(LeftOutReason reason) {
    if (good_) reason_ = reason;
    good_ = false;
  }
  bool good() const { return good_; }
  LeftOutReason reason() const { return reason_; }

 private:
  const Json& object_;
  bool good_ = true;
  LeftOutReason reason_ = LeftOutReason::kTorn;
};

/// Step, micro-batch and layer.
LogRow place_of(Members* members) {
  LogRow row;
  row.step = members->small(members->find({"step", "iteration"}), kMaxStep);
  row.layer = members->small(members->find({"layer"}), kMaxLayer);
  const Json* microbatch = members->find({"micro_batch", "microbatch"});
  if (microbatch != nullptr && *microbatch != -1) {
    row.microbatch = members->small(microbatch, kMaxMicrobatch);
  }
  return row;
}

/// Rows of a list of tokens; ranks or experts count from 0 unless `ranks` names them.
void add_list(LogRow row, const Json& tokens, const Json* ranks, bool experts, Members* members,
              std::vector<LogRow>* rows) {
  if (ranks != nullptr && (!ranks->is_array() || ranks->size() != tokens.size())) {
    members->fail(LeftOutReason::kTorn);
    return;
  }
  int64_t index = 0;
  for (const Json& count : tokens) {
    if (!members->good()) return;
    row.tokens = members->number(&count, kMaxTokens);
    int64_t place = index;
    if (ranks != nullptr) {
      place = members->number(&(*ranks)[static_cast<size_t>(index)], kMaxRank);
    }
    if (place > (experts ? kMaxExpert : kMaxRank)) members->fail(LeftOutReason::kOutOfRange);
    (experts ? row.expert : row.rank) = static_cast<int32_t>(place);
    rows->push_back(row);
    ++index;
  }
}

void add_cell(Members* members, std::vector<LogRow>* rows) {
  LogRow row = place_of(members);
  const Json* counts = members->find({"counts", "tokens_per_expert"});
  const Json* tokens = members->find({"tokens", "received_tokens"});
  const Json* rank = members->find({"rank"});
  if (rank != nullptr) row.rank = members->small(rank, kMaxRank);
  if (counts != nullptr && counts->is_array() && !counts->empty()) {
    add_list(row, *counts, nullptr, true, members, rows);
  } else if (tokens != nullptr && tokens->is_array() && !tokens->empty() && rank == nullptr) {
    add_list(row, *tokens, members->find({"ranks"}), false, members, rows);
  } else {
    const Json* expert = members->find({"expert"});
    if (expert != nullptr) row.expert = members->small(expert, kMaxExpert);
    if (rank == nullptr && expert == nullptr) members->fail(LeftOutReason::kTorn);
    row.tokens = members->number(tokens, kMaxTokens);
    rows->push_back(row);
  }
}

/// A step of a training log: per rank the rows of every layer. Dense layers have none anywhere.
void add_run_step(const Json& object, Members* members, std::vector<LogRow>* rows) {
  LogRow row;
  row.step = members->small(members->find({"step"}), kMaxStep);
  for (const Json& rank : object.at("ranks")) {
    if (!rank.is_object() || !rank.contains("rows") || !rank.at("rows").is_array()) {
      members->fail(LeftOutReason::kTorn);
      return;
    }
    row.rank = members->small(rank.contains("rank") ? &rank.at("rank") : nullptr, kMaxRank);
    row.layer = 0;
    for (const Json& count : rank.at("rows")) {
      row.tokens = members->number(&count, kMaxTokens);
      rows->push_back(row);
      if (++row.layer > kMaxLayer) members->fail(LeftOutReason::kOutOfRange);
      if (!members->good()) return;
    }
  }
  std::vector<int64_t> of_layer;
  for (const LogRow& r : *rows) {
    of_layer.resize(std::max(of_layer.size(), static_cast<size_t>(r.layer) + 1));
    of_layer[static_cast<size_t>(r.layer)] += r.tokens;
  }
  std::erase_if(*rows,
                [&](const LogRow& r) { return of_layer[static_cast<size_t>(r.layer)] == 0; });
}

/// A damaged object that was one of ours, as far as one can tell.
bool mentions_a_cell(std::string_view text) {
  return text.find("\"layer\"") != std::string_view::npos ||
         text.find("\"counts\"") != std::string_view::npos ||
         text.find("\"step\"") != std::string_view::npos;
}

}  // namespace

bool parse_json_line(std::string_view text, ParsedLine* line) {
  const size_t brace = text.find_first_not_of(" \t");
  if (brace == std::string_view::npos || text[brace] != '{') return false;
  const Json object = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) {
    if (!mentions_a_cell(text)) return false;
    line->left_out.push_back(LeftOutReason::kTorn);
    return true;
  }
  Members members(object);
  const Json* type = members.find({"type"});
  if (type != nullptr && *type == "routing_trace") {
    const Json* first = members.find({"first_layer"});
    if (first != nullptr) line->first_layer = members.number(first, 1);
  } else if (type != nullptr && *type == "step" && object.contains("ranks") &&
             object.at("ranks").is_array()) {
    add_run_step(object, &members, &line->rows);
    line->run_log = true;
  } else if (type == nullptr && members.find({"layer"}) != nullptr) {
    add_cell(&members, &line->rows);
  } else {
    return false;
  }
  if (members.good()) return true;
  line->rows.clear();
  line->first_layer = kNone;
  line->left_out.push_back(members.reason());
  return true;
}

}  // namespace bagualu
