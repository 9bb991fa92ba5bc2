#include "bagualu/sim/run_replay.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cost/profile.h"
#include "bagualu/provision/rank_votes.h"

namespace bagualu {
namespace {

// The runtime's host arena takes large blocks in whole pages; decisions count their bytes alone.
constexpr int64_t kLargeBlockBytes = int64_t{64} << 10;
constexpr int64_t kPageBytes = 4096;

int64_t host_block_bytes(int64_t storage_bytes) {
  return storage_bytes < kLargeBlockBytes ? storage_bytes : round_up(storage_bytes, kPageBytes);
}

}  // namespace

class RunReplay::Rank final : public RankHost {
 public:
  Rank(const ModelSpec& model, const LoggedStart& start, int rank, const std::string& where)
      : rank_(rank), model_(model), setup_(start.setup) {
    setup_.rank = rank;
    stages_ = make_stages(model, setup_, start.scratch);
    program_ = make_program(setup_, setup_.shape.microbatches);
    forecast_ = forecast_of(stages_, program_, model, setup_);
    live_bytes_ = start.live_bytes.at(static_cast<size_t>(rank));
    const Json& profile = start.profiles[static_cast<size_t>(start.profile_of[rank])];
    for (auto& stage : stages_) stage->cost = costs_from_profile(stage->graph, profile, where);
    for (auto& stage : stages_) dependence_.emplace_back(stage->graph);
    set_policies(setup_);
  }

  void set_policies(const TrainingSetup& setup) {
    RankOptions options;
    stage_list_ = make_policies(stages_, model_, setup, forecast_, live_bytes_, options);
    driver_ = std::make_unique<RankDriver>(stage_list_, options, *this);
    make_recorder();
  }

  void set_counts_exchange_ns(int64_t exchange_ns) {
    counts_exchange_ns_ = exchange_ns;
    make_recorder();
  }

  void set_decision_times(DecisionTimes times) { decision_times_ = std::move(times); }

  // One run of the passes; a repeated step has two.
  bool run(const LoggedStep& logged, RankVotes& votes, bool programs, bool points,
           ReplayedRank& result) {
    logged_ = &logged;
    votes_ = &votes;
    recording_ = programs;
    points_ = points;
    result_ = &result;
    bytes_ = {};
    host_bytes_ = 0;
    slots_.clear();
    if (recording_) {
      recorder_->begin(*driver_, [this](int stage, int microbatch, int layer) {
        return counts_of(stage, microbatch, layer);
      });
    }
    const RankRun run = driver_->run(program_);
    if (recording_) result.program = recorder_->take();
    result.end_bytes = live_bytes_ + driver_->memory().live_bytes;
    result.died = result.died || !run.deaths.empty();
    for (const RankDecision& made : run.decisions) {
      result.decisions.push_back({made.stage, made.microbatch, made.gate});
      result.cache_hits += made.decision.cache_hit;
    }
    result.plans.assign(run.flights.size(), {});
    bool repeat = false;
    for (const RankFlight& flight : run.flights) {
      result.plans.at(entry(flight.stage, flight.microbatch)) = plan_letters(flight.plan);
      repeat = repeat || flight.repeat_step;
    }
    return repeat;
  }

  const TrainingSetup& setup() const { return setup_; }
  const std::vector<std::unique_ptr<TrainerStage>>& stages() const { return stages_; }

 private:
  struct Slot {
    int stage = -1;  ///< index of the rank's stages
    int number = -1;
    int microbatch = -1;
    MemoryTable table;
  };

  // Decisions keep the profile's times; programs have those of operators without exchanges.
  void make_recorder() {
    timed_costs_.clear();
    timed_contexts_.clear();
    std::vector<RankStage> timed = stage_list_;
    for (RankStage& stage : timed) {
      CostTable& cost = timed_costs_.emplace_back(*stage.context->cost);
      const Graph& graph = *stage.context->graph;
      for (const GateSpec& gate : graph.gates) {
        for (auto& [x, ns] : cost.forward[static_cast<size_t>(gate.op)].points) {
          ns = std::max<int64_t>(ns - counts_exchange_ns_, 0);
        }
      }
      timed_contexts_.push_back(*stage.context);
      timed_contexts_.back().cost = &cost;
      stage.context = &timed_contexts_.back();
    }
    const OverlapOrder order = training_order(setup_, setup_.shape.microbatches);
    recorder_ = std::make_unique<ProgramRecorder>(
        timed, static_cast<int>(setup_.shape.microbatches), send_plan(order),
        RecorderOptions{.static_bytes = live_bytes_, .exchange_counts = true});
  }

