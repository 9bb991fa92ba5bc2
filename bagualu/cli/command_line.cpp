#include "bagualu/cli/command_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <string_view>

#include "bagualu/base/error.h"
#include "bagualu/cli/calibrate_command.h"
#include "bagualu/cli/plan_command.h"
#include "bagualu/cli/python_command.h"
#include "bagualu/cli/schedule_command.h"
#include "bagualu/cli/simulate_command.h"
#include "bagualu/cli/simulate_validate.h"
#include "bagualu/cli/source_tree.h"
#include "bagualu/cli/trace_command.h"

namespace bagualu {
namespace {

using Arguments = std::vector<std::string>;

struct Subcommand {
  std::string_view name;
  std::string_view summary;
  int (*run)(std::string_view name, const Arguments& arguments, const Streams& streams);
};

int run_plan_command(std::string_view, const Arguments& arguments, const Streams& streams) {
  return run_plan(arguments, find_source_tree(), streams);
}

int run_trace_command(std::string_view, const Arguments& arguments, const Streams& streams) {
  return run_trace(arguments, streams);
}

int run_schedule_command(std::string_view, const Arguments& arguments, const Streams& streams) {
  return run_schedule(arguments, streams);
}

int run_simulate_command(std::string_view, const Arguments& arguments, const Streams& streams) {
  if (asks_for_validation(arguments)) return run_simulate_validate(arguments, streams);
  return run_simulate(arguments, find_source_tree(), make_simulator(), streams);
}

int run_calibrate_command(std::string_view, const Arguments& arguments, const Streams& streams) {
  return run_calibrate(arguments, find_source_tree(), streams);
}

/// Commands that start ranks or load a model go through one launcher, which checks their input.
int run_launcher(std::string_view name, const Arguments& arguments, const Streams&) {
  Arguments all = {std::string(name)};
  all.insert(all.end(), arguments.begin(), arguments.end());
  exec_python(python_invocation(find_source_tree(), BAGUALU_PYTHON, "bagualu.launch", all));
}

/// The report asks this program to replay step traces.
int run_report(std::string_view, const Arguments& arguments, const Streams&) {
  const SourceTree tree = find_source_tree();
  Arguments all = {"--program", tree.program.string()};
  all.insert(all.end(), arguments.begin(), arguments.end());
  exec_python(python_invocation(tree, BAGUALU_PYTHON, "bagualu.report", all));
}

constexpr std::array<Subcommand, 9> kSubcommands = {{
    {"plan", "memory of one rank: static bytes, activations, peak, floor, what it survives",
     run_plan_command},
    {"trace", "routing logs to one format, with statistics of the imbalance", run_trace_command},
    {"schedule", "order of a pipeline's passes: drawing, activations in flight, bubbles",
     run_schedule_command},
    {"simulate",
     "a job on a cluster under several policies: throughput, memory, restarts; a real run again",
     run_simulate_command},
    {"calibrate", "fit a machine's efficiencies to measured jobs, compare memory snapshots",
     run_calibrate_command},
    {"train", "train a model under a memory budget, on one or more ranks", run_launcher},
    {"profile", "measure operator times of this machine and keep them for train and plan",
     run_launcher},
    {"report", "turn a run log into one HTML page or a Perfetto trace", run_report},
    {"generate", "continue a text with the model of a checkpoint", run_launcher},
}};

void print_help(std::ostream& out) {
  out << "bagualu: train mixture-of-experts models under a hard memory budget, through routing "
         "spikes\n\nusage: bagualu COMMAND [FLAGS]\n\n";
  for (const Subcommand& command : kSubcommands) {
    out << fmt::format("  {:<10}{}\n", command.name, command.summary);
  }
  out << "\n  bagualu COMMAND --help   flags of a command, with units and defaults\n"
         "  bagualu --version        version of this program\n\n"
         "Sizes: KiB, MiB, GiB = 2^10, 2^20, 2^30 bytes; KB, MB, GB = powers of 1000.\n"
         "Exit codes: 0 done; 1 the job failed; 2 bad input; 3 infeasible (says the missing "
         "bytes).\n";
}

std::string known_commands() {
  std::string names;
  for (const Subcommand& command : kSubcommands) names += std::string(command.name) + ", ";
  return names + "--help, --version";
}

int dispatch(const Arguments& arguments, const Streams& streams) {
  if (arguments.empty()) throw InvalidInput("bagualu", "command", "nothing", known_commands());
  const std::string& name = arguments.front();
  if (name == "--version") {
    streams.out << "bagualu " BAGUALU_VERSION "\n";
    return kExitDone;
  }
  if (name == "--help" || name == "-h" || name == "help") {
    print_help(streams.out);
    return kExitDone;
  }
  const auto command = std::find_if(kSubcommands.begin(), kSubcommands.end(),
                                    [&](const Subcommand& c) { return c.name == name; });
  if (command == kSubcommands.end()) {
    throw InvalidInput("bagualu", "command", name, known_commands());
  }
  const Arguments rest(arguments.begin() + 1, arguments.end());
  return command->run(command->name, rest, streams);
}

/// "bagualu plan: what", unless the message already begins with the program's name.
void complain(const Arguments& arguments, const char* what, std::ostream& err) {
  std::string line(what);
  std::replace(line.begin(), line.end(), '\n', ' ');
  const bool subcommand = !arguments.empty() && arguments.front().rfind('-', 0) != 0;
  const std::string program = subcommand ? "bagualu " + arguments.front() : "bagualu";
  if (line.rfind("bagualu", 0) != 0) line = program + ": " + line;
  err << line << '\n';
}

}  // namespace

int run(const Arguments& arguments, const Streams& streams) {
  try {
    return dispatch(arguments, streams);
  } catch (const InvalidInput& error) {
    complain(arguments, error.what(), streams.err);
    return kExitBadInput;
  } catch (const std::exception& error) {
    complain(arguments, error.what(), streams.err);
    return kExitFailed;
  }
}

}  // namespace bagualu
