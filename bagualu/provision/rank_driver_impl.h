// Inside of RankDriver, in three files: passes and pairs (rank_driver.cpp), flights and what is
// emitted for them (rank_emit.cpp), decisions and what fits (rank_decide.cpp).
#pragma once

#include <functional>
#include <list>
#include <vector>

#include "bagualu/provision/rank_driver.h"
#include "bagualu/provision/rank_flight.h"
#include "bagualu/provision/rank_memory.h"
#include "bagualu/provision/rank_segment.h"
#include "bagualu/schedule/dual_batch_cache.h"

namespace bagualu {

class RankDriver::Impl {
  using Phase = Flight::Phase;

 public:
  Impl(std::vector<RankStage> stages, const RankOptions& options, RankHost& host);
  RankRun run(const RankProgram& program);
  const Flight& flight_of(int slot) const;
  const MemoryReplay& memory() const { return memory_.total(); }
  const RankStage& stage(const Flight& one) const;

 private:
  // ---- flights (rank_emit.cpp) ----
  const Graph& graph(const Flight& one) const { return *stage(one).context->graph; }
  int stage_index(const PipelinePass& pass) const;
  Flight* find(const PipelinePass& pass);
  Flight& at(const PipelinePass& pass);
  Flight& open(const PipelinePass& pass);
  int free_slot() const;
  void close_if_over(Flight& one);

  // ---- what is emitted (rank_emit.cpp) ----
  // Replays what was appended to timeline_ for this flight, and keeps it for the host.
  void emit(const Flight& one);
  void hand_out(const Flight& one, const Action& action);
  void flush();
  bool fits(const MemoryReplay& memory) const;
  void note_peak();

  // ---- neighbours (rank_emit.cpp) ----
  // Receives to be posted and sends to be awaited before a pass.
  void prepare(size_t pass);
  void await_send(const PipelinePass& pass);
  // Posts the receive of a pass's input.
  void post(const PipelinePass& pass);
  // The input of a pass that is about to run, if its receive was not posted earlier.
  void receive(Flight& one, const PipelinePass& pass);
  // A message between two stages of this rank is over once both halves are issued.
  void end_send_of_neighbour_here(const PipelinePass& pass);
  // Without a plan of sends an output is awaited as soon as it is sent.
  void sent(Flight& one, PassKind kind);
  void finish();

  // ---- passes (rank_driver.cpp) ----
  void single();
  // A forward beside a backward, gate by gate, as long as all ranks agree.
  void pair();
  int backward_first(Flight& one, RankDecision decision, const PipelinePass& backward_pass,
                     Flight& partner, WeightGrads weight_grads);
  // The rest of a forward, a decision first.
  void run_forward_from(Flight& one, int gate);
  Flight& begin_forward(const PipelinePass& pass);
  // Up to the next gate or the end. Returns: the gate, or -1.
  int run_forward(Flight& one);
  void learn(Flight& one, int gate);
  void end_forward(Flight& one);
  void settle(Flight& one) const;
  Flight& begin_backward(const PipelinePass& pass);
  void run_backward(Flight& one, bool defer);
  void end_backward(Flight& one);
  void finish_partner(Flight& beside, WeightGrads weight_grads);
  void run_weight_grads(Flight& one);
  // Gradients are summed in the order of micro-batches, whatever is put off: older ones are added
  // before what the rest of this backward adds itself.
  void add_older_first(const Flight& one, bool defer);

  // ---- memory (rank_decide.cpp) ----
  // Whether the weight gradients of this backward may be put off. Whatever waits already is
  // computed first if the backward would not even fit whole.
  bool deferral_fits(Flight& one);
  bool backward_fits(const Flight& one, bool defer) const;
  bool backward_fits(const Flight& one, MicrobatchState state, bool defer,
                     MemoryReplay memory) const;
  Timeline rest_of_backward(const Flight& one, MicrobatchState state, bool defer) const;
  void run_all_weight_grads();
  bool weight_grads_wait() const;
  std::vector<int> resting_with_drains() const;
  // Offloads of a forward have had a whole pass to run in.
  void drain_what_rested();
  Flight* next_to_reload();
  void prefetch_next(const std::function<void(MemoryReplay&)>& rest_of_pass);

  // ---- decisions (rank_decide.cpp) ----
  RankDecision decide(Flight& one, int gate, const Flight* partner);
  RankDecision ask(const Flight& one, int gate, const Flight* partner);
  // The other flights of the same stage. A partner whose backward has begun can no longer be
  // demoted; it is gone before this micro-batch's own backward.
  void describe_others(const Flight& one, const Flight* partner, GateInput& input) const;
  int64_t posted_bytes(const Flight& one) const;
  // The stage's passes up to the backward of this micro-batch, and who is in flight then.
  void look_ahead(const Flight& one, const Flight* partner, GateInput& input) const;
  void record(const Flight& one, RankDecision made);
  void apply(Flight& one, RankDecision made);
  void demote(Flight& resting, Plan plan);

  // ---- pairs (rank_driver.cpp) ----
  // Runs the forward to its next gate beside a part of the backward, if that fits on every rank.
  // Returns: false if it did not; nothing has happened then. Sets `gate` to the one reached.
  bool advance_both(Flight& one, RankDecision& made, const PipelinePass& backward_pass,
                    Flight& beside, WeightGrads weight_grads, int& gate);
  void replay_segment(const Flight& one, const Plan& plan, const Flight& beside,
                      const OverlappedSegment& segment, MemoryReplay& memory) const;
  bool segment_fits(const Flight& one, const Plan& plan, const Flight& beside,
                    const OverlappedSegment& segment) const;

  const std::vector<RankStage> stages_;
  const RankOptions options_;
  RankHost& host_;
  std::vector<LoadDependence> dependence_;
  std::vector<MemoryTable> balanced_;
  std::vector<int64_t> calm_rest_bytes_, least_rest_bytes_, least_forward_bytes_;
  const RankProgram* program_ = nullptr;
  size_t pass_ = 0;
  std::list<Flight> flights_;  ///< in the order of their forwards
  std::vector<int> drain_later_;
  Timeline timeline_;     ///< appended, not replayed yet
  RankTimeline actions_;  ///< replayed, not run yet
  RankMemory memory_;
  ScheduleCache schedules_;
  double load_imbalance_ = 1.0;
  RankRun run_;
};

}  // namespace bagualu
