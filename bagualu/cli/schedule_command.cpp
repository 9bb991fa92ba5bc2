#include "bagualu/cli/schedule_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "bagualu/base/atomic_file.h"
#include "bagualu/base/error.h"
#include "bagualu/base/json.h"
#include "bagualu/cli/flags.h"
#include "bagualu/cli/schedule_replay.h"
#include "bagualu/schedule/overlap_order.h"
#include "bagualu/schedule/pipeline_fit.h"
#include "bagualu/schedule/pipeline_text.h"

namespace bagualu {
namespace {

constexpr const char* kWhere = "bagualu schedule";
// 3 passes of that many are drawn and simulated in a few seconds.
constexpr int64_t kMaxVisits = int64_t{1} << 20;
constexpr int64_t kMaxNs = int64_t{1} << 40;

/// The flags as they were typed; texts, so that every complaint has the same form.
struct ScheduleFlags {
  std::string order = "1f1b";
  std::string read;
  std::string pp = "4";
  std::string microbatches;
  std::string virtual_per_rank = "2";
  std::string times = "1,1,1";
  std::string send = "0";
  std::string stage_times;
  std::string slot = "70";
  std::string columns = "100";
  std::string svg;
  std::string json;
  std::vector<std::string> replay;
  bool overlap = false;
  bool fit = false;
  bool text = false;
};

void add_flags(CLI::App* app, ScheduleFlags* flags) {
  const auto add = [&](const char* name, std::string* value, const char* type, const char* help) {
    const std::string shown = value->empty() ? "" : fmt::format(" [{}]", *value);
    return app->add_option(name, *value, help + shown)->type_name(type);
  };
  add("--order", &flags->order, "NAME",
      "1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, dualpipe, dualpipe-v");
  add("--read", &flags->read, "FILE", "take the order from a file that --text has written instead");
  add("--pp", &flags->pp, "RANKS", "pipeline ranks");
  add("--micro-batches", &flags->microbatches, "COUNT", "per step [2 * pp]");
  add("--virtual", &flags->virtual_per_rank, "STAGES",
      "virtual stages of a rank, interleaved only");
  add("--times", &flags->times, "F,B|F,I,W",
      "ns of a forward and a backward, or of forward, input and weight gradient, per virtual "
      "stage; "
      "a split order takes half of B for each gradient");
  add("--send", &flags->send, "NS", "from a pass to its neighbour stage on another rank");
  add("--stage-times", &flags->stage_times, "FILE",
      "one line F,B or F,I,W per virtual stage instead of --times");
  app->add_flag("--overlap", flags->overlap,
                "run a forward and a backward of two micro-batches as one where the order can");
  add("--slot", &flags->slot, "PERCENT", "what two such passes take, of both one after the other");
  app->add_flag("--fit", flags->fit,
                "look for a better order for these times (zb-h1, zb-h2, zb-v, v-half)");
  add("--columns", &flags->columns, "COUNT", "width of the drawing");
  app->add_flag("--text", flags->text, "print the order only, as --read takes it");
  add("--svg", &flags->svg, "FILE", "write the drawing as SVG");
  add("--json", &flags->json, "FILE|-", "write the figures as JSON; with - instead of the drawing");
  app->add_option("--replay", flags->replay,
                  "step traces of all ranks of a run (train --trace-step): each step as it was "
                  "executed and as its lists predict it; goes with --json alone")
      ->type_name("FILE...");
}

/// "F,B" or "F,I,W".
PassTimes parse_times(const std::string& text, const std::string& where, const std::string& flag) {
  std::vector<int64_t> values;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    values.push_back(parse_int_flag(text.substr(begin, end - begin), where, flag, 0, kMaxNs));
    begin = end + 1;
  }
  if (values.size() == 2) return {values[0], values[1] - values[1] / 2, values[1] / 2, 0};
  if (values.size() == 3) return {values[0], values[1], values[2], 0};
  throw InvalidInput(where, flag, fmt::format("\"{}\"", text), "two or three numbers, as 10,20");
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path)) {
    throw InvalidInput(path, "file", "nothing that can be read", "a text file");
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

PipelineTimes read_stage_times(const std::string& path, const PipelineOrder& order) {
  std::string text = read_text(path);
  PipelineTimes times = equal_times(order, PassTimes{});
  size_t stage = 0;
  while (!text.empty()) {
    const std::string line = text.substr(0, text.find('\n'));
    text.erase(0, std::min(line.size() + 1, text.size()));
    if (stage == times.forward_ns.size()) {
      throw InvalidInput(path, fmt::format("line {}", stage + 1), fmt::format("\"{}\"", line),
                         fmt::format("{} lines, one per virtual stage", stage));
    }
    const PassTimes at = parse_times(line, path, fmt::format("line {}", stage + 1));
    const size_t count = times.forward_ns[stage].size();
    times.forward_ns[stage].assign(count, at.forward_ns);
    times.backward_ns[stage].assign(count, at.input_grad_ns + at.weight_grad_ns);
    times.weight_grad_ns[stage].assign(count, at.weight_grad_ns);
    ++stage;
  }
  if (stage < times.forward_ns.size()) {
    throw InvalidInput(path, "lines", std::to_string(stage),
                       fmt::format("{}, one per virtual stage", times.forward_ns.size()));
  }
  return times;
}

struct Schedule {
  std::string name;
  OverlapOrder order;
  PipelineTimes times;
  PipelineRun run;
};

void check_size(const PipelineOrder& order) {
  if (int64_t{order.stages} * order.microbatches <= kMaxVisits) return;
  throw InvalidInput(kWhere, "--micro-batches", std::to_string(order.microbatches),
                     fmt::format("at most {} stages times micro-batches", kMaxVisits));
}

Schedule make_schedule(const ScheduleFlags& flags) {
  Schedule result;
  result.name = flags.order;
  const PipelineKind kind = parse_pipeline_kind(flags.order, kWhere, "--order");
  const auto count = [](const std::string& text, const char* flag) {
    return static_cast<int>(parse_int_flag(text, kWhere, flag, 1, 1 << 16));
  };
  const int pp = count(flags.pp, "--pp");
  const int microbatches =
      flags.microbatches.empty() ? 2 * pp : count(flags.microbatches, "--micro-batches");
  const int virtual_per_rank = count(flags.virtual_per_rank, "--virtual");
  if (flags.read.empty()) {
    PipelineOrder size;
    size.stages = pp * (kind == PipelineKind::kInterleaved ? virtual_per_rank : 2);
    size.microbatches = microbatches;
    check_size(size);
    if (!flags.overlap) check_order_shape(kind, pp, virtual_per_rank, microbatches, kWhere);
    check_overlap_shape(kind, pp, virtual_per_rank, microbatches, flags.overlap, kWhere);
    result.order = make_overlap_order(kind, pp, virtual_per_rank, microbatches, flags.overlap);
  } else {
    result.name = flags.read;
    result.order = parse_overlap_order(read_text(flags.read), flags.read);
    check_size(result.order.order);
    if (const auto fault = order_fault(result.order)) {
      throw InvalidInput(flags.read, "order", *fault, "an order that every pass can run in");
    }
    if (flags.fit) throw InvalidInput(kWhere, "--fit", "with --read", "an order's name");
    if (flags.overlap) throw InvalidInput(kWhere, "--overlap", "with --read", "an order's name");
  }
  const int64_t send_ns = parse_int_flag(flags.send, kWhere, "--send", 0, kMaxNs);
  const PipelineOrder& passes = result.order.order;
  result.times = flags.stage_times.empty()
                     ? equal_times(passes, parse_times(flags.times, kWhere, "--times"))
                     : read_stage_times(flags.stage_times, passes);
  result.times.send_ns = send_ns;
  if (flags.fit) {
    if (flags.overlap) throw InvalidInput(kWhere, "--fit", "with --overlap", "one of the two");
    result.order =
        without_slots(fitted_order(kind, pp, virtual_per_rank, microbatches, result.times));
  }
  const int64_t percent = parse_int_flag(flags.slot, kWhere, "--slot", 0, 1000);
  result.run = simulate(result.order, result.times,
                        [percent](size_t, size_t, int64_t forward_ns, int64_t backward_ns) {
                          return (forward_ns + backward_ns) * percent / 100;
                        });
  return result;
}

bool has_slots(const OverlapOrder& order) {
  return std::any_of(order.fused.begin(), order.fused.end(), [](const auto& list) {
    return std::find(list.begin(), list.end(), true) != list.end();
  });
}

double share(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

Json to_json(const Schedule& at) {
  const int64_t longest = *std::max_element(at.run.span_ns.begin(), at.run.span_ns.end());
  Json ranks = Json::array();
  const std::vector<int> held = in_flight(at.order);
  for (size_t r = 0; r < at.order.order.ranks.size(); ++r) {
    const auto& list = at.order.order.ranks[r];
    Json passes = Json::array();
    for (size_t i = 0; i < list.size(); ++i) {
      passes.push_back({pass_text(list[i]), at.run.start_ns[r][i], at.run.end_ns[r][i]});
      if (at.order.fused[r][i]) passes.back().push_back("slot");
    }
    ranks.push_back({{"rank", r},
                     {"in_flight", held[r]},
                     {"bubble_ns", at.run.bubble_ns[r]},
                     {"span_ns", at.run.span_ns[r]},
                     {"passes", passes}});
  }
  return {{"order", at.name},
          {"virtual_stages", at.order.order.stages},
          {"micro_batches", at.order.order.microbatches},
          {"makespan_ns", at.run.makespan_ns},
          {"longest_span_ns", longest},
          {"ranks", ranks}};
}

void print_table(const Schedule& at, int columns, std::ostream& out) {
  out << draw_order(at.order, at.run, columns) << '\n'
      << "F B I W: forward, backward, input gradient, weight gradient of the rank's lowest virtual "
         "stage;\nf b i w: of its others. The number is the micro-batch.\n";
  if (has_slots(at.order)) {
    out << "Two in a row, or X: a forward and a backward that run as one.\n";
  }
  out << "\nrank  in flight  bubble ns   share\n";
  const std::vector<int> held = in_flight(at.order);
  for (size_t r = 0; r < at.order.fused.size(); ++r) {
    out << fmt::format("{:>4}  {:>9}  {:>9}  {:>5.1f}%\n", r, held[r], at.run.bubble_ns[r],
                       100 * share(at.run.bubble_ns[r], at.run.makespan_ns));
  }
  const int64_t longest = *std::max_element(at.run.span_ns.begin(), at.run.span_ns.end());
  out << fmt::format(
      "\n{}: {} ns a step; the busiest rank spans {} ns from its first pass to its last.\n"
      "In flight: activations of one micro-batch in one virtual stage, until the end of its "
      "backward.\n",
      at.name, at.run.makespan_ns, longest);
}

void check_replay_alone(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || name == "--replay" || name == "--json") continue;
    throw InvalidInput(kWhere, name, "with --replay", "--json alone beside --replay");
  }
}

