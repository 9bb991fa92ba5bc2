// Table of `bagualu simulate`.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "bagualu/base/units.h"
#include "bagualu/cli/simulate_report.h"
#include "bagualu/model/parameters.h"

namespace bagualu {
namespace {

constexpr size_t kShortest = 12;  // of the first column

std::string count_text(int64_t parameters) {
  const double count = static_cast<double>(parameters);
  if (count < 1e9) return fmt::format("{:.2f} M", count / 1e6);
  return count < 1e12 ? fmt::format("{:.1f} B", count / 1e9)
                      : fmt::format("{:.3f} T", count / 1e12);
}

/// "12,345": digits in threes.
std::string grouped(int64_t number) {
  std::string text = std::to_string(number);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<size_t>(at), ",");
  }
  return text;
}

std::string percent(double fraction) { return fmt::format("{:.1f} %", 100 * fraction); }

std::string plural(int64_t count, const char* one) {
  return fmt::format("{} {}{}", grouped(count), one, count == 1 ? "" : "s");
}

std::string budget_text(const Scenario& scenario) {
  if (scenario.budget_bytes <= 0) return "no budget";
  return fmt::format("budget {}", format_bytes(scenario.budget_bytes));
}

/// Runs are short beside a day: whether failures were seen at all is luck.
std::string failures_text(const SimRun& run, double per_day) {
  const double hours = run.seconds / 3600;
  return fmt::format("{}: {} in {:.2f} simulated hours, {:.2g} expected\n", run.policy.label,
                     plural(run.failures, "other failure"), hours, per_day * hours / 24);
}

void print_head(const SimulatedScenario& simulated, std::ostream& out) {
  const Scenario& scenario = simulated.scenario;
  const Job& job = scenario.job;
  const Interruptions& stops = scenario.interruptions;
  out << fmt::format("{}: SIMULATED, not measured, on {} of {}\n", scenario.name,
                     plural(job.layout.world_size, "device"), system_text(scenario.system));
  out << fmt::format("  {}: {} parameters ({} per token), {} layers, {} experts, top {}\n",
                     job.model.name, count_text(total_parameters(job.model)),
                     count_text(active_parameters(job.model)), job.model.layers, job.model.experts,
                     job.model.top_k);
  out << fmt::format("  {}; {}, {} x {} tokens per micro-batch, {} micro-batches per step\n",
                     layout_text(job.layout), pipeline_kind_name(job.pipeline),
                     job.micro_batch_size, job.seq, grouped(job.microbatches));
  out << fmt::format("  {}, {}, routing {}\n", plural(simulated.iterations, "iteration"),
                     budget_text(scenario), routing_text(scenario));
  out << fmt::format("  restart {:.0f} s, checkpoint every {} ({:.3g} s), {}\n\n", stops.restart_s,
                     plural(stops.checkpoint_interval, "iteration"), stops.checkpoint_s,
                     stops.failures_per_day > 0
                         ? fmt::format("{:.3g} other failures a day", stops.failures_per_day)
                         : "no other failures");
}

constexpr std::array<const char*, 11> kHead = {
    "tokens/s",      "relative", "MFU alone", "with restarts", "best",      "p50 iteration",
    "peak / budget", "OOMs",     "lost",      "mitigated",     "most ranks"};

std::string peak_text(const SimRun& run, int64_t budget_bytes) {
  if (run.peak_bytes <= 0) return "-";
  if (budget_bytes <= 0)
    return fmt::format("{:.1f} GiB",
                       static_cast<double>(run.peak_bytes) / static_cast<double>(kGiB));
  return fmt::format("{:.1f} GiB, {:.0f} %",
                     static_cast<double>(run.peak_bytes) / static_cast<double>(kGiB),
                     100 * static_cast<double>(run.peak_bytes) / static_cast<double>(budget_bytes));
}

std::vector<std::string> cells_of(const SimulatedScenario& scenario, size_t index) {
  const SimRun& run = scenario.policies[index].run;
  const PolicyFigures figures = figures_of(scenario, index);
  std::vector<std::string> cells(kHead.size(), "-");
  if (run.iterations > 0) {
    cells[0] = grouped(static_cast<int64_t>(run.tokens_per_s));
    if (figures.relative > 0) cells[1] = fmt::format("{:.3f}x", figures.relative);
    cells[2] = percent(run.mfu_calm_fraction);
    cells[3] = percent(run.mfu_fraction);
    cells[4] = percent(run.best_mfu_fraction);
    cells[5] = fmt::format("{:.1f} ms", static_cast<double>(figures.p50_ns) / 1e6);
    cells[8] = fmt::format("{:.2f} h", figures.lost_hours);
    cells[9] = percent(static_cast<double>(run.mitigated_iterations) /
                       static_cast<double>(run.iterations));
    cells[10] = grouped(figures.most_mitigated_ranks);
  }
  if (run.short_by_bytes == 0) {
    cells[6] = peak_text(run, scenario.scenario.budget_bytes);
    cells[7] = grouped(run.ooms);
  }
  return cells;
}

