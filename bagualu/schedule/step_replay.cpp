#include "bagualu/schedule/step_replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/mean.h"

namespace bagualu {
namespace {

constexpr int64_t kUnknown = INT64_MIN;

struct Part {
  size_t rank = 0;
  size_t number = 0;  ///< in RankStep::transfers
};

// The transfers of all ranks, each once, with the parts that ranks have in it.
class Transfers {
 public:
  explicit Transfers(const std::vector<RankStep>& ranks) {
    std::map<std::string, size_t> by_key;
    for (size_t r = 0; r < ranks.size(); ++r) {
      of_.emplace_back();
      for (size_t n = 0; n < ranks[r].transfers.size(); ++n) {
        const std::string& key = ranks[r].transfers[n].key;
        size_t id = parts_.size();
        if (!key.empty()) id = by_key.emplace(key, id).first->second;
        if (id == parts_.size()) parts_.emplace_back();
        for (const Part& part : parts_[id]) {
          if (part.rank == r) {
            throw InvalidInput("step trace", fmt::format("rank {}", ranks[r].rank),
                               "key " + key + " twice", "each key once in a step");
          }
        }
        parts_[id].push_back({r, n});
        of_[r].push_back(id);
      }
    }
    for (const auto& [key, id] : by_key) {
      if (parts_[id].size() > 1) continue;
      throw InvalidInput("step trace", "key", key + " on one rank only",
                         "the traces of all members");
    }
  }

  size_t count() const { return parts_.size(); }
  const std::vector<Part>& parts(size_t id) const { return parts_[id]; }
  size_t id(size_t rank, int number) const { return of_[rank][static_cast<size_t>(number)]; }

 private:
  std::vector<std::vector<Part>> parts_;
  std::vector<std::vector<size_t>> of_;  // by rank and number
};

bool has(const std::vector<int>& numbers, int number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

// Runs the lists of all ranks side by side.
class Machine {
 public:
  Machine(const std::vector<RankStep>& ranks, const ReplayTimes& times)
      : ranks_(ranks), times_(times), transfers_(ranks), started_at_(transfers_.count(), kUnknown) {
    for (size_t r = 0; r < ranks.size(); ++r) {
      result_.events.emplace_back(ranks[r].events.size());
      result_.transfers.emplace_back(ranks[r].transfers.size());
      issued_.emplace_back(ranks[r].transfers.size(), kUnknown);
      now_.push_back(times.start_ns[r]);
    }
    result_.wait_ns.assign(ranks.size(), 0);
    next_.assign(ranks.size(), 0);
    started_.assign(ranks.size(), 0);
    channels_.resize(ranks.size());
  }

  StepReplay run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < ranks_.size(); ++r) {
        while (next_[r] < ranks_[r].events.size() && step(r)) moved = true;
      }
    }
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (next_[r] < ranks_[r].events.size()) throw InternalError(stuck_text());
      result_.step_ns = std::max(result_.step_ns, now_[r] + times_.tail_ns[r]);
    }
    for (int64_t start : started_at_) BGL_CHECK(start != kUnknown, "a transfer never started");
    return std::move(result_);
  }

 private:
  struct Channel {
    std::deque<size_t> waiting;  // ids, in the order of their issue
    int64_t free_ns = 0;
  };

  // Runs the next event of a rank; false if what it awaits is not known to end yet.
  bool step(size_t r) {
    const size_t i = next_[r];
    const StepEvent& event = ranks_[r].events[i];
    ReplayInterval& at = result_.events[r][i];
    if (!started_[r]) {
      at.start_ns = now_[r] + times_.lead_ns[r][i];
      for (int n : event.issues) {
        if (has(event.awaits, n)) issue(r, n, at.start_ns);
      }
      started_[r] = 1;
    }
    int64_t ready = at.start_ns;
    for (int n : event.awaits) {
      if (started_at_[transfers_.id(r, n)] == kUnknown) return false;
      ready = std::max(ready, result_.transfers[r][static_cast<size_t>(n)].end_ns);
    }
    result_.wait_ns[r] += ready - at.start_ns;
    at.end_ns = now_[r] = ready + times_.event_ns[r][i];
    for (int n : event.issues) {
      if (!has(event.awaits, n)) issue(r, n, at.end_ns);
    }
    started_[r] = 0;
    ++next_[r];
    return true;
  }

  void issue(size_t r, int number, int64_t ns) {
    const auto n = static_cast<size_t>(number);
    issued_[r][n] = ns;
    const std::string& channel = ranks_[r].transfers[n].channel;
    if (!channel.empty()) channels_[r][channel].waiting.push_back(transfers_.id(r, number));
    start_if_ready(transfers_.id(r, number));
  }

  // Starts a transfer that every member has issued and that is next on each of its channels, then
  // those that stood behind it.
  void start_if_ready(size_t first) {
    std::deque<size_t> tries = {first};
    while (!tries.empty()) {
      const size_t id = tries.front();
      tries.pop_front();
      int64_t start = 0;
      if (started_at_[id] != kUnknown || !may_start(id, &start)) continue;
      started_at_[id] = start;
      for (const Part& part : transfers_.parts(id)) {
        const int64_t end = start + times_.transfer_ns[part.rank][part.number];
        result_.transfers[part.rank][part.number] = {start, end};
        Channel* channel = channel_of(part);
        if (channel == nullptr) continue;
        channel->waiting.pop_front();
        channel->free_ns = end;
        if (!channel->waiting.empty()) tries.push_back(channel->waiting.front());
      }
    }
  }

  bool may_start(size_t id, int64_t* start) {
    for (const Part& part : transfers_.parts(id)) {
      const int64_t issued = issued_[part.rank][part.number];
      if (issued == kUnknown) return false;
      *start = std::max(*start, issued);
      const Channel* channel = channel_of(part);
      if (channel == nullptr) continue;
      if (channel->waiting.front() != id) return false;
      *start = std::max(*start, channel->free_ns);
    }
    return true;
  }

  Channel* channel_of(const Part& part) {
    const std::string& name = ranks_[part.rank].transfers[part.number].channel;
    return name.empty() ? nullptr : &channels_[part.rank][name];
  }

  std::string stuck_text() const {
    std::string text = "step is stuck:";
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (next_[r] == ranks_[r].events.size()) continue;
      const StepEvent& event = ranks_[r].events[next_[r]];
      for (int n : event.awaits) {
        if (started_at_[transfers_.id(r, n)] != kUnknown) continue;
        const StepTransfer& transfer = ranks_[r].transfers[static_cast<size_t>(n)];
        text += fmt::format(" rank {}: {} {} of micro-batch {} waits for {} {};", ranks_[r].rank,
                            step_action_name(event.action), event.name, event.microbatch,
                            transfer.name, transfer.key);
        break;
      }
    }
    text.pop_back();
    return text;
  }

  const std::vector<RankStep>& ranks_;
  const ReplayTimes& times_;
  Transfers transfers_;
  StepReplay result_;
  std::vector<int64_t> started_at_;                       // by id
  std::vector<std::vector<int64_t>> issued_;              // by rank and number
  std::vector<int64_t> now_;                              // by rank: end of its last event
  std::vector<size_t> next_;                              // by rank: event
  std::vector<char> started_;                             // by rank: its next event waits
  std::vector<std::map<std::string, Channel>> channels_;  // by rank
};

