#include "bagualu/schedule/memory_snapshot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr std::array<const char*, 7> kBuckets = {"parameters",  "gradients", "optimizer", "static",
                                                 "activations", "peak",      "reserved"};
constexpr int64_t kMaxRanks = int64_t{1} << 20;
constexpr int64_t kMaxBytes = int64_t{1} << 50;

RankSnapshot read_plain_rank(const Json& object, const std::string& where) {
  JsonReader reader(object, where);
  RankSnapshot rank;
  rank.rank = reader.int64("rank", 0, kMaxRanks);
  for (const char* bucket : kBuckets) {
    const std::string key = std::string(bucket) + "_bytes";
    if (reader.has(key)) rank.bucket_bytes[bucket] = reader.int64(key, 1, kMaxBytes);
  }
  reader.finish();
  return rank;
}

std::vector<RankSnapshot> read_plain(const Json& object, const std::string& where) {
  JsonReader reader(object, where);
  reader.string("format");
  reader.int64("version", 1, 1);
  reader.string_or("source", "");
  const Json& list = reader.raw("ranks");
  if (!list.is_array()) throw InvalidInput(where, "ranks", list.dump(), "a list");
  reader.finish();
  std::vector<RankSnapshot> ranks;
  for (const Json& rank : list) {
    const std::string at = fmt::format("{}.ranks[{}]", where, ranks.size());
    if (!rank.is_object()) throw InvalidInput(at, "", rank.dump(), "an object");
    ranks.push_back(read_plain_rank(rank, at));
  }
  return ranks;
}

std::optional<int64_t> bytes_at(const Json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end()) return std::nullopt;
  if (!found->is_number_integer() || *found < 0 || *found > kMaxBytes) {
    throw InvalidInput(where, key, found->dump(), "bytes");
  }
  return found->get<int64_t>();
}

RankSnapshot read_stats(const Json& stats, int64_t rank, const std::string& where) {
  RankSnapshot snapshot{.rank = rank, .bucket_bytes = {}};
  const auto take = [&](const char* key, const char* bucket) {
    const std::optional<int64_t> bytes = bytes_at(stats, key, where);
    if (bytes && *bytes > 0) snapshot.bucket_bytes[bucket] = *bytes;
  };
  take("allocated_bytes.all.current", "static");
  take("allocated_bytes.all.peak", "peak");
  take("reserved_bytes.all.peak", "reserved");
  if (!snapshot.bucket_bytes.contains("peak")) {
    throw InvalidInput(where, "allocated_bytes.all.peak", "nothing", "bytes");
  }
  return snapshot;
}

bool is_stats(const Json& object) {
  return object.is_object() && object.contains("allocated_bytes.all.peak");
}

int64_t number(const Json& object, const char* key, const std::string& where) {
  const std::optional<int64_t> bytes = bytes_at(object, key, where);
  if (!bytes) throw InvalidInput(where, key, "nothing", "bytes");
  return *bytes;
}

const Json& list_at(const Json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_array()) {
    throw InvalidInput(where, key, found == object.end() ? "nothing" : "no list", "a list");
  }
  return *found;
}

/// Largest number of bytes alive in the history, which ends with `now` of them.
int64_t peak_of_history(const Json& events, int64_t now, const std::string& where) {
  int64_t alive = now, peak = now;
  for (size_t i = events.size(); i-- > 0;) {
    const Json& event = events[i];
    if (!event.is_object() || !event.contains("action")) continue;
    const std::string action = event["action"].is_string() ? event["action"] : "";
    if (action == "alloc") alive -= number(event, "size", where);
    if (action == "free_completed") alive += number(event, "size", where);
    peak = std::max(peak, alive);
  }
  return peak;
}

/// Allocations are told apart by the code that made them, where stacks were recorded.
const char* bucket_of_block(const Json& block) {
  const auto frames = block.find("frames");
  if (frames == block.end() || !frames->is_array()) return nullptr;
  for (const Json& frame : *frames) {
    if (!frame.is_object()) continue;
    const std::string text = frame.value("filename", "") + ":" + frame.value("name", "");
    const auto has = [&](std::string_view part) { return text.find(part) != std::string::npos; };
    if (has("grad_data") || has("main_grad")) return "gradients";
    if (has("optim") || has("adam")) return "optimizer";
    if (has("param_data") || has("reset_parameters") || has("_initialize_affine_weight")) {
      return "parameters";
    }
  }
  return nullptr;
}

