#include "bagualu/model/routing_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int kLineBits = 44;
constexpr size_t kShownPlaces = 5;

/// The best form among the rows of a rank is used: those that name their micro-batch before events,
/// which have an identity, before others; and the rank's own count before those of its experts.
int form_of(const LogRow& row) {
  const bool event = row.form == RowForm::kAlloc || row.form == RowForm::kFree;
  const int identity = row.microbatch != kNone ? 0 : event ? 1 : 2;
  return 2 * identity + (row.rank != kNone && row.expert != kNone ? 1 : 0);
}

/// Experts of an expert trace go together: they are written as one list.
auto group_key(const LogRow& row) { return std::tie(row.step, row.layer, row.rank); }

}  // namespace

uint64_t RoutingLogReader::here() const {
  return (static_cast<uint64_t>(names_.size() - 1) << kLineBits) | static_cast<uint64_t>(line_);
}

std::string RoutingLogReader::place_text(uint64_t place) const {
  return fmt::format("{}:{}", names_[place >> kLineBits], place & ((uint64_t{1} << kLineBits) - 1));
}

void RoutingLogReader::begin_file(std::string name) {
  names_.push_back(std::move(name));
  line_ = 0;
  file_rows_ = 0;
  csv_.reset();
}

void RoutingLogReader::leave_out(LeftOutReason reason, uint64_t place, int64_t count) {
  LeftOut& entry = left_out_[static_cast<size_t>(reason)];
  entry.count += count;
  if (entry.places.size() < kShownPlaces) entry.places.push_back(place_text(place));
}

void RoutingLogReader::add(const TextLine& line) {
  line_ = line.number;
  ++trace_.lines;
  if (line.too_long) {
    leave_out(LeftOutReason::kTooLong, here());
    return;
  }
  const size_t before = rows_.size();
  parse(line);
  if (rows_.size() == before) return;
  file_rows_ += static_cast<int64_t>(rows_.size() - before);
  ++trace_.used_lines;
  if (!line.ended && line.text.back() != '}') {
    trace_.notes.push_back(
        fmt::format("{}: the last line has no line end, its count may be cut", place_text(here())));
  }
}

void RoutingLogReader::parse(const TextLine& line) {
  parsed_.clear();
  parsed_.rows.clear();
  parsed_.left_out.clear();
  if (!parse_json_line(line.text, &parsed_) && !parse_event_line(line.text, &parsed_) &&
      !csv_.parse(line.text, &parsed_)) {
    return;
  }
  if (parsed_.first_layer >= 0) first_layer_ = parsed_.first_layer;
  for (const LeftOutReason reason : parsed_.left_out) leave_out(reason, here());
  for (const LogRow& row : parsed_.rows) keep(row);
  run_log_ = run_log_ || (parsed_.run_log && !parsed_.rows.empty());
}

void RoutingLogReader::keep(const LogRow& row) {
  const bool per_expert = row.rank == kNone;
  if (rows_.empty()) per_expert_ = per_expert;
  if (per_expert != per_expert_) {
    leave_out(LeftOutReason::kOtherForm, here());
    return;
  }
  RawRow raw{row, here(), 0};
  if (row.microbatch == kNone) {
    const uint64_t key = (static_cast<uint64_t>(row.layer) << 40) |
                         (static_cast<uint64_t>(row.rank + 1) << 16) |
                         static_cast<uint64_t>(row.expert + 1);
    Progress& progress = progress_[key];
    if (row.form != RowForm::kFree) {
      if (row.step < progress.step) ++progress.epoch;
      progress.step = row.step;
    }
    raw.epoch = progress.epoch;
  }
  rows_.push_back(raw);
}

void RoutingLogReader::end_file(const std::string& damage) {
  const std::string& name = names_.back();
  if (!damage.empty()) trace_.notes.push_back(fmt::format("{}: {}", name, damage));
  if (file_rows_ > 0) return;
  std::string found = line_ == 0 ? "nothing" : fmt::format("none in {} lines", line_);
  for (const LeftOut& entry : left_out_) {
    if (entry.count == 0) continue;
    found +=
        fmt::format(", {} {} ({})", entry.count, left_out_name(entry.reason), entry.places.front());
  }
  if (!damage.empty()) found += ", " + damage;
  throw InvalidInput(name, "routing records", found,
                     "lines with 'moe_token_event: ... received_tokens=N', with 'step: N, layer: "
                     "L, rank: R, received_tokens: T', CSV with a header, or JSON lines");
}

