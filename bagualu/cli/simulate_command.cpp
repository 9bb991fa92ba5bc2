#include "bagualu/cli/simulate_command.h"

#include "bagualu/base/error.h"
#include "bagualu/cli/flags.h"
#include "bagualu/cli/simulate_validate.h"

namespace bagualu {

int run_simulate(const std::vector<std::string>& arguments, const Streams& streams) {
  const std::string where = "bagualu simulate";
  CLI::App app("Simulates a job, or a real run again.", where);
  std::string log, json;
  bool quiet = false;
  app.add_option("--validate", log, "run log of `bagualu train`: compare it with its simulation");
  app.add_option("--json", json, "FILE|-: one object in place of the table");
  app.add_flag("--quiet", quiet, "no progress");
  if (!parse_flags(&app, arguments, where, streams)) return kExitDone;
  if (log.empty()) throw InvalidInput(where, "--validate", "nothing", "a run log");
  return run_simulate_validate(log, json, quiet, streams);
}

}  // namespace bagualu