  int index_of(int stage) const {
    for (size_t s = 0; s < stages_.size(); ++s) {
      if (stages_[s]->number == stage) return static_cast<int>(s);
    }
    throw InternalError("a stage that is not here");
  }
  size_t entry(int stage, int microbatch) const {
    return static_cast<size_t>(microbatch) * stages_.size() + static_cast<size_t>(index_of(stage));
  }

  void open(int slot, int stage, int microbatch) override {
    const auto at = static_cast<size_t>(slot);
    if (slots_.size() <= at) slots_.resize(at + 1);
    const int index = index_of(stage);
    const Graph& graph = stages_[static_cast<size_t>(index)]->graph;
    const std::vector<LayerLoad> loads(static_cast<size_t>(graph.layers),
                                       balanced_load(model_, setup_));
    slots_[at] = {index, stage, microbatch, memory_table(graph, loads)};
    if (recording_) recorder_->open(slot, stage, microbatch);
  }

  void run(const RankTimeline& actions) override {
    for (const StageAction& of : actions) {
      const Slot& slot = slots_[static_cast<size_t>(of.slot)];
      const Graph& graph = stages_[static_cast<size_t>(slot.stage)]->graph;
      const int64_t host_before_bytes = bytes_.host_live_bytes;
      replay_action(graph, driver_->plan_of(of.slot), slot.table, of.action, bytes_);
      const int64_t host_change_bytes = bytes_.host_live_bytes - host_before_bytes;
      host_bytes_ += host_change_bytes < 0 ? -host_block_bytes(-host_change_bytes)
                                           : host_block_bytes(host_change_bytes);
      result_->host_peak_bytes = std::max(result_->host_peak_bytes, host_bytes_);
      if (points_) {
        result_->memory.push_back({live_bytes_ + bytes_.live_bytes, action_text(graph, of.action)});
      }
    }
    if (recording_) recorder_->run(actions);
  }

  GateCounts counts(int slot, int layer) override {
    Slot& of = slots_[static_cast<size_t>(slot)];
    const GateCounts counts = counts_of(of.number, of.microbatch, layer);
    update_layer(stages_[static_cast<size_t>(of.stage)]->graph,
                 dependence_[static_cast<size_t>(of.stage)], layer, counts.load, of.table);
    if (recording_) recorder_->counts(slot, layer);
    return counts;
  }

  GateCounts counts_of(int number, int microbatch, int layer) const {
    const Graph& graph = stages_[static_cast<size_t>(index_of(number))]->graph;
    size_t gate = 0;
    while (graph.gates.at(gate).layer != layer) ++gate;
    const size_t at = entry(number, microbatch);
    int64_t total = 0, hottest = 0;
    const int64_t members = setup_.layout.ep_size;
    const int64_t first = rank_ - setup_.layout.ep_rank(rank_);
    for (int64_t i = 0; i < members; ++i) {
      const LoggedRank& other = logged_->ranks.at(static_cast<size_t>(first + i));
      const int64_t rows = other.loads.at(at).at(gate).rows;
      total += rows;
      hottest = std::max(hottest, rows);
    }
    // As the runtime computes it, to the last bit.
    return {logged_->ranks[static_cast<size_t>(rank_)].loads.at(at).at(gate),
            total == 0 ? 1.0
                       : static_cast<double>(hottest) * static_cast<double>(members) /
                             static_cast<double>(total)};
  }

  bool agree(bool mine) override {
    if (recording_) recorder_->agree(mine);
    return votes_->agree(mine);
  }