void RoutingLogReader::emit(const RawRow& raw, int32_t microbatch) {
  if (raw.row.form == RowForm::kFree) ++stand_ins_;
  megatron_lines_ = megatron_lines_ || raw.row.form != RowForm::kTable;
  const int32_t unit = per_expert_ ? raw.row.expert : raw.row.rank;
  trace_.records.push_back({raw.row.step, microbatch, raw.row.layer, unit, raw.row.tokens});
}

/// Rows of one step, layer and rank that name their micro-batch: of each there is one.
void RoutingLogReader::resolve_numbered(RawRow* begin, RawRow* end) {
  std::sort(begin, end, [](const RawRow& a, const RawRow& b) {
    return std::tuple(a.row.microbatch, a.row.form == RowForm::kFree, a.place, a.row.tokens) <
           std::tuple(b.row.microbatch, b.row.form == RowForm::kFree, b.place, b.row.tokens);
  });
  for (RawRow* first = begin; first != end;) {
    RawRow* next = first;
    const RawRow* kept = first;
    while (++next != end && next->row.microbatch == first->row.microbatch) {
      // The free line of an event repeats what its alloc line said.
      if (next->row.form == RowForm::kFree) continue;
      const bool same = next->row.tokens == kept->row.tokens;
      leave_out(same ? LeftOutReason::kRepeated : LeftOutReason::kReplaced,
                same ? next->place : kept->place);
      if (!same) kept = next;
    }
    emit(*kept, first->row.microbatch);
    first = next;
  }
}

/// Rows of one step, layer and rank without a micro-batch: each is one, in the order of lines.
void RoutingLogReader::resolve_ordered(RawRow* begin, RawRow* end) {
  std::sort(begin, end, [](const RawRow& a, const RawRow& b) {
    return std::tuple(-a.epoch, a.row.event_id, a.row.form == RowForm::kFree, a.place,
                      a.row.tokens) < std::tuple(-b.epoch, b.row.event_id,
                                                 b.row.form == RowForm::kFree, b.place,
                                                 b.row.tokens);
  });
  // The job went back: what it did before is not what it trained with.
  const int32_t epoch = begin->epoch;
  std::vector<RawRow> kept;
  for (const RawRow* raw = begin; raw != end; ++raw) {
    if (raw->epoch != epoch) {
      if (raw->row.form != RowForm::kFree) leave_out(LeftOutReason::kReplaced, raw->place);
      continue;
    }
    const bool event = raw->row.event_id != kNone;
    const bool free = raw->row.form == RowForm::kFree;
    // A free line without an event_id cannot be told from that of a known alloc.
    if (free && !event) continue;
    if (event && !kept.empty() && kept.back().row.event_id == raw->row.event_id) {
      if (free) continue;
      const bool same = kept.back().row.tokens == raw->row.tokens;
      leave_out(same ? LeftOutReason::kRepeated : LeftOutReason::kReplaced,
                same ? raw->place : kept.back().place);
      if (!same) kept.back() = *raw;
      continue;
    }
    kept.push_back(*raw);
  }
  std::sort(kept.begin(), kept.end(),
            [](const RawRow& a, const RawRow& b) { return a.place < b.place; });
  several_ = several_ || kept.size() > 1;
  for (size_t i = 0; i < kept.size(); ++i) {
    // -2 - i: numbered by order; finish_records() makes -1 of it where nothing has two.
    emit(kept[i], static_cast<int32_t>(-2 - static_cast<int64_t>(i)));
  }
}

