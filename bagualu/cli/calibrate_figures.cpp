#include "bagualu/cli/calibrate_figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/cli/flags.h"
#include "bagualu/provision/policy.h"
#include "bagualu/sim/scenario.h"

namespace bagualu {
namespace {

constexpr double kPerCent = 100;

double simulated_mfu(const FigureRequest& request, const SystemSpec& system,
                     const std::string& name, const PolicySimulator& simulator) {
  Scenario scenario = request.scenario;
  scenario.system = system;
  const SimPolicy policy =
      published_settings(name, scenario.job, scenario.system, scenario.budget_bytes);
  SimOptions options;
  options.iterations = request.iterations;
  options.series_limit = 0;
  const SimRun run = simulator(scenario, policy, options);
  if (run.mfu_calm_fraction > 0) return run.mfu_calm_fraction;
  throw InvalidInput(request.where, "--mfu", name,
                     fmt::format("a policy that can run the scenario {}", scenario.name));
}

}  // namespace

std::vector<PublishedFigure> parse_figures(const std::string& text, const std::string& where) {
  std::vector<PublishedFigure> figures;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const size_t equals = part.find('=');
    if (equals == std::string::npos) {
      throw InvalidInput(where, "--mfu", part, "POLICY=FRACTION, as static=0.3");
    }
    const std::string name = part.substr(0, equals);
    const std::vector<std::string>& known = policy_names();
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw InvalidInput(where, "--mfu", name, fmt::format("{}", fmt::join(known, ", ")));
    }
    if (std::any_of(figures.begin(), figures.end(),
                    [&](const PublishedFigure& one) { return one.name == name; })) {
      throw InvalidInput(where, "--mfu", fmt::format("\"{}\" twice", name), "each policy once");
    }
    figures.push_back(
        {name, parse_number_flag(part.substr(equals + 1), where, "--mfu", 0.001, 1), 0, 0});
    begin = end + 1;
  }
  return figures;
}

FigureFit fit_scenario_figures(const FigureRequest& request, const PolicySimulator& simulator) {
  const FigurePredictor predictor = [&](const SystemSpec& system) {
    std::vector<double> predicted;
    for (const PublishedFigure& figure : request.figures) {
      predicted.push_back(simulated_mfu(request, system, figure.name, simulator));
    }
    return predicted;
  };
  FigureFit fit =
      fit_figures(request.system, request.where, request.keys, request.figures, predictor);
  if (fit.system.contains("name")) {
    fit.system["name"] = fit.system["name"].get<std::string>() + "-fitted";
  }
  fit.system["fit"]["scenario"] = request.scenario.name;
  fit.system["fit"]["what"] =
      fmt::format("MFU of the iterations alone, {} simulated", request.iterations);
  return fit;
}

void print_figures(const FigureRequest& request, const FigureFit& fit, std::ostream& out) {
  out << fmt::format("scenario  {}, {} simulated iterations of each policy, {} simulations\n",
                     request.scenario.name, request.iterations,
                     fit.predictions * static_cast<int64_t>(fit.figures.size()));
  for (const FittedNumber& number : fit.numbers) {
    out << fmt::format("fitted    {} {:.6g}, was {:.6g}\n", number.key, number.after,
                       number.before);
  }
  out << fmt::format("\n  {:<20} {:>10} {:>10} {:>10}\n", "MFU", "published", "fitted", "no fit");
  for (const PublishedFigure& figure : fit.figures) {
    out << fmt::format("  {:<20} {:>8.2f} % {:>8.2f} % {:>8.2f} %\n", figure.name,
                       kPerCent * figure.value, kPerCent * figure.predicted,
                       kPerCent * figure.unfitted);
  }
  if (!fit.solved) {
    out << "\nno numbers within their bounds give these figures; this is nearest, and not "
           "written\n";
  }
}

Json figures_json(const FigureRequest& request, const FigureFit& fit) {
  return {{"format", "bagualu.calibration"},
          {"version", 1},
          {"scenario", request.scenario.name},
          {"solved", fit.solved},
          {"system", fit.system}};
}

}  // namespace bagualu
