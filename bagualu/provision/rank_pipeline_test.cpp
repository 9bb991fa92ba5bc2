// All ranks of a pipeline, each driven by its own driver in its own thread: passes, votes, sends
// and budgets together. Sends and receives meet as they do on a network: a send ends only once its
// receive is posted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>

#include "bagualu/provision/floor.h"
#include "bagualu/provision/rank_program.h"
#include "bagualu/provision/rank_votes.h"
#include "bagualu/provision/test_setup.h"
#include "bagualu/provision/verify_timeline.h"

namespace bagualu {
namespace {

using testing::IsEmpty;

/// Messages between stages: which halves were issued.
class Network {
 public:
  using Key = std::tuple<int, bool, int, int>;  ///< lane, is gradient, receiving stage, micro-batch

  void issue(const Key& key, bool send) {
    const std::lock_guard lock(mutex_);
    Halves& halves = messages_[key];
    EXPECT_FALSE(send ? halves.sent : halves.posted);
    (send ? halves.sent : halves.posted) = true;
    changed_.notify_all();
  }
  // Returns: false if the other half did not come.
  bool await(const Key& key, bool send) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] {
      const Halves& halves = messages_[key];
      return send ? halves.posted : halves.sent;
    });
  }

 private:
  struct Halves {
    bool sent = false, posted = false;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, Halves> messages_;
};

struct PipelineCase {
  PipelineKind kind = PipelineKind::k1F1B;
  int pp = 2, vpp = 1, microbatches = 4, ep = 2;
  bool overlap = false;
  bool tight = false;  ///< budgets near the floor
};

std::string name_of(const PipelineCase& of) {
  return std::string(pipeline_kind_name(of.kind)) + " pp " + std::to_string(of.pp) + " vpp " +
         std::to_string(of.vpp) + " m " + std::to_string(of.microbatches) +
         (of.overlap ? " overlap" : "") + (of.tight ? " tight" : "");
}

/// A stage's graph, its costs and what decisions about it see.
struct StageSetup {
  Graph graph;
  CostTable cost;
  ProvisionContext context;
  std::unique_ptr<Policy> policy;
};

class Rank final : public RankHost {
 public:
  Rank(const SmallModel& model, const PipelineCase& of, int pp_rank, int lane, Network& network,
       RankVotes& votes, unsigned seed)
      : lane_(lane), network_(network), votes_(votes), random_(seed) {
    ParallelLayout layout;
    layout.world_size = of.pp * of.ep;
    layout.ep_size = of.ep;
    layout.pp_size = of.pp;
    layout.virtual_per_rank = of.vpp;
    layout.pipeline = of.kind;
    const OverlapOrder order =
        make_overlap_order(of.kind, of.pp, of.vpp, of.microbatches, of.overlap);
    program_ = rank_program(order, send_plan(order), pp_rank);
    std::vector<int> numbers;
    std::vector<const Graph*> graphs;
    const std::vector<StageSlice> slices = stage_slices(model.spec, layout);
    for (int64_t number : layout.stages_of_rank(pp_rank)) {
      auto stage = std::make_unique<StageSetup>();
      NativeGraphOptions options = model.graph_options;
      options.stage = slices[static_cast<size_t>(number)];
      options.split_weight_grads = of.overlap || of.kind != PipelineKind::k1F1B;
      stage->graph = build_native_graph(model.spec, options);
      stage->cost = roofline_costs(stage->graph, model.spec, options, model.system);
      numbers.push_back(static_cast<int>(number));
      graphs.push_back(&stage->graph);
      stages_.push_back(std::move(stage));
    }
    const int64_t message = model.graph_options.seq * model.spec.hidden * 4;
    floor_ = rank_floor(program_, numbers, graphs, model.context.worst_case, message);
    std::vector<int64_t> calm;
    for (const Floor& floor : floor_.stages) calm.push_back(3 * floor.activation_bytes);
    options_.activation_budget_bytes =
        of.tight ? floor_.activation_bytes + floor_.activation_bytes / 10 : 0;
    const auto budgets = stage_budgets(floor_, calm, options_.activation_budget_bytes);
    for (size_t s = 0; s < stages_.size(); ++s) {
      ProvisionContext& context = stages_[s]->context;
      context = model.context;
      context.graph = &stages_[s]->graph;
      context.cost = &stages_[s]->cost;
      context.activation_budget_bytes = budgets[s];
      stages_[s]->policy = make_policy("adaptive", context, {});
      list_.push_back({numbers[s], &context, stages_[s]->policy.get()});
    }
    worst_ = model.context.worst_case;
  }

  void drive() {
    driver_ = std::make_unique<RankDriver>(list_, options_, *this);
    run_result = driver_->run(program_);
  }

  void open(int slot, int stage, int microbatch) override {
    EXPECT_EQ(slots_.count(slot), 0u);
    slots_[slot] = {stage, microbatch};
    most_slots_ = std::max(most_slots_, slots_.size());
  }
  void run(const RankTimeline& actions) override {
    for (const StageAction& one : actions) {
      const auto [stage, microbatch] = slots_.at(one.slot);
      const Graph& graph = graph_of(stage);
      timelines_[{stage, microbatch}].push_back(one.action);
      if (!names_op(one.action.kind)) continue;
      const OpSpec& op = graph.ops[static_cast<size_t>(one.action.id)];
      if (one.action.kind == ActionKind::kWeightGrad ||
          (one.action.kind == ActionKind::kBackward && op.has_wgrad)) {
        sums_[{stage, one.action.id}].push_back(microbatch);
      }
      if (op.kind == OpKind::kStageRecv || op.kind == OpKind::kStageSend) {
        cross(op, one.action.kind, stage, microbatch);
      } else if (issues_collective(op, one.action.kind)) {
        communication.push_back(std::to_string(stage) + "." + std::to_string(microbatch) + " " +
                                action_text(graph, one.action));
      }
    }
  }
  GateCounts counts(int, int) override {
    const int64_t rows = std::uniform_int_distribution<int64_t>(0, worst_.rows)(random_);
    return {{rows, std::min(rows, worst_.piece_rows)}, 1.0};
  }
  bool agree(bool mine) override { return votes_.agree(mine); }
  void close(int slot) override { slots_.erase(slot); }