/// Columns as wide as their widest cell, numbers right.
void print_columns(const std::vector<std::string>& names,
                   const std::vector<std::vector<std::string>>& rows, std::ostream& out) {
  size_t first = kShortest;
  for (const std::string& name : names) first = std::max(first, name.size());
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    std::string line = fmt::format("{:<{}}", names[r], first);
    for (size_t c = 0; c < widths.size(); ++c) {
      line += fmt::format("  {:>{}}", rows[r][c], widths[c]);
    }
    out << line << '\n';
  }
}

/// What a number in the table cannot say.
void print_remarks(const SimulatedScenario& scenario, std::ostream& out) {
  for (size_t i = 0; i < scenario.policies.size(); ++i) {
    const SimulatedPolicy& policy = scenario.policies[i];
    const SimRun& run = policy.run;
    const PolicyFigures figures = figures_of(scenario, i);
    if (run.short_by_bytes > 0) {
      out << fmt::format("{}: cannot run, {} under its floor\n", run.policy.label,
                         format_bytes(run.short_by_bytes));
    } else if (run.unable_iteration >= 0) {
      out << fmt::format("{}: gives up: out of memory in every try of iteration {}{}\n",
                         run.policy.label, run.unable_iteration,
                         figures.missing_bytes > 0
                             ? fmt::format(", by {}", format_bytes(figures.missing_bytes))
                             : "");
    } else if (!policy.complete) {
      out << fmt::format("{}: INCOMPLETE, stopped after {} of {} iterations\n", run.policy.label,
                         grouped(run.iterations), grouped(scenario.iterations));
    }
    const double failures_per_day = scenario.scenario.interruptions.failures_per_day;
    if (failures_per_day > 0 && run.iterations > 0) out << failures_text(run, failures_per_day);
    if (run.repeated_steps > 0) {
      out << fmt::format("{}: {} thrown away and run again\n", run.policy.label,
                         plural(run.repeated_steps, "step"));
    }
  }
}

void print_scenario(const SimulatedScenario& scenario, std::ostream& out) {
  print_head(scenario, out);
  if (scenario.policies.empty()) return;
  std::vector<std::string> names = {"policy"};
  std::vector<std::vector<std::string>> rows = {{kHead.begin(), kHead.end()}};
  for (size_t i = 0; i < scenario.policies.size(); ++i) {
    names.push_back(scenario.policies[i].run.policy.label);
    rows.push_back(cells_of(scenario, i));
  }
  print_columns(names, rows, out);
  print_remarks(scenario, out);
}

/// Throughput by policy, a column per scenario.
void print_scales(const SimulateReport& report, std::ostream& out) {
  std::vector<std::string> names = {"tokens/s, SIMULATED"};
  std::vector<std::vector<std::string>> rows(1);
  for (const SimulatedScenario& scenario : report.scenarios) {
    rows[0].push_back(fmt::format("{} ({})", scenario.scenario.name,
                                  grouped(scenario.scenario.job.layout.world_size)));
    for (const SimulatedPolicy& policy : scenario.policies) {
      const std::string& label = policy.run.policy.label;
      if (std::find(names.begin(), names.end(), label) == names.end()) names.push_back(label);
    }
  }
  for (size_t n = 1; n < names.size(); ++n) {
    std::vector<std::string> row;
    for (const SimulatedScenario& scenario : report.scenarios) {
      row.emplace_back("-");
      for (const SimulatedPolicy& policy : scenario.policies) {
        if (policy.run.policy.label != names[n] || policy.run.iterations == 0) continue;
        row.back() = grouped(static_cast<int64_t>(policy.run.tokens_per_s));
      }
    }
    rows.push_back(std::move(row));
  }
  print_columns(names, rows, out);
}

}  // namespace

void print_table(const SimulateReport& report, std::ostream& out) {
  for (size_t i = 0; i < report.scenarios.size(); ++i) {
    if (i > 0) out << '\n';
    print_scenario(report.scenarios[i], out);
  }
  if (report.scenarios.size() > 1) {
    out << '\n';
    print_scales(report, out);
  }
  if (!report.complete) out << "\nINCOMPLETE: stopped before everything asked for was run\n";
}

}  // namespace bagualu