  void decided(RankDecision& made) override {
    if (!recording_) return;
    const auto found = decision_times_.find({made.stage, made.microbatch, made.gate});
    if (found != decision_times_.end()) recorder_->decide(made.slot, found->second);
  }

  void close(int slot) override {
    if (recording_) recorder_->close(slot);
  }

  void begin_pass(const PipelinePass&, const PipelinePass*) override {
    bytes_.peak_bytes = bytes_.live_bytes;
  }

  void end_pass(const PipelinePass&, const PipelinePass*) override {
    const int64_t peak_bytes = live_bytes_ + bytes_.peak_bytes;
    result_->passes.push_back({peak_bytes, live_bytes_ + bytes_.live_bytes});
    result_->peak_bytes = std::max(result_->peak_bytes, peak_bytes);
  }

  const int rank_;
  const ModelSpec& model_;
  TrainingSetup setup_;
  std::vector<std::unique_ptr<TrainerStage>> stages_;
  std::vector<LoadDependence> dependence_;
  RankProgram program_;
  MemoryForecast forecast_;
  int64_t live_bytes_ = 0;  ///< part of every level
  std::vector<RankStage> stage_list_;
  std::unique_ptr<RankDriver> driver_;

  const LoggedStep* logged_ = nullptr;
  RankVotes* votes_ = nullptr;
  std::deque<CostTable> timed_costs_;
  std::deque<ProvisionContext> timed_contexts_;
  int64_t counts_exchange_ns_ = 0;
  DecisionTimes decision_times_;
  std::unique_ptr<ProgramRecorder> recorder_;
  bool recording_ = false;
  bool points_ = false;
  ReplayedRank* result_ = nullptr;
  MemoryReplay bytes_;
  int64_t host_bytes_ = 0;  ///< in blocks
  std::vector<Slot> slots_;
};

RunReplay::RunReplay(const ModelSpec& model, const LoggedStart& start, const std::string& where)
    : group_size_(start.setup.layout.ep_size) {
  for (int rank = 0; rank < start.setup.layout.world_size; ++rank) {
    ranks_.push_back(std::make_unique<Rank>(model, start, rank, where));
  }
}

RunReplay::~RunReplay() = default;

void RunReplay::set_counts_exchange_ns(int64_t exchange_ns) {
  for (auto& rank : ranks_) rank->set_counts_exchange_ns(exchange_ns);
}

void RunReplay::set_decision_times(std::vector<DecisionTimes> times) {
  for (size_t r = 0; r < ranks_.size(); ++r) {
    ranks_[r]->set_decision_times(std::move(times.at(r)));
  }
}

const std::vector<std::unique_ptr<TrainerStage>>& RunReplay::stages(int rank) const {
  return ranks_[static_cast<size_t>(rank)]->stages();
}

ReplayedStep RunReplay::step(const LoggedStep& logged, bool programs) {
  ReplayedStep result;
  result.ranks.resize(ranks_.size());
  drive(logged, programs, result);
  if (!result.repeated) return result;
  // All ranks throw the step away and run it once more; policies begin anew afterwards.
  for (auto& rank : ranks_) {
    TrainingSetup setup = rank->setup();
    setup.policy = "full-recompute";
    setup.policy_options = {};
    rank->set_policies(setup);
  }
  drive(logged, programs, result);
  result.repeated = true;
  for (auto& rank : ranks_) rank->set_policies(rank->setup());
  return result;
}

void RunReplay::drive(const LoggedStep& logged, bool programs, ReplayedStep& result) {
  const auto members = static_cast<size_t>(group_size_);
  std::vector<char> repeats(ranks_.size(), 0);
  for (size_t first = 0; first < ranks_.size(); first += members) {
    RankVotes votes(members);
    drive_ranks(members, votes, [&](size_t member) {
      const size_t rank = first + member;
      repeats[rank] =
          ranks_[rank]->run(logged, votes, programs, static_cast<int>(rank) == logged.memory_rank,
                            result.ranks[rank]);
    });
  }
  result.repeated = std::any_of(repeats.begin(), repeats.end(), [](char one) { return one != 0; });
}

}  // namespace bagualu
