#include "bagualu/cli/simulate_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "bagualu/base/units.h"
#include "bagualu/cli/page_parts.h"
#include "bagualu/cli/simulate_charts.h"
#include "bagualu/model/parameters.h"

namespace bagualu {
namespace {

std::string percent(double fraction) { return fmt::format("{:.1f} %", 100 * fraction); }

std::string tokens_text(double tokens_per_s) {
  if (tokens_per_s >= 1e6) return fmt::format("{:.3f} M tokens/s", tokens_per_s / 1e6);
  return fmt::format("{:.0f} tokens/s", tokens_per_s);
}

/// Policies of all scenarios, in the order in which they first appear.
std::vector<std::string> labels_of(const SimulateReport& report) {
  std::vector<std::string> labels;
  for (const SimulatedScenario& scenario : report.scenarios) {
    for (const SimulatedPolicy& policy : scenario.policies) {
      const std::string& label = policy.run.policy.label;
      if (std::find(labels.begin(), labels.end(), label) == labels.end()) labels.push_back(label);
    }
  }
  return labels;
}

/// Throughput of one scenario: a bar per policy.
std::string throughput_of(const SimulatedScenario& scenario) {
  BarChart chart{"throughput by policy", {"tokens/s"}, {}, {}};
  for (size_t i = 0; i < scenario.policies.size(); ++i) {
    const SimRun& run = scenario.policies[i].run;
    const PolicyFigures figures = figures_of(scenario, i);
    chart.groups.push_back({run.policy.label, {run.tokens_per_s}});
    chart.texts.push_back(
        run.iterations == 0
            ? "cannot run"
            : fmt::format("{}, {:.3f}x", tokens_text(run.tokens_per_s), figures.relative));
  }
  return bars_chart(chart);
}

/// Throughput per device: a group per scenario, a bar per policy.
std::string throughput_by_scale(const SimulateReport& report) {
  const std::vector<std::string> labels = labels_of(report);
  BarChart chart{"throughput by policy and scale", labels, {}, {}};
  for (const SimulatedScenario& scenario : report.scenarios) {
    const auto devices = static_cast<double>(scenario.scenario.job.layout.world_size);
    BarChart::Group group;
    group.name = fmt::format("{} ({} devices)", scenario.scenario.name, devices);
    for (const std::string& label : labels) {
      group.values.push_back(0);
      std::string text = "-";
      for (size_t i = 0; i < scenario.policies.size(); ++i) {
        const SimRun& run = scenario.policies[i].run;
        if (run.policy.label != label || run.iterations == 0) continue;
        group.values.back() = run.tokens_per_s / devices;
        text = fmt::format("{:.1f}, {:.3f}x", run.tokens_per_s / devices,
                           figures_of(scenario, i).relative);
      }
      chart.texts.push_back(text);
    }
    chart.groups.push_back(std::move(group));
  }
  return page_legend(labels, 1) + bars_chart(chart);
}

std::string mfu_chart(const SimulatedScenario& scenario) {
  BarChart chart{"MFU by policy", {"iterations alone", "with restarts", "best iteration"}, {}, {}};
  for (const SimulatedPolicy& policy : scenario.policies) {
    const SimRun& run = policy.run;
    if (run.iterations == 0) continue;
    chart.groups.push_back(
        {run.policy.label, {run.mfu_calm_fraction, run.mfu_fraction, run.best_mfu_fraction}});
    for (const double value : chart.groups.back().values) chart.texts.push_back(percent(value));
  }
  if (chart.groups.empty()) return "";
  return page_legend(chart.series, 1) + bars_chart(chart);
}

std::string imbalance_of(const SimulatedScenario& scenario) {
  ImbalanceChart chart;
  chart.calm_limit = scenario.scenario.routing.calm_limit;
  for (const SimulatedPolicy& policy : scenario.policies) {
    ImbalanceChart::Deaths deaths{policy.run.policy.label, {}};
    std::vector<std::pair<int64_t, double>> points;
    for (const SimIteration& one : policy.run.series) {
      points.emplace_back(one.iteration, one.imbalance);
      if (one.died) deaths.iterations.push_back(one.iteration);
    }
    if (points.size() > chart.points.size()) chart.points = std::move(points);
    if (!deaths.iterations.empty()) chart.deaths.push_back(std::move(deaths));
  }
  return chart.points.empty() ? "" : imbalance_chart(chart);
}

std::string memory_of(const SimulatedScenario& scenario) {
  std::string pictures;
  for (const SimulatedPolicy& policy : scenario.policies) {
    for (const SpikeDetail& detail : policy.detail) {
      int64_t peak = 0;
      for (const MemoryLine& memory : detail.memory) peak = std::max(peak, memory.peak_bytes);
      const std::string title = fmt::format(
          "{}: iteration {}, {:.2f}x, peak {}{}", policy.run.policy.label, detail.iteration,
          detail.imbalance, format_bytes(peak), detail.died ? ", out of memory" : "");
      pictures += html_tag("div", "",
                           "\n" + html_tag("h3", "", escape_html(title)) +
                               memory_chart(detail.memory, scenario.scenario.budget_bytes, title));
    }
  }
  return pictures.empty() ? "" : html_tag("div", "class=\"grid\"", "\n" + pictures);
}

std::string streams_of(const SimulatedScenario& scenario) {
  std::string pictures;
  for (const SimulatedPolicy& policy : scenario.policies) {
    for (const SpikeDetail& detail : policy.detail) {
      for (const StreamPicture& picture : detail.pictures) {
        const std::string title = fmt::format(
            "{}: iteration {}, {:.2f}x, rank {}{}{}", policy.run.policy.label, picture.iteration,
            picture.imbalance, picture.rank, picture.begin_ms > 0 ? ", around its peak" : "",
            picture.died ? ", out of memory" : "");
        pictures += html_tag("h3", "", escape_html(title)) + streams_chart(picture);
      }
    }
  }
  return pictures.empty() ? "" : page_legend(stream_kinds()) + pictures;
}

/// The text table, as it is: one source of numbers.
std::string figures_table(const SimulatedScenario& scenario) {
  PageTable table;
  table.head = {"policy",        "tokens/s", "relative",      "MFU alone",
                "with restarts", "best",     "p50 iteration", "p99",
                "peak",          "OOMs",     "lost",          "mitigated iterations"};
  table.numeric.assign(table.head.size(), true);
  table.numeric[0] = false;
  for (size_t i = 0; i < scenario.policies.size(); ++i) {
    const SimulatedPolicy& policy = scenario.policies[i];
    const SimRun& run = policy.run;
    const PolicyFigures figures = figures_of(scenario, i);
    std::vector<std::string> row(table.head.size(), "-");
    row[0] = run.policy.label + (policy.complete ? "" : " (incomplete)");
    if (figures.cannot_run) {
      row[1] = fmt::format("cannot run: {} missing", format_bytes(figures.missing_bytes));
    } else if (run.iterations > 0) {
      row = {row[0],
             fmt::format("{:.0f}", run.tokens_per_s),
             figures.relative > 0 ? fmt::format("{:.3f}x", figures.relative) : "-",
             percent(run.mfu_calm_fraction),
             percent(run.mfu_fraction),
             percent(run.best_mfu_fraction),
             format_ns(figures.p50_ns),
             format_ns(figures.p99_ns),
             format_bytes(run.peak_bytes),
             std::to_string(run.ooms),
             fmt::format("{:.2f} h", figures.lost_hours),
             std::to_string(run.mitigated_iterations)};
    }
    table.rows.push_back(std::move(row));
  }
  return page_table(table);
}

std::vector<std::pair<std::string, std::string>> facts_of(const SimulatedScenario& simulated) {
  const Scenario& scenario = simulated.scenario;
  const Job& job = scenario.job;
  const Interruptions& stops = scenario.interruptions;
  return {{"machine description", system_text(scenario.system)},
          {"devices", std::to_string(job.layout.world_size)},
          {"model", job.model.name},
          {"parameters", fmt::format("{:.1f} B ({:.1f} B per token)",
                                     static_cast<double>(total_parameters(job.model)) / 1e9,
                                     static_cast<double>(active_parameters(job.model)) / 1e9)},
          {"layout", layout_text(job.layout)},
          {"order", std::string(pipeline_kind_name(job.pipeline))},
          {"tokens per micro-batch", fmt::format("{} x {}", job.micro_batch_size, job.seq)},
          {"micro-batches per step", std::to_string(job.microbatches)},
          {"budget", scenario.budget_bytes > 0 ? format_bytes(scenario.budget_bytes) : "none"},
          {"routing", routing_text(scenario)},
          {"iterations", std::to_string(simulated.iterations)},
          {"restart", fmt::format("{:.0f} s", stops.restart_s)},
          {"checkpoint", fmt::format("every {} iterations", stops.checkpoint_interval)},
          {"other failures", fmt::format("{:.3g} a day", stops.failures_per_day)}};
}

std::string scenario_sections(const SimulatedScenario& scenario, bool several) {
  const std::string head = several ? scenario.scenario.name + ": " : "";
  const auto section = [&](const std::string& title, const std::string& note,
                           const std::string& content) {
    return page_section(head.empty() ? title : head + title, note, content);
  };
  std::string html = page_facts(facts_of(scenario));
  html += section("Throughput", "Restarts, iterations done again and checkpoints included.",
                  scenario.policies.empty() ? "" : throughput_of(scenario));
  html +=
      section("MFU",
              "Model FLOPs over time, devices and their peak; of the iterations alone, and with "
              "restarts.",
              mfu_chart(scenario));
  html += section("Figures", "", scenario.policies.empty() ? "" : figures_table(scenario));
  html +=
      section("Imbalance by iteration",
              "Over layers the hottest rank over the mean. Triangles: a rank ran out of memory.",
              imbalance_of(scenario));
  html +=
      section("Memory over a step",
              "The most uneven iteration: of every pipeline stage its heaviest rank, static bytes "
              "and workspaces included.",
              memory_of(scenario));
  html += section("What a spike does",
                  "Streams of the hottest rank: in the iteration beside the most uneven one, "
                  "in that one, and there around its memory peak. Every column shows what filled "
                  "most of it: over a whole iteration short transfers vanish.",
                  streams_of(scenario));
  return html;
}

std::vector<std::string> notes_of(const SimulateReport& report) {
  std::vector<std::string> notes = {
      "Everything on this page is simulated, operator by operator; nothing was measured."};
  for (const SimulatedScenario& scenario : report.scenarios) {
    const Scenario& s = scenario.scenario;
    if (!s.source.empty()) notes.push_back(fmt::format("{}: {}", s.name, s.source));
    const std::string note =
        fmt::format("{} ({}): {}", s.system.name, s.system.provenance, s.system.source);
    if (std::find(notes.begin(), notes.end(), note) == notes.end()) notes.push_back(note);
  }
  return notes;
}

}  // namespace

std::string simulate_page(const SimulateReport& report) {
  const bool several = report.scenarios.size() > 1;
  const std::string title = several ? fmt::format("{} scenarios", report.scenarios.size())
                            : report.scenarios.empty() ? "no scenario"
                                                       : report.scenarios.front().scenario.name;
  std::string body = page_head(
      "Simulation of " + title,
      report.complete ? "SIMULATED, not measured."
                      : "SIMULATED, not measured. INCOMPLETE: stopped before all of it was run.",
      !report.complete);
  if (several) {
    body += page_section("Throughput by policy and scale",
                         "Tokens per second and device; behind it, relative to the first policy.",
                         throughput_by_scale(report));
  }
  for (const SimulatedScenario& scenario : report.scenarios) {
    if (several) body += html_tag("h2", "", escape_html(scenario.scenario.name));
    body += scenario_sections(scenario, several);
  }
  body += page_notes(notes_of(report));
  return page_document("bagualu simulate: " + title, body);
}

}  // namespace bagualu
