#include "bagualu/sim/run_log.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>

#include "bagualu/base/error.h"
#include "bagualu/provision/policy.h"

namespace bagualu {
namespace {

constexpr const char* kRunLog = "a run log, as `bagualu train --log` writes it";
// Far above any training, far below what sums of them would overflow.
constexpr int64_t kMostSteps = 1'000'000'000'000;
// Of `--slow-link`.
constexpr int64_t kMostLinkBytesPerS = 1'000'000'000'000'000;
constexpr int64_t kMostLatencyUs = 1'000'000;
constexpr size_t kMaxShownCharacters = 60;

[[noreturn]] void refuse(const std::string& where, const std::string& field, const Json& found,
                         const std::string& allowed) {
  std::string text =
      found.is_null() ? "nothing" : found.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kMaxShownCharacters) text = text.substr(0, kMaxShownCharacters) + "...";
  throw InvalidInput(where, field, text, allowed);
}

const Json& list_of(JsonReader& reader, const std::string& key, const std::string& allowed) {
  const Json& list = reader.raw(key);
  if (!list.is_array() || list.empty()) refuse(reader.where(), key, list, allowed);
  return list;
}

std::string item_name(const std::string& key, size_t at) { return fmt::format("{}[{}]", key, at); }

// A list within a list, which complaints call by its place.
std::vector<int64_t> bytes_or_rows(const Json& list, const std::string& name,
                                   const std::string& where) {
  Json named = Json::object();
  named[name] = list;
  return JsonReader(named, where).int64_list(name, 0);
}

std::vector<std::vector<LayerLoad>> read_loads(JsonReader& reader) {
  std::vector<std::vector<LayerLoad>> loads;
  const Json& list =
      list_of(reader, "loads", "a list by micro-batch and stage: rows, piece rows of every layer");
  for (const Json& entry : list) {
    const std::string name = item_name("loads", loads.size());
    const std::vector<int64_t> numbers = bytes_or_rows(entry, name, reader.where());
    if (numbers.size() % 2 != 0) {
      throw InvalidInput(reader.where(), name, std::to_string(numbers.size()) + " numbers",
                         "rows and piece rows of every layer");
    }
    std::vector<LayerLoad>& of = loads.emplace_back();
    for (size_t i = 0; i < numbers.size(); i += 2) of.push_back({numbers[i], numbers[i + 1]});
  }
  return loads;
}

std::vector<std::string> read_plans(JsonReader& reader) {
  std::vector<std::string> texts;
  for (const Json& text : list_of(reader, "plans", "a list of plans, at least one")) {
    if (!text.is_string()) {
      refuse(reader.where(), item_name("plans", texts.size()), text,
             "a text: a letter per unit, s, r, o or q");
    }
    texts.push_back(text.get<std::string>());
  }
  const std::vector<int64_t> plan_of =
      reader.int64_list("plan_of", 0, static_cast<int64_t>(texts.size()) - 1);
  std::vector<std::string> plans;
  for (const int64_t at : plan_of) plans.push_back(texts[static_cast<size_t>(at)]);
  return plans;
}

std::vector<PassLevel> read_passes(JsonReader& reader) {
  std::vector<PassLevel> passes;
  const std::string allowed = "[peak bytes, live bytes] of every pass";
  for (const Json& pass : list_of(reader, "pass_bytes", allowed)) {
    const std::string name = item_name("pass_bytes", passes.size());
    const std::vector<int64_t> bytes = bytes_or_rows(pass, name, reader.where());
    if (bytes.size() != 2) refuse(reader.where(), name, pass, "[peak bytes, live bytes]");
    passes.push_back({bytes[0], bytes[1]});
  }
  return passes;
}

LoggedRank read_rank(const Json& object, int64_t number, const std::string& where) {
  JsonReader reader(object, where);
  if (reader.int64("rank") != number) {
    refuse(where, "rank", reader.raw("rank"), fmt::format("{}: ranks come in their order", number));
  }
  if (!reader.has("loads") || !reader.has("pass_bytes")) {
    throw InvalidInput(where, "loads", "nothing",
                       "a log with the loads of every micro-batch, which `bagualu train` writes "
                       "since it writes \"start\" lines");
  }
  LoggedRank rank;
  rank.peak_bytes = reader.int64("peak_bytes", 0);
  rank.host_peak_bytes = reader.int64("host_peak_bytes", 0);
  rank.end_bytes = reader.int64("end_bytes", 0);
  rank.loads = read_loads(reader);
  rank.plans = read_plans(reader);
  rank.passes = read_passes(reader);
  rank.decision_ns = reader.int64_list("decision_ns", 0);
  rank.cache_hits = reader.int64("cache_hits", 0);
  rank.passes_ns = reader.int64("passes_ns", 1);
  rank.step_ns = reader.int64("step_ns", 1);
  return rank;
}

// The trainer's own defaults are no answer here: another policy or order would be replayed.
TrainingSetup read_options(const Json& logged, const ModelSpec& model, const std::string& where) {
  Json options = logged;
  options["rank"] = 0;
  JsonReader reader(options, where);
  for (const char* key :
       {"pp_size", "virtual_per_rank", "stage_layers", "pipeline", "overlap", "policy",
        "policy_args", "budget_bytes", "host_budget_bytes", "chunk_rows", "allow_quantise"}) {
    if (!reader.has(key)) {
      throw InvalidInput(where, key, "nothing", "what the trainer got: its log always says");
    }
  }
  reader.int64("link_bytes_per_s", 0, kMostLinkBytesPerS);
  reader.int64("link_latency_us", 0, kMostLatencyUs);
  const TrainingSetup setup = read_training_setup(reader);
  const std::vector<std::string>& policies = policy_names();
  if (std::find(policies.begin(), policies.end(), setup.policy) == policies.end()) {
    refuse(where, "policy", setup.policy, fmt::format("{}", fmt::join(policies, ", ")));
  }
  validate(model, setup.shape, setup.layout, where);
  return setup;
}

LoggedStart read_start(const Json& object, const LoggedRun& run, const std::string& where) {
  JsonReader reader(object, where);
  LoggedStart start;
  start.first_step = reader.int64("first_step", 0, kMostSteps);
  for (const LoggedStart& earlier : run.starts) {
    if (earlier.steps.empty() || earlier.steps.back().step < start.first_step) continue;
    throw InvalidInput(where, "first_step", std::to_string(start.first_step),
                       fmt::format("above step {} before it: a resumed run drops what it will "
                                   "write again",
                                   earlier.steps.back().step));
  }
  start.setup = read_options(reader.object("options"), run.model, where + ".options");
  const std::vector<int64_t> scratch = reader.int64_list("attention_scratch_bytes", 0);
  if (scratch.size() != 2) {
    throw InvalidInput(where, "attention_scratch_bytes", std::to_string(scratch.size()), "two");
  }
  start.scratch = {scratch[0], scratch[1]};
  for (const Json& profile : list_of(reader, "profiles", "a list of profiles, at least one")) {
    start.profiles.push_back(profile);
  }
  for (const int64_t at :
       reader.int64_list("profile_of", 0, static_cast<int64_t>(start.profiles.size()) - 1)) {
    start.profile_of.push_back(static_cast<int>(at));
  }
  start.live_bytes = reader.int64_list("live_bytes", 0);
  const auto world = static_cast<size_t>(start.setup.layout.world_size);
  if (start.profile_of.size() != world || start.live_bytes.size() != world) {
    throw InvalidInput(
        where, "profile_of, live_bytes",
        fmt::format("{}, {} ranks", start.profile_of.size(), start.live_bytes.size()),
        std::to_string(world));
  }
  return start;
}

LoggedStep read_step(const Json& object, const LoggedStart& start, const std::string& where) {
  JsonReader reader(object, where);
  const TrainingSetup& setup = start.setup;
  LoggedStep step;
  step.step = reader.int64("step", 0);
  const int64_t next = start.steps.empty() ? start.first_step : start.steps.back().step + 1;
  if (step.step != next) {
    throw InvalidInput(where, "step", std::to_string(step.step),
                       fmt::format("{}: a start's steps follow one another", next));
  }
  step.step_ns = reader.int64("step_ns", 1);
  step.repeated = reader.boolean_or("repeated", false);
  step.spike = reader.boolean_or("spike", false);
  for (const Json& rank : list_of(reader, "ranks", "a list of ranks")) {
    const auto number = static_cast<int64_t>(step.ranks.size());
    step.ranks.push_back(
        read_rank(rank, number, where + "." + item_name("ranks", step.ranks.size())));
  }
  const auto entries =
      static_cast<size_t>(setup.shape.microbatches * setup.layout.stages_per_rank());
  if (static_cast<int64_t>(step.ranks.size()) != setup.layout.world_size) {
    throw InvalidInput(where, "ranks", std::to_string(step.ranks.size()),
                       std::to_string(setup.layout.world_size));
  }
  for (const LoggedRank& rank : step.ranks) {
    if (rank.loads.size() == entries && rank.plans.size() == entries) continue;
    throw InvalidInput(where, "loads", std::to_string(rank.loads.size()),
                       std::to_string(entries) + ": one of every micro-batch and stage");
  }
  return step;
}

void read_memory(const Json& object, LoggedStart& start, const std::string& where) {
  JsonReader reader(object, where);
  const int64_t of = reader.int64("step");
  if (start.steps.empty() || start.steps.back().step != of) return;
  LoggedStep& step = start.steps.back();
  step.memory_rank =
      static_cast<int>(reader.int64("rank", 0, static_cast<int64_t>(step.ranks.size()) - 1));
  const std::string allowed = "[ns, live bytes, action] of every action";
  for (const Json& point : list_of(reader, "points", allowed)) {
    if (!point.is_array() || point.size() != 3 || !point[1].is_number_integer() ||
        !point[2].is_string()) {
      refuse(where, item_name("points", step.memory.size()), point, allowed);
    }
    step.memory.push_back({point[1].get<int64_t>(), point[2].get<std::string>()});
  }
}

void read_line(const Json& object, const std::string& where, LoggedRun& run) {
  JsonReader reader(object, where);
  const std::string type = reader.string("type");
  if (type == "run") {
    throw InvalidInput(where, "type", "a second \"run\"", "the log of one run");
  } else if (type == "start") {
    run.starts.push_back(read_start(object, run, where));
  } else if (run.starts.empty()) {
    if (type != "step") return;
    throw InvalidInput(where, "type", "step before any \"start\"",
                       "a log of a `bagualu train` that writes \"start\" lines");
  } else if (type == "step") {
    LoggedStart& start = run.starts.back();
    start.steps.push_back(read_step(object, start, where));
  } else if (type == "memory") {
    read_memory(object, run.starts.back(), where);
  }
}

void read_first_line(const Json& object, const std::string& where, LoggedRun& run) {
  JsonReader reader(object, where);
  const Json& type = reader.raw("type");
  if (type != Json("run")) refuse(where, "type", type, fmt::format("\"run\": {}", kRunLog));
  reader.int64("version", 1, 1);
  run.model = model_from_json(reader.object("model"), where + ".model");
}

}  // namespace

LoggedRun read_run_log(const std::filesystem::path& path) {
  std::error_code status;
  if (std::filesystem::is_directory(path, status)) {
    throw InvalidInput(path.string(), "file", "a folder", kRunLog);
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InvalidInput(path.string(), "file", "nothing readable", kRunLog);
  LoggedRun run;
  std::string line;
  bool begun = false;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = fmt::format("{}:{}", path.string(), number);
    if (!Json::accept(line)) {
      if (!begun) throw InvalidInput(path.string(), "file", "no JSON lines", kRunLog);
      if (file.peek() == std::ifstream::traits_type::eof()) break;  // a kill tore it
      throw InvalidInput(where, "line", "no JSON", "a JSON object: only a last line may be torn");
    }
    const Json object = parse_json_object(line, where);
    begun ? read_line(object, where, run) : read_first_line(object, where, run);
    begun = true;
  }
  if (!begun) throw InvalidInput(path.string(), "file", "nothing", kRunLog);
  size_t steps = 0;
  for (const LoggedStart& start : run.starts) steps += start.steps.size();
  if (steps == 0) {
    throw InvalidInput(path.string(), "steps", "none", "a run log with at least one step");
  }
  return run;
}

}  // namespace bagualu
