#include "bagualu/cli/schedule_replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "bagualu/base/atomic_file.h"
#include "bagualu/base/error.h"
#include "bagualu/base/json.h"
#include "bagualu/schedule/step_comparison.h"

namespace bagualu {
namespace {

constexpr const char* kWhere = "bagualu schedule";

double off_fraction(const StepComparison& at) {
  if (at.measured_ns == 0) return 0;
  return static_cast<double>(at.predicted_ns) / static_cast<double>(at.measured_ns) - 1;
}

// Nearest rank of the middle, of the distances from the measured time.
double median_off(const StepComparisons& all) {
  std::vector<double> off;
  for (const StepComparison& at : all.steps) off.push_back(std::abs(off_fraction(at)));
  std::sort(off.begin(), off.end());
  return off.empty() ? 0 : off[(off.size() - 1) / 2];
}

Json totals(const RankStep& rank, int64_t origin_ns) {
  const StepOverlap at = step_overlap(rank);
  return {{"start_ns", rank.start_ns - origin_ns},
          {"end_ns", rank.end_ns - origin_ns},
          {"compute_ns", at.compute_ns},
          {"comm_ns", at.comm_ns},
          {"comm_beside_ns", at.comm_beside_ns},
          {"comm_wait_ns", at.comm_wait_ns},
          {"copy_ns", at.copy_ns},
          {"copy_beside_ns", at.copy_beside_ns},
          {"copy_wait_ns", at.copy_wait_ns}};
}

Json span(int64_t start_ns, int64_t wait_ns, int64_t end_ns) {
  return Json::array({start_ns, wait_ns, end_ns});
}

Json events(const StepComparison& step, size_t r, int64_t origin_ns) {
  Json list = Json::array();
  for (size_t i = 0; i < step.executed[r].events.size(); ++i) {
    const StepEvent& event = step.executed[r].events[i];
    const StepEvent& planned = step.scheduled[r].events[i];
    list.push_back(
        {{"action", step_action_name(event.action)},
         {"name", event.name},
         {"stage", event.stage},
         {"microbatch", event.microbatch},
         {"executed",
          span(event.start_ns - origin_ns, step.executed_wait_ns[r][i], event.end_ns - origin_ns)},
         {"scheduled", span(planned.start_ns, step.scheduled_wait_ns[r][i], planned.end_ns)}});
  }
  return list;
}

Json transfers(const StepComparison& step, size_t r, int64_t origin_ns) {
  const RankStep& executed = step.executed[r];
  std::vector<StepAction> issuer(executed.transfers.size(), StepAction::kOther);
  for (const StepEvent& event : executed.events) {
    for (int number : event.issues) issuer[static_cast<size_t>(number)] = event.action;
  }
  Json list = Json::array();
  for (size_t n = 0; n < executed.transfers.size(); ++n) {
    const StepTransfer& transfer = executed.transfers[n];
    const StepTransfer& planned = step.scheduled[r].transfers[n];
    list.push_back(
        {{"stream", transfer_stream_name(transfer.stream)},
         {"name", transfer.name},
         {"key", transfer.key},
         {"bytes", transfer.bytes},
         {"issued_by", step_action_name(issuer[n])},
         {"executed", Json::array({transfer.start_ns - origin_ns, transfer.end_ns - origin_ns})},
         {"scheduled", Json::array({planned.start_ns, planned.end_ns})}});
  }
  return list;
}

Json to_json(const StepComparison& step) {
  int64_t origin_ns = INT64_MAX;
  for (const RankStep& rank : step.executed) origin_ns = std::min(origin_ns, rank.start_ns);
  Json ranks = Json::array();
  for (size_t r = 0; r < step.executed.size(); ++r) {
    ranks.push_back({{"rank", step.executed[r].rank},
                     {"executed", totals(step.executed[r], origin_ns)},
                     {"scheduled", totals(step.scheduled[r], 0)},
                     {"events", events(step, r, origin_ns)},
                     {"transfers", transfers(step, r, origin_ns)}});
  }
  return {{"step", step.step},
          {"measured_ns", step.measured_ns},
          {"predicted_ns", step.predicted_ns},
          {"ranks", ranks}};
}

std::string to_text(const StepComparisons& all) {
  Json steps = Json::array();
  for (const StepComparison& step : all.steps) steps.push_back(to_json(step));
  const Json answer = {{"version", 1},
                       {"median_error_fraction", median_off(all)},
                       {"left_out_steps", all.left_out},
                       {"steps", steps}};
  return answer.dump() + "\n";
}

std::string share(int64_t part, int64_t whole) {
  if (whole == 0) return "-";
  return fmt::format("{:.1f}%", 100 * static_cast<double>(part) / static_cast<double>(whole));
}

double ms(int64_t ns) { return static_cast<double>(ns) / 1e6; }

void print_rank(const StepComparison& step, size_t r, std::ostream& out) {
  for (const bool executed : {true, false}) {
    const RankStep& rank = executed ? step.executed[r] : step.scheduled[r];
    const StepOverlap at = step_overlap(rank);
    const int64_t span_ns = rank.end_ns - rank.start_ns;
    out << fmt::format(
        "  {:>4}  {}  {:>10.3f}  {:>7}  {:>10.3f}  {:>6}  {:>5}  {:>10.3f}  {:>6}  "
        "{:>5}\n",
        executed ? std::to_string(rank.rank) : "", executed ? "executed " : "scheduled",
        ms(span_ns), share(at.compute_ns, span_ns), ms(at.comm_ns),
        share(at.comm_beside_ns, at.comm_ns), share(at.comm_wait_ns, span_ns), ms(at.copy_ns),
        share(at.copy_beside_ns, at.copy_ns), share(at.copy_wait_ns, span_ns));
  }
}

void print_table(const StepComparisons& all, std::ostream& out) {
  for (const StepComparison& step : all.steps) {
    out << fmt::format("step {}: measured {:.3f} ms, predicted {:.3f} ms, {:+.1f}%\n", step.step,
                       ms(step.measured_ns), ms(step.predicted_ns), 100 * off_fraction(step))
        << "  rank               time ms  compute     comm ms  hidden  waits     copy ms  hidden  "
           "waits\n";
    for (size_t r = 0; r < step.executed.size(); ++r) print_rank(step, r, out);
  }
  out << fmt::format(
      "{} step(s), median distance of the prediction {:.1f}%.\n"
      "Compute and waits: of the rank's time. Hidden: of the time that transfers are under way, "
      "from their issue,\nwhat runs beside compute. Scheduled: the same lists with the median "
      "times of the other steps.\n",
      all.steps.size(), 100 * median_off(all));
  for (int64_t step : all.left_out) {
    out << fmt::format("step {} left out: not every rank has finished it\n", step);
  }
}

}  // namespace

int run_schedule_replay(const std::vector<std::string>& traces, const std::string& json,
                        const Streams& streams) {
  const StepComparisons all = compare_steps(read_step_trace({traces.begin(), traces.end()}));
  if (all.steps.empty()) {
    throw InvalidInput(kWhere, "--replay", "no whole step", "the step traces of all ranks");
  }
  if (!json.empty() && json != "-") write_file_atomic(json, to_text(all));
  if (json == "-") {
    streams.out << to_text(all);
  } else {
    print_table(all, streams.out);
  }
  return kExitDone;
}

}  // namespace bagualu
