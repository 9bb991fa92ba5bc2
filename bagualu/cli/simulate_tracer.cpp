// The simulator as it is: sim's functions, and which ranks of an iteration are worth looking at.

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "bagualu/cli/simulate_trace.h"
#include "bagualu/sim/hottest_rank.h"

namespace bagualu {
namespace {

/// Looks at one iteration of a scenario under a policy, replica by replica.
class IterationTracer {
 public:
  IterationTracer(const Scenario& scenario, const SimPolicy& policy, const SimOptions& options,
                  int64_t iteration)
      : scenario_(scenario), tracer_(scenario, policy, options) {
    traced_.iteration = iteration;
    const HottestRank hottest = hottest_rank(scenario, tracer_.model(), iteration);
    hottest_ = hottest.place;
    as_hot_ = hottest.as_hot;
    traced_.imbalance = hottest.imbalance;
    traced_.hottest_rank = rank_of_place(scenario.job, members(), hottest.place);
  }

  /// Of the hottest replica.
  TracedIteration heaviest() {
    const SimReplicaResult result = replica(hottest_.replica, {});
    std::vector<RankPlace> places;
    for (int pp_rank = 0; pp_rank < scenario_.job.layout.pp; ++pp_rank) {
      const auto begin = result.by_member.begin() + pp_rank * result.members;
      const auto heaviest = std::max_element(
          begin, begin + result.members, [](const SimMemberResult& a, const SimMemberResult& b) {
            return a.peak_bytes < b.peak_bytes;
          });
      places.push_back({hottest_.replica, pp_rank, static_cast<int>(heaviest - begin)});
    }
    look_where_most_is_held(result);
    places.push_back(hottest_);
    return trace(places);
  }

  TracedIteration chosen(const std::vector<int64_t>& ranks) {
    std::vector<RankPlace> places;
    for (const int64_t rank : ranks) {
      places.push_back(place_of_rank(scenario_.job, members(), rank));
    }
    return trace(places);
  }

 private:
  /// A member that is as hot on several stages gives up something on the one that is fullest.
  void look_where_most_is_held(const SimReplicaResult& result) {
    const auto peak_bytes = [&](int pp_rank) {
      const int64_t at = pp_rank * result.members + hottest_.member;
      return result.by_member[static_cast<size_t>(at)].peak_bytes;
    };
    for (const int pp_rank : as_hot_) {
      if (peak_bytes(pp_rank) > peak_bytes(hottest_.pp_rank)) hottest_.pp_rank = pp_rank;
    }
    traced_.hottest_rank = rank_of_place(scenario_.job, members(), hottest_);
  }

  TracedIteration trace(const std::vector<RankPlace>& places) {
    traced_.ranks.resize(places.size());
    std::map<int64_t, std::vector<size_t>> by_replica;
    for (size_t i = 0; i < places.size(); ++i) by_replica[places[i].replica].push_back(i);
    for (const auto& [number, chosen] : by_replica) {
      std::vector<RankPlace> of_replica;
      for (const size_t i : chosen) of_replica.push_back(places[i]);
      replica(number, of_replica);
      for (size_t i = 0; i < chosen.size(); ++i) {
        traced_.ranks[chosen[i]] = std::move(made_[i]);
      }
    }
    return std::move(traced_);
  }

  int64_t members() const { return tracer_.model().members(); }

  /// Leaves the ranks in made_.
  SimReplicaResult replica(int64_t number, const std::vector<RankPlace>& places) {
    std::vector<SimTrace> wanted;
    for (const RankPlace& place : places) wanted.push_back({place.pp_rank, place.member, {}});
    SimTracedReplica replica = tracer_.trace(traced_.iteration, number, std::move(wanted));
    traced_.end_ns = std::max(traced_.end_ns, replica.result.end_ns);
    traced_.died = traced_.died || replica.result.died;
    made_.clear();
    for (size_t i = 0; i < places.size(); ++i) {
      const size_t at =
          static_cast<size_t>(places[i].pp_rank * replica.result.members + places[i].member);
      TracedRank rank;
      rank.rank = rank_of_place(scenario_.job, members(), places[i]);
      rank.place = places[i];
      rank.program = replica.programs[i];
      rank.static_bytes = rank.program->static_bytes;
      rank.peak_bytes = replica.result.by_member[at].peak_bytes;
      rank.events = std::move(replica.traces[i].events);
      made_.push_back(std::move(rank));
    }
    return std::move(replica.result);
  }

  const Scenario& scenario_;
  ReplicaTracer tracer_;
  RankPlace hottest_;
  std::set<int> as_hot_;  ///< pipeline ranks
  TracedIteration traced_;
  std::vector<TracedRank> made_;
};

}  // namespace

Simulator make_simulator() {
  Simulator simulator;
  simulator.run = simulate_job;
  simulator.trace = [](const Scenario& scenario, const SimPolicy& policy, const SimOptions& options,
                       int64_t iteration, const std::vector<int64_t>& ranks) {
    IterationTracer tracer(scenario, policy, options, iteration);
    return ranks.empty() ? tracer.heaviest() : tracer.chosen(ranks);
  };
  return simulator;
}

}  // namespace bagualu
