#include "bagualu/model/routing_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr std::array<std::string_view, kLeftOutReasons> kReasonNames = {
    "torn", "too-long", "out-of-range", "unknown-place", "repeated", "replaced", "other-form"};

bool same_cell(const RoutedRecord& a, const RoutedRecord& b) {
  return a.step == b.step && a.microbatch == b.microbatch && a.layer == b.layer;
}

/// Counts per expert are a whole list, experts without tokens included, as `bagualu train` wants
/// it.
void write_expert_cell(const RoutedRecord* first, const RoutedRecord* end, int64_t experts,
                       std::string* out) {
  fmt::format_to(std::back_inserter(*out),
                 "{{\"step\": {}, \"micro_batch\": {}, \"layer\": {}, \"counts\": [", first->step,
                 std::max(first->microbatch, 0), first->layer);
  for (int64_t expert = 0; expert < experts; ++expert) {
    const bool here = first != end && first->rank == expert;
    fmt::format_to(std::back_inserter(*out), "{}{}", expert == 0 ? "" : ", ",
                   here ? first->tokens : 0);
    if (here) ++first;
  }
  *out += "]}\n";
}

void write_rank_cell(const RoutedRecord* first, const RoutedRecord* end, std::string* out) {
  fmt::format_to(std::back_inserter(*out), "{{\"step\": {}, ", first->step);
  if (first->microbatch >= 0) {
    fmt::format_to(std::back_inserter(*out), "\"micro_batch\": {}, ", first->microbatch);
  }
  std::string ranks;
  std::string tokens;
  for (const RoutedRecord* record = first; record != end; ++record) {
    const char* separator = record == first ? "" : ", ";
    fmt::format_to(std::back_inserter(ranks), "{}{}", separator, record->rank);
    fmt::format_to(std::back_inserter(tokens), "{}{}", separator, record->tokens);
  }
  fmt::format_to(std::back_inserter(*out), "\"layer\": {}, \"ranks\": [{}], \"tokens\": [{}]}}\n",
                 first->layer, ranks, tokens);
}

}  // namespace

std::string_view left_out_name(LeftOutReason reason) {
  return kReasonNames[static_cast<size_t>(reason)];
}

int64_t RoutingTrace::left_out_count(LeftOutReason reason) const {
  for (const LeftOut& entry : left_out) {
    if (entry.reason == reason) return entry.count;
  }
  return 0;
}

int64_t expert_count(const RoutingTrace& trace) {
  int64_t experts = 0;
  if (!trace.per_expert) return experts;
  for (const RoutedRecord& record : trace.records) {
    experts = std::max<int64_t>(experts, record.rank + 1);
  }
  return experts;
}

RoutingTrace fold_experts(const RoutingTrace& trace, int64_t ep, const std::string& where,
                          const std::string& field) {
  BGL_CHECK(trace.per_expert);
  const int64_t experts = expert_count(trace);
  if (ep < 1 || experts % ep != 0) {
    throw InvalidInput(where, field, std::to_string(ep),
                       fmt::format("a divisor of {}, the experts of the trace", experts));
  }
  const int64_t local = experts / ep;
  RoutingTrace folded = trace;
  folded.per_expert = false;
  folded.records.clear();
  for (RoutedRecord record : trace.records) {
    record.rank = static_cast<int32_t>(record.rank / local);
    if (!folded.records.empty() && same_cell(folded.records.back(), record) &&
        folded.records.back().rank == record.rank) {
      folded.records.back().tokens += record.tokens;
    } else {
      folded.records.push_back(record);
    }
  }
  return folded;
}

std::string to_json_lines(const RoutingTrace& trace) {
  std::string out;
  // An expert trace has no header: every line is one that `bagualu train --routing-trace` reads.
  if (!trace.per_expert) {
    out = fmt::format("{{\"type\": \"routing_trace\", \"version\": 1, \"first_layer\": {}}}\n",
                      trace.first_layer);
  }
  const int64_t experts = expert_count(trace);
  const RoutedRecord* record = trace.records.data();
  const RoutedRecord* end = record + trace.records.size();
  while (record != end) {
    const RoutedRecord* next =
        std::find_if_not(record, end, [&](const auto& r) { return same_cell(*record, r); });
    if (trace.per_expert) {
      write_expert_cell(record, next, experts, &out);
    } else {
      write_rank_cell(record, next, &out);
    }
    record = next;
  }
  return out;
}

}  // namespace bagualu