RankSnapshot read_blocks(const Json& object, const std::string& where) {
  RankSnapshot snapshot;
  int64_t live = 0, reserved = 0;
  for (const Json& segment : list_at(object, "segments", where)) {
    reserved += number(segment, "total_size", where + ".segments");
    for (const Json& block : list_at(segment, "blocks", where + ".segments")) {
      if (block.value("state", "") != "active_allocated") continue;
      const int64_t size = number(block, "size", where + ".segments.blocks");
      live += size;
      if (const char* bucket = bucket_of_block(block)) snapshot.bucket_bytes[bucket] += size;
    }
  }
  if (live == 0) throw InvalidInput(where, "segments", "no live block", "a snapshot of a job");
  snapshot.bucket_bytes["static"] = live;
  snapshot.bucket_bytes["reserved"] = reserved;
  const auto traces = object.find("device_traces");
  if (traces != object.end() && traces->is_array()) {
    for (const Json& events : *traces) {
      if (!events.is_array() || events.empty()) continue;
      snapshot.bucket_bytes["peak"] = peak_of_history(events, live, where + ".device_traces");
    }
  }
  return snapshot;
}

std::vector<RankSnapshot> read_any(const Json& object, const std::string& where) {
  if (object.contains("format")) {
    const std::string format = object["format"].is_string() ? object["format"] : "no text";
    if (format != "bagualu.memory_snapshot") {
      throw InvalidInput(where, "format", format, "bagualu.memory_snapshot");
    }
    return read_plain(object, where);
  }
  if (object.contains("segments")) return {read_blocks(object, where)};
  if (is_stats(object)) return {read_stats(object, 0, where)};
  std::vector<RankSnapshot> ranks;
  for (const auto& [key, stats] : object.items()) {
    const bool digits =
        !key.empty() && key.size() <= 7 &&
        std::all_of(key.begin(), key.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (!digits || !is_stats(stats)) {
      throw InvalidInput(where, key, stats.is_object() ? "an object" : stats.dump(),
                         "ranks with torch.cuda.memory_stats(), segments of "
                         "torch.cuda.memory._snapshot(), or bagualu.memory_snapshot");
    }
    ranks.push_back(read_stats(stats, std::stoll(key), where + "." + key));
  }
  return ranks;
}

/// "parameters.dense" and the like, summed into the buckets of a snapshot.
std::map<std::string, int64_t> predicted_buckets(const RankMemory& memory) {
  std::map<std::string, int64_t> buckets;
  for (const KindBytes& kind : memory.by_kind) {
    const std::string name = kind.kind.substr(0, kind.kind.find('.'));
    const bool of_optimizer =
        name == "masters" || name == "exp_avg" || name == "exp_avg_sq" || name == "main_gradients";
    buckets[of_optimizer ? "optimizer" : name] += kind.bytes;
  }
  buckets["activations"] = memory.peak_bytes - memory.static_bytes;
  buckets["static"] = memory.static_bytes;
  buckets["peak"] = memory.peak_bytes;
  buckets["reserved"] = memory.reserved_bytes;
  return buckets;
}

}  // namespace

std::vector<RankSnapshot> memory_snapshot_from_json(const Json& object, const std::string& where) {
  std::vector<RankSnapshot> ranks = read_any(object, where);
  for (RankSnapshot& rank : ranks) {
    auto& buckets = rank.bucket_bytes;
    const bool both = buckets.contains("peak") && buckets.contains("static");
    if (both && !buckets.contains("activations") && buckets["peak"] > buckets["static"]) {
      buckets["activations"] = buckets["peak"] - buckets["static"];
    }
  }
  if (ranks.empty()) throw InvalidInput(where, "ranks", "none", "one or more");
  return ranks;
}

std::vector<RankSnapshot> memory_snapshot_from_file(const std::filesystem::path& path) {
  return memory_snapshot_from_json(read_json_file(path), path.string());
}

std::vector<BucketComparison> compare_memory(const std::vector<RankSnapshot>& snapshot,
                                             const Job& job, const RoutedLoads& loads,
                                             const std::string& where) {
  const JobMemory memory(job);
  const int64_t ranks_of_stage = job.layout.world_size / job.layout.pp;
  std::map<int64_t, std::map<std::string, int64_t>> predicted;  // by pipeline rank
  std::vector<BucketComparison> comparisons;
  for (const RankSnapshot& rank : snapshot) {
    if (rank.rank >= job.layout.world_size) {
      throw InvalidInput(where, "rank", fmt::format("{}", rank.rank),
                         fmt::format("below the job's {} ranks", job.layout.world_size));
    }
    const int64_t pp_rank = rank.rank / ranks_of_stage;
    if (!predicted.contains(pp_rank)) {
      predicted[pp_rank] = predicted_buckets(memory.describe(pp_rank, loads));
    }
    for (const char* bucket : kBuckets) {
      const auto measured = rank.bucket_bytes.find(bucket);
      if (measured == rank.bucket_bytes.end()) continue;
      comparisons.push_back(
          {rank.rank, pp_rank, bucket, measured->second, predicted[pp_rank][bucket]});
    }
  }
  return comparisons;
}

}  // namespace bagualu
