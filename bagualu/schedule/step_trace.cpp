#include "bagualu/schedule/step_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/line_source.h"

namespace bagualu {
namespace {

constexpr std::array<std::string_view, 19> kActions = {
    "forward", "forward_end", "backward", "backward_end", "input_grad", "weight_grad", "recompute",
    "offload", "drain",       "reload",   "await",        "encode",     "decode",      "post",
    "receive", "send",        "sent",     "decide",       "other"};
constexpr std::array<std::string_view, 3> kStreams = {"comm", "d2h", "h2d"};

template <size_t N>
size_t parse_name(const std::array<std::string_view, N>& names, JsonReader& json,
                  const std::string& key) {
  const std::string text = json.string(key);
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) {
    throw InvalidInput(json.where(), key, "\"" + text + "\"",
                       fmt::format("one of {}", fmt::join(names, ", ")));
  }
  return static_cast<size_t>(found - names.begin());
}

Json head(const char* type, const RankStep& step) {
  return {{"type", type}, {"rank", step.rank}, {"step", step.step}};
}

Json to_json(const RankStep& step, const StepEvent& event) {
  Json line = head("action", step);
  line["slot"] = event.slot;
  line["stage"] = event.stage;
  line["microbatch"] = event.microbatch;
  line["action"] = step_action_name(event.action);
  line["op"] = event.op;
  line["name"] = event.name;
  line["start_ns"] = event.start_ns;
  line["end_ns"] = event.end_ns;
  if (!event.issues.empty()) line["issues"] = event.issues;
  if (!event.awaits.empty()) line["awaits"] = event.awaits;
  return line;
}

Json to_json(const RankStep& step, const StepTransfer& transfer, size_t number) {
  Json line = head("transfer", step);
  line["transfer"] = number;
  line["stream"] = transfer_stream_name(transfer.stream);
  line["name"] = transfer.name;
  line["channel"] = transfer.channel;
  line["key"] = transfer.key;
  line["bytes"] = transfer.bytes;
  line["start_ns"] = transfer.start_ns;
  line["end_ns"] = transfer.end_ns;
  return line;
}

int small(JsonReader& json, const char* key, int least) {
  return static_cast<int>(json.int64(key, least, int64_t{1} << 30));
}

StepEvent event_from(JsonReader& json) {
  StepEvent event;
  event.slot = small(json, "slot", -1);
  event.stage = small(json, "stage", -1);
  event.microbatch = small(json, "microbatch", -1);
  event.action = static_cast<StepAction>(parse_name(kActions, json, "action"));
  event.op = small(json, "op", -1);
  event.name = json.string("name");
  event.start_ns = json.int64("start_ns");
  event.end_ns = json.int64("end_ns");
  for (int64_t n : json.int64_list_or("issues", {}, 0, int64_t{1} << 30)) {
    event.issues.push_back(static_cast<int>(n));
  }
  for (int64_t n : json.int64_list_or("awaits", {}, 0, int64_t{1} << 30)) {
    event.awaits.push_back(static_cast<int>(n));
  }
  return event;
}

StepTransfer transfer_from(JsonReader& json) {
  StepTransfer transfer;
  transfer.stream = static_cast<TransferStream>(parse_name(kStreams, json, "stream"));
  transfer.name = json.string("name");
  transfer.channel = json.string("channel");
  transfer.key = json.string("key");
  transfer.bytes = json.int64("bytes", 0);
  transfer.start_ns = json.int64("start_ns");
  transfer.end_ns = json.int64("end_ns");
  return transfer;
}

class TraceReader {
 public:
  void read(const std::filesystem::path& path) {
    LineSource source(path);
    TextLine line;
    open_.clear();
    while (source.next(&line)) {
      if (line.text.empty()) continue;
      const std::string where = fmt::format("{} line {}", path.string(), line.number);
      Json json;
      try {
        json = parse_json_object(line.text, where);
      } catch (const InvalidInput&) {
        if (!line.ended) break;  // torn by a kill
        throw;
      }
      JsonReader reader(json, where);
      take(reader);
    }
  }

  std::vector<RankStep> steps() && {
    std::vector<RankStep> all;
    for (auto& [key, step] : steps_) all.push_back(std::move(step));
    return all;
  }

 private:
  using Key = std::pair<int64_t, int>;  // step, rank

  void take(JsonReader& json) {
    const std::string type = json.string("type");
    if (type != "action" && type != "transfer" && type != "rank_step") return;
    const Key key = {json.int64("step", 0), small(json, "rank", 0)};
    RankStep& step = open_[key];
    step.step = key.first;
    step.rank = key.second;
    if (type == "action") {
      step.events.push_back(event_from(json));
    } else if (type == "transfer") {
      const auto number = json.int64("transfer", 0, int64_t{1} << 30);
      if (number != static_cast<int64_t>(step.transfers.size())) {
        throw InvalidInput(json.where(), "transfer", std::to_string(number),
                           fmt::format("{}, the next of this step", step.transfers.size()));
      }
      step.transfers.push_back(transfer_from(json));
    } else {
      step.start_ns = json.int64("start_ns");
      step.end_ns = json.int64("end_ns");
      close(key, json.where());
    }
  }

  // A step counts once its last line is there.
  void close(const Key& key, const std::string& where) {
    RankStep step = std::move(open_.at(key));
    open_.erase(key);
    if (const std::string fault = step_fault(step); !fault.empty()) {
      throw InvalidInput(where, "step", fault, "a step whose events fit together");
    }
    if (!steps_.emplace(key, std::move(step)).second) {
      throw InvalidInput(where, "step", fmt::format("{} of rank {} again", key.first, key.second),
                         "each step of a rank once");
    }
  }