/// Rows of one step, layer and rank: of the forms that describe them one is used, then those of
/// each expert are settled by themselves.
void RoutingLogReader::resolve(RawRow* begin, RawRow* end) {
  const auto best = [](const RawRow& a, const RawRow& b) {
    return form_of(a.row) < form_of(b.row);
  };
  const int form = form_of(std::min_element(begin, end, best)->row);
  end = std::stable_partition(begin, end, [&](const RawRow& raw) {
    const bool used = form_of(raw.row) == form;
    if (!used && raw.row.form != RowForm::kFree) leave_out(LeftOutReason::kOtherForm, raw.place);
    return used;
  });
  std::sort(begin, end,
            [](const RawRow& a, const RawRow& b) { return a.row.expert < b.row.expert; });
  for (RawRow* first = begin; first != end;) {
    RawRow* next = std::find_if(
        first, end, [&](const RawRow& raw) { return raw.row.expert != first->row.expert; });
    if (first->row.microbatch != kNone) {
      resolve_numbered(first, next);
    } else {
      resolve_ordered(first, next);
    }
    first = next;
  }
}

/// Sorts, adds up the experts of a rank, settles the numbers of micro-batches.
void RoutingLogReader::finish_records() {
  for (RoutedRecord& record : trace_.records) {
    if (record.microbatch < -1) record.microbatch = several_ ? -2 - record.microbatch : -1;
  }
  std::vector<RoutedRecord>& records = trace_.records;
  std::sort(records.begin(), records.end(), [](const RoutedRecord& a, const RoutedRecord& b) {
    return std::tie(a.step, a.microbatch, a.layer, a.rank) <
           std::tie(b.step, b.microbatch, b.layer, b.rank);
  });
  size_t kept = 0;
  for (size_t i = 0; i < records.size(); ++i) {
    RoutedRecord& last = records[kept == 0 ? 0 : kept - 1];
    const RoutedRecord& next = records[i];
    if (kept > 0 && last.step == next.step && last.microbatch == next.microbatch &&
        last.layer == next.layer && last.rank == next.rank) {
      last.tokens += next.tokens;
    } else {
      records[kept++] = next;
    }
  }
  records.resize(kept);
}

void RoutingLogReader::finish_notes() {
  std::vector<std::string>& notes = trace_.notes;
  if (stand_ins_ > 0) {
    notes.push_back(
        fmt::format("{} free lines stand in for alloc lines that are lost", stand_ins_));
  }
  if (trace_.numbered_by_order) {
    notes.push_back("the log does not number micro-batches: they count in the order of lines");
  }
  if (run_log_) {
    notes.push_back(
        "rows of a training log: most of any micro-batch of a step, not the sum over them");
  }
}

RoutingTrace RoutingLogReader::finish() {
  progress_.clear();
  std::sort(rows_.begin(), rows_.end(),
            [](const RawRow& a, const RawRow& b) { return group_key(a.row) < group_key(b.row); });
  RawRow* end = rows_.data() + rows_.size();
  for (RawRow* begin = rows_.data(); begin != end;) {
    RawRow* next = std::find_if(
        begin, end, [&](const RawRow& r) { return group_key(r.row) != group_key(begin->row); });
    resolve(begin, next);
    begin = next;
  }
  rows_.clear();
  rows_.shrink_to_fit();
  finish_records();
  trace_.per_expert = per_expert_;
  trace_.moe_layers_only = per_expert_;
  trace_.numbered_by_order = several_;
  const bool from_one =
      megatron_lines_ && std::none_of(trace_.records.begin(), trace_.records.end(),
                                      [](const RoutedRecord& r) { return r.layer == 0; });
  trace_.first_layer = first_layer_ >= 0 ? first_layer_ : (from_one ? 1 : 0);
  finish_notes();
  for (size_t i = 0; i < left_out_.size(); ++i) {
    left_out_[i].reason = static_cast<LeftOutReason>(i);
    if (left_out_[i].count > 0) trace_.left_out.push_back(std::move(left_out_[i]));
  }
  RoutingTrace trace = std::move(trace_);
  *this = RoutingLogReader();
  return trace;
}

RoutingTrace read_routing_logs(const std::vector<std::filesystem::path>& paths) {
  RoutingLogReader reader;
  for (const std::filesystem::path& path : paths) {
    LineSource source(path);
    reader.begin_file(path == "-" ? "standard input" : path.string());
    for (TextLine line; source.next(&line);) reader.add(line);
    reader.end_file(source.damage());
  }
  return reader.finish();
}

}  // namespace bagualu