int answer(const ScheduleFlags& flags, const Streams& streams) {
  const int columns =
      static_cast<int>(parse_int_flag(flags.columns, kWhere, "--columns", 1, 1 << 16));
  const Schedule schedule = make_schedule(flags);
  if (!flags.svg.empty()) {
    write_file_atomic(flags.svg, draw_order_svg(schedule.order, schedule.run));
  }
  if (!flags.json.empty() && flags.json != "-") {
    write_file_atomic(flags.json, to_json(schedule).dump(2) + "\n");
  }
  if (flags.json == "-") {
    streams.out << to_json(schedule).dump(2) << '\n';
  } else if (flags.text) {
    streams.out << order_text(schedule.order);
  } else {
    print_table(schedule, columns, streams.out);
  }
  return kExitDone;
}

}  // namespace

int run_schedule(const std::vector<std::string>& arguments, const Streams& streams) {
  CLI::App app(
      "Which pass a pipeline rank runs after which: drawing, activations in flight, bubbles.\n"
      "Defaults in [brackets].",
      kWhere);
  ScheduleFlags flags;
  add_flags(&app, &flags);
  if (!parse_flags(&app, arguments, kWhere, streams)) return kExitDone;
  if (flags.replay.empty()) return answer(flags, streams);
  check_replay_alone(app);
  return run_schedule_replay(flags.replay, flags.json, streams);
}

}  // namespace bagualu