  std::map<Key, RankStep> open_;
  std::map<Key, RankStep> steps_;
};

using Spans = std::vector<std::pair<int64_t, int64_t>>;

// Disjoint and in order.
Spans merged(Spans spans) {
  std::sort(spans.begin(), spans.end());
  Spans result;
  for (const auto& [start, end] : spans) {
    if (end <= start) continue;
    if (!result.empty() && start <= result.back().second) {
      result.back().second = std::max(result.back().second, end);
    } else {
      result.push_back({start, end});
    }
  }
  return result;
}

int64_t length(const Spans& spans) {
  int64_t sum = 0;
  for (const auto& [start, end] : spans) sum += end - start;
  return sum;
}

Spans common(const Spans& one, const Spans& other) {
  Spans result;
  for (size_t i = 0, j = 0; i < one.size() && j < other.size();) {
    const int64_t start = std::max(one[i].first, other[j].first);
    const int64_t end = std::min(one[i].second, other[j].second);
    if (start < end) result.push_back({start, end});
    ++(one[i].second < other[j].second ? i : j);
  }
  return result;
}

}  // namespace

std::string_view step_action_name(StepAction action) {
  return kActions[static_cast<size_t>(action)];
}

std::string_view transfer_stream_name(TransferStream stream) {
  return kStreams[static_cast<size_t>(stream)];
}

StepTraceWriter::StepTraceWriter(const std::filesystem::path& path)
    : log_(path, EventLog::Open::kTruncate) {}

void StepTraceWriter::write(const RankStep& step) {
  const std::string fault = step_fault(step);
  BGL_CHECK(fault.empty(), fault);
  for (size_t i = 0; i < step.transfers.size(); ++i) {
    log_.write(to_json(step, step.transfers[i], i));
  }
  for (const StepEvent& event : step.events) log_.write(to_json(step, event));
  Json last = head("rank_step", step);
  last["start_ns"] = step.start_ns;
  last["end_ns"] = step.end_ns;
  log_.write(last);
}

std::vector<RankStep> read_step_trace(const std::vector<std::filesystem::path>& files) {
  TraceReader reader;
  for (const auto& file : files) reader.read(file);
  return std::move(reader).steps();
}

std::string step_fault(const RankStep& step) {
  int64_t now = step.start_ns;
  std::vector<int> issued(step.transfers.size(), 0);
  for (size_t i = 0; i < step.events.size(); ++i) {
    const StepEvent& event = step.events[i];
    const std::string name = fmt::format("rank {} event {} ({} {})", step.rank, i,
                                         step_action_name(event.action), event.name);
    if (event.start_ns < now) return name + " starts before the one before it ends";
    if (event.end_ns < event.start_ns) return name + " ends before it starts";
    now = event.end_ns;
    for (const auto* numbers : {&event.issues, &event.awaits}) {
      for (int n : *numbers) {
        if (n >= 0 && static_cast<size_t>(n) < issued.size()) continue;
        return fmt::format("{} names transfer {} of {}", name, n, issued.size());
      }
    }
    for (int n : event.issues) ++issued[static_cast<size_t>(n)];
    for (int n : event.awaits) {
      if (!issued[static_cast<size_t>(n)]) {
        return fmt::format("{} awaits transfer {} before it is issued", name, n);
      }
    }
  }
  if (step.end_ns < now) return fmt::format("rank {} ends before its last event", step.rank);
  for (size_t n = 0; n < issued.size(); ++n) {
    const StepTransfer& transfer = step.transfers[n];
    const std::string name = fmt::format("rank {} transfer {} ({})", step.rank, n, transfer.name);
    if (issued[n] != 1) return fmt::format("{} is issued {} times", name, issued[n]);
    if (transfer.end_ns < transfer.start_ns) return name + " ends before it starts";
  }
  return "";
}

StepOverlap step_overlap(const RankStep& step) {
  Spans compute, comm, copies;
  StepOverlap result;
  for (const StepEvent& event : step.events) {
    if (event.awaits.empty()) {
      compute.push_back({event.start_ns, event.end_ns});
      continue;
    }
    const TransferStream stream = step.transfers[static_cast<size_t>(event.awaits.front())].stream;
    (stream == TransferStream::kComm ? result.comm_wait_ns : result.copy_wait_ns) +=
        event.end_ns - event.start_ns;
  }
  for (const StepTransfer& transfer : step.transfers) {
    (transfer.stream == TransferStream::kComm ? comm : copies)
        .push_back({transfer.start_ns, transfer.end_ns});
  }
  compute = merged(std::move(compute));
  comm = merged(std::move(comm));
  copies = merged(std::move(copies));
  result.compute_ns = length(compute);
  result.comm_ns = length(comm);
  result.comm_beside_ns = length(common(comm, compute));
  result.copy_ns = length(copies);
  result.copy_beside_ns = length(common(copies, compute));
  return result;
}

StepTimes step_times(const RankStep& step) {
  StepTimes times;
  times.overlap = step_overlap(step);
  for (const StepEvent& event : step.events) {
    const bool between_stages =
        event.action == StepAction::kReceive || event.action == StepAction::kSent;
    if (between_stages && !event.awaits.empty()) times.p2p_wait_ns += event.end_ns - event.start_ns;
  }
  const StepOverlap& all = times.overlap;
  times.bubble_ns = std::max<int64_t>(
      0, step.end_ns - step.start_ns - all.compute_ns - all.comm_wait_ns - all.copy_wait_ns);
  times.overlap.comm_wait_ns -= times.p2p_wait_ns;
  return times;
}

}  // namespace bagualu