  void expect_sound(const PipelineCase& of) {
    const size_t flights = stages_.size() * static_cast<size_t>(of.microbatches);
    EXPECT_TRUE(run_result.deaths.empty()) << name_of(of);
    EXPECT_EQ(run_result.memory.live_bytes, 0) << name_of(of);
    EXPECT_EQ(timelines_.size(), flights) << name_of(of);
    EXPECT_TRUE(slots_.empty());
    EXPECT_LE(most_slots_, static_cast<size_t>(most_flights(program_))) << name_of(of);
    if (options_.activation_budget_bytes > 0) {
      EXPECT_LE(run_result.memory.peak_bytes, options_.activation_budget_bytes) << name_of(of);
    }
    // Each gradient is summed in one order, whatever was put off: else its last bits would change.
    for (const auto& [key, microbatches] : sums_) {
      EXPECT_EQ(microbatches.size(), static_cast<size_t>(of.microbatches));
      EXPECT_TRUE(std::is_sorted(microbatches.begin(), microbatches.end()))
          << name_of(of) << " " << graph_of(key.first).ops[static_cast<size_t>(key.second)].name;
    }
    for (const auto& [key, timeline] : timelines_) {
      EXPECT_THAT(verify_timeline(graph_of(key.first), timeline), IsEmpty())
          << name_of(of) << " stage " << key.first << " micro-batch " << key.second;
    }
  }

  RankRun run_result;
  std::vector<std::string> communication;

 private:
  const Graph& graph_of(int stage) const {
    for (size_t s = 0; s < list_.size(); ++s) {
      if (list_[s].stage == stage) return stages_[s]->graph;
    }
    throw std::runtime_error("no such stage");
  }

  // The router's forward exchanges counts.
  static bool issues_collective(const OpSpec& op, ActionKind kind) {
    if (op.kind == OpKind::kRouter) return kind == ActionKind::kForward;
    return op.stream == Stream::kComm && kind != ActionKind::kForwardEnd &&
           kind != ActionKind::kBackwardEnd;
  }

  void cross(const OpSpec& op, ActionKind kind, int stage, int microbatch) {
    const bool receives_forward = op.kind == OpKind::kStageRecv;
    const bool forward = kind == ActionKind::kForward || kind == ActionKind::kForwardEnd;
    const bool end = kind == ActionKind::kForwardEnd || kind == ActionKind::kBackwardEnd;
    const bool send = receives_forward != forward;
    const int to = send ? (forward ? stage + 1 : stage - 1) : stage;
    const Network::Key key{lane_, !forward, to, microbatch};
    if (!end) return network_.issue(key, send);
    EXPECT_TRUE(network_.await(key, send))
        << (send ? "send to" : "receive of") << " stage " << to << " micro-batch " << microbatch;
  }

  const int lane_;
  Network& network_;
  RankVotes& votes_;
  std::mt19937 random_;
  LayerLoad worst_;
  RankProgram program_;
  RankFloor floor_;
  RankOptions options_;
  std::vector<std::unique_ptr<StageSetup>> stages_;
  std::vector<RankStage> list_;
  std::unique_ptr<RankDriver> driver_;
  std::map<int, std::pair<int, int>> slots_;  ///< stage and micro-batch
  std::map<std::pair<int, int>, Timeline> timelines_;
  std::map<std::pair<int, int>, std::vector<int>> sums_;  ///< by stage and op: micro-batches added
  size_t most_slots_ = 0;
};

void drive_all(const PipelineCase& of, unsigned seed) {
  const SmallModel model({.layers = 8, .ep_size = of.ep, .dense_first = true, .shared = true});
  Network network;
  std::vector<std::unique_ptr<RankVotes>> votes;
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int p = 0; p < of.pp; ++p) {
    votes.push_back(std::make_unique<RankVotes>(static_cast<size_t>(of.ep)));
    for (int lane = 0; lane < of.ep; ++lane) {
      ranks.push_back(std::make_unique<Rank>(model, of, p, lane, network, *votes.back(),
                                             seed + static_cast<unsigned>(ranks.size())));
    }
  }
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&rank] { rank->drive(); });
  for (std::thread& thread : threads) thread.join();
  for (size_t r = 0; r < ranks.size(); ++r) {
    ranks[r]->expect_sound(of);
    const size_t first = r / static_cast<size_t>(of.ep) * static_cast<size_t>(of.ep);
    EXPECT_EQ(ranks[r]->communication, ranks[first]->communication) << name_of(of) << " rank " << r;
  }
}

TEST(RankPipeline, EveryOrderRunsToItsEndWithinEveryBudget) {
  unsigned seed = 1;
  for (const PipelineKind kind :
       {PipelineKind::k1F1B, PipelineKind::kInterleaved, PipelineKind::kZbH1, PipelineKind::kZbV,
        PipelineKind::kDualPipeV}) {
    for (const int pp : {1, 2, 4}) {
      for (const int microbatches : {1, 7}) {
        for (const bool overlap : {false, true}) {
          for (const bool tight : {false, true}) {
            const int vpp = kind == PipelineKind::kInterleaved ? 2 : 1;
            drive_all({kind, pp, vpp, microbatches, 2, overlap, tight}, seed += 100);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace bagualu
