#include "bagualu/sim/run_log.h"

#include <fmt/format.h>

#include <fstream>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

// One object of the log; what is asked for and absent is named with its line.
std::vector<std::vector<LayerLoad>> read_loads(const Json& list, const std::string& where) {
  std::vector<std::vector<LayerLoad>> loads;
  for (const Json& entry : list) {
    const auto numbers = entry.get<std::vector<int64_t>>();
    if (numbers.size() % 2 != 0) {
      throw InvalidInput(where, "loads", std::to_string(numbers.size()) + " numbers",
                         "rows and piece rows of every layer");
    }
    std::vector<LayerLoad>& of = loads.emplace_back();
    for (size_t i = 0; i < numbers.size(); i += 2) of.push_back({numbers[i], numbers[i + 1]});
  }
  return loads;
}

std::vector<std::string> read_plans(JsonReader& reader) {
  const auto texts = reader.raw("plans").get<std::vector<std::string>>();
  const std::vector<int64_t> plan_of =
      reader.int64_list("plan_of", 0, static_cast<int64_t>(texts.size()) - 1);
  std::vector<std::string> plans;
  for (const int64_t at : plan_of) plans.push_back(texts[static_cast<size_t>(at)]);
  return plans;
}

LoggedRank read_rank(const Json& object, const std::string& where) {
  JsonReader reader(object, where);
  if (!reader.has("loads") || !reader.has("pass_bytes")) {
    throw InvalidInput(where, "loads", "nothing",
                       "a log with the loads of every micro-batch, which `bagualu train` writes "
                       "since it writes \"start\" lines");
  }
  LoggedRank rank;
  rank.peak_bytes = reader.int64("peak_bytes");
  rank.host_peak_bytes = reader.int64("host_peak_bytes");
  rank.end_bytes = reader.int64("end_bytes");
  rank.loads = read_loads(reader.raw("loads"), where);
  rank.plans = read_plans(reader);
  for (const Json& pass : reader.raw("pass_bytes")) {
    rank.passes.push_back({pass.at(0).get<int64_t>(), pass.at(1).get<int64_t>()});
  }
  rank.decision_ns = reader.int64_list_or("decision_ns", {});
  rank.cache_hits = reader.int64_or("cache_hits", 0);
  rank.passes_ns = reader.int64("passes_ns", 0);
  rank.step_ns = reader.int64("step_ns", 0);
  return rank;
}

LoggedStart read_start(const Json& object, const std::string& where) {
  JsonReader reader(object, where);
  LoggedStart start;
  Json options = reader.object("options");
  options["rank"] = 0;
  JsonReader setup(options, where + ".options");
  start.setup = read_training_setup(setup);
  const std::vector<int64_t> scratch = reader.int64_list("attention_scratch_bytes", 0);
  if (scratch.size() != 2) {
    throw InvalidInput(where, "attention_scratch_bytes", std::to_string(scratch.size()), "two");
  }
  start.scratch = {scratch[0], scratch[1]};
  for (const Json& profile : reader.raw("profiles")) start.profiles.push_back(profile);
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

LoggedStep read_step(const Json& object, const TrainingSetup& setup, const std::string& where) {
  JsonReader reader(object, where);
  LoggedStep step;
  step.step = reader.int64("step", 0);
  step.step_ns = reader.int64("step_ns", 0);
  step.repeated = reader.boolean_or("repeated", false);
  step.spike = reader.boolean_or("spike", false);
  for (const Json& rank : reader.raw("ranks")) {
    step.ranks.push_back(read_rank(rank, where + ".ranks"));
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
  for (const Json& point : reader.raw("points")) {
    step.memory.push_back({point.at(1).get<int64_t>(), point.at(2).get<std::string>()});
  }
}

void read_line(const Json& object, const std::string& where, LoggedRun& run) {
  const std::string type = object.value("type", std::string());
  if (type == "run") {
    run.model = model_from_json(object.at("model"), where + ".model");
  } else if (type == "start") {
    run.starts.push_back(read_start(object, where));
  } else if (run.starts.empty()) {
    if (type != "step") return;
    throw InvalidInput(where, "type", "step before any \"start\"",
                       "a log of a `bagualu train` that writes \"start\" lines");
  } else if (type == "step") {
    LoggedStart& start = run.starts.back();
    start.steps.push_back(read_step(object, start.setup, where));
  } else if (type == "memory") {
    read_memory(object, run.starts.back(), where);
  }
}

}  // namespace

LoggedRun read_run_log(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) throw InvalidInput(path.string(), "file", "nothing readable", "a run log");
  LoggedRun run;
  std::string line;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    const Json object = Json::parse(line, nullptr, false);
    if (!object.is_object()) continue;  // a kill tore it
    const std::string where = fmt::format("{}:{}", path.string(), number);
    try {
      read_line(object, where, run);
    } catch (const Json::exception& error) {
      throw InvalidInput(where, "line", error.what(), "a line of docs/formats.md, Run log");
    }
  }
  size_t steps = 0;
  for (const LoggedStart& start : run.starts) steps += start.steps.size();
  if (steps == 0) {
    throw InvalidInput(path.string(), "steps", "none", "a run log with at least one step");
  }
  return run;
}

}  // namespace bagualu