// Own time of every transfer: from when all members have issued it and their channels are free.
void measure_transfers(const std::vector<RankStep>& ranks, ReplayTimes& times) {
  const Transfers transfers(ranks);
  std::vector<std::vector<int64_t>> ready(ranks.size());  // by rank and number
  for (size_t r = 0; r < ranks.size(); ++r) {
    times.transfer_ns.emplace_back(ranks[r].transfers.size(), 0);
    ready[r].assign(ranks[r].transfers.size(), kUnknown);
    std::map<std::string, int64_t> free_ns;  // by channel
    for (const StepEvent& event : ranks[r].events) {
      for (int number : event.issues) {
        const StepTransfer& transfer = ranks[r].transfers[static_cast<size_t>(number)];
        // As replay_step() has it, so that a step replayed with its own times is itself.
        int64_t& at = ready[r][static_cast<size_t>(number)];
        at = has(event.awaits, number) ? event.start_ns : event.end_ns;
        if (transfer.channel.empty()) continue;
        const auto [before, first] = free_ns.emplace(transfer.channel, kUnknown);
        at = std::max(at, before->second);
        before->second = std::max(before->second, transfer.end_ns);
      }
    }
  }
  for (size_t id = 0; id < transfers.count(); ++id) {
    int64_t start = kUnknown;
    for (const Part& part : transfers.parts(id)) {
      start = std::max(start, ready[part.rank][part.number]);
    }
    for (const Part& part : transfers.parts(id)) {
      const int64_t end = ranks[part.rank].transfers[part.number].end_ns;
      times.transfer_ns[part.rank][part.number] = std::max<int64_t>(0, end - start);
    }
  }
}

// What an event does itself: what is left after the last end that it awaited.
int64_t own_ns(const StepEvent& event, const std::vector<StepTransfer>& transfers) {
  int64_t from = event.start_ns;
  for (int n : event.awaits) from = std::max(from, transfers[static_cast<size_t>(n)].end_ns);
  return std::max<int64_t>(0, event.end_ns - from);
}

}  // namespace

ReplayTimes measured_times(const std::vector<RankStep>& ranks) {
  ReplayTimes times;
  int64_t first = INT64_MAX;
  for (const RankStep& rank : ranks) first = std::min(first, rank.start_ns);
  for (const RankStep& rank : ranks) {
    times.start_ns.push_back(rank.start_ns - first);
    times.lead_ns.emplace_back();
    times.event_ns.emplace_back();
    int64_t now = rank.start_ns;
    for (const StepEvent& event : rank.events) {
      times.lead_ns.back().push_back(event.start_ns - now);
      times.event_ns.back().push_back(own_ns(event, rank.transfers));
      now = event.end_ns;
    }
    times.tail_ns.push_back(rank.end_ns - now);
  }
  measure_transfers(ranks, times);
  return times;
}

// Leads and tails are host work as well: their means go by the event that they stand at.
template <class Visit>
void MeanTimes::each(const std::vector<RankStep>& ranks, ReplayTimes& times, const Visit& visit) {
  constexpr int kLead = 1 << 8;
  constexpr int kTail = 1 << 9;
  constexpr int kTransfer = 1 << 10;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const int rank = ranks[r].rank;
    std::vector<int> issuer(ranks[r].transfers.size(), 0);
    for (size_t i = 0; i < ranks[r].events.size(); ++i) {
      const StepEvent& event = ranks[r].events[i];
      const int action = static_cast<int>(event.action);
      visit(Key{rank, event.stage, action, event.name}, times.event_ns[r][i]);
      visit(Key{rank, event.stage, action | kLead, event.name}, times.lead_ns[r][i]);
      for (int number : event.issues) issuer[static_cast<size_t>(number)] = action;
    }
    for (size_t n = 0; n < ranks[r].transfers.size(); ++n) {
      const StepTransfer& transfer = ranks[r].transfers[n];
      visit(Key{rank, -1, issuer[n] | kTransfer, transfer.name}, times.transfer_ns[r][n]);
    }
    visit(Key{rank, -1, kTail, ""}, times.tail_ns[r]);
  }
}

void MeanTimes::add(const std::vector<RankStep>& ranks, const ReplayTimes& times) {
  ReplayTimes copy = times;
  each(ranks, copy, [this](const Key& key, int64_t& ns) { samples_[key].push_back(ns); });
}

ReplayTimes MeanTimes::of(const std::vector<RankStep>& ranks) const {
  ReplayTimes times = measured_times(ranks);
  std::map<Key, int64_t> known;
  each(ranks, times, [&](const Key& key, int64_t& ns) {
    const auto samples = samples_.find(key);
    if (samples == samples_.end()) return;
    const auto [entry, added] = known.emplace(key, 0);
    if (added) entry->second = mean_without_tail(samples->second, kTail);
    ns = entry->second;
  });
  return times;
}

StepReplay replay_step(const std::vector<RankStep>& ranks, const ReplayTimes& times) {
  return Machine(ranks, times).run();
}

std::vector<ReplayTimes> neighbour_times(const std::map<int64_t, std::vector<RankStep>>& steps) {
  std::vector<std::pair<const std::vector<RankStep>*, ReplayTimes>> measured;
  for (const auto& [number, step] : steps) measured.emplace_back(&step, measured_times(step));
  const auto count = static_cast<int64_t>(measured.size());
  std::vector<ReplayTimes> result;
  for (int64_t i = 0; i < count; ++i) {
    std::vector<size_t> around;
    int64_t fastest_ns = INT64_MAX;
    for (int64_t k = std::max<int64_t>(0, i - kNeighbours);
         k <= std::min(count - 1, i + kNeighbours); ++k) {
      if (k == i) continue;
      around.push_back(static_cast<size_t>(k));
      fastest_ns = std::min(fastest_ns, measured_step_ns(*measured[around.back()].first));
    }
    MeanTimes means;
    for (size_t k : around) {
      const auto& [ranks, times] = measured[k];
      const auto step_ns = static_cast<double>(measured_step_ns(*ranks));
      if (step_ns <= kDisturbed * static_cast<double>(fastest_ns)) means.add(*ranks, times);
    }
    result.push_back(means.of(*measured[static_cast<size_t>(i)].first));
  }
  return result;
}

std::vector<StepPrediction> predict_steps(const std::vector<RankStep>& trace) {
  std::map<int64_t, std::vector<RankStep>> steps;
  size_t ranks = 0;
  for (const RankStep& rank : trace) {
    auto& step = steps[rank.step];
    step.push_back(rank);
    ranks = std::max(ranks, step.size());
  }
  std::erase_if(steps, [ranks](const auto& step) { return step.second.size() < ranks; });
  const std::vector<ReplayTimes> times = neighbour_times(steps);
  std::vector<StepPrediction> predictions;
  for (const auto& [number, step] : steps) {
    const ReplayTimes& of = times[predictions.size()];
    predictions.push_back({.step = number,
                           .measured_ns = measured_step_ns(step),
                           .predicted_ns = replay_step(step, of).step_ns});
  }
  return predictions;
}

int64_t measured_step_ns(const std::vector<RankStep>& ranks) {
  int64_t first = INT64_MAX;
  int64_t last = INT64_MIN;
  for (const RankStep& rank : ranks) {
    first = std::min(first, rank.start_ns);
    last = std::max(last, rank.end_ns);
  }
  return ranks.empty() ? 0 : last - first;
}

}  // namespace bagualu
