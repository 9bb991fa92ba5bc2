// One rank of a pipeline step: which actions it runs, in which order, under which plans. Start here
// to see how decisions, pipeline orders and dual-batch schedules meet. The runtime executes what
// the driver emits, tests and simulations replay it: there is one driver.
//
// Glossary
//   flight    a micro-batch in one virtual stage, from its first action to its last.
//   slot      the number under which a flight's actions are executed; reused.
//   partner   of a forward: the backward that runs beside it in a fused pair of passes.
//   boundary  bytes of a receive that was posted early, or of an output whose send is not awaited.
// Invariants
//   Every action is replayed, with all flights of the rank, before it is handed out. Beside a
//   forward a backward runs only if the replay of both, and then of the backward alone, fits the
//   budget on every rank of the expert group; likewise a weight gradient is put off only if that
//   fits. So the argument for the floor (docs/design.md section 10) needs neither.
//   The order of collectives depends on structure and on votes, never on this rank's loads or
//   times.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bagualu/provision/policy.h"
#include "bagualu/schedule/pipeline.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// A virtual stage that the rank holds. Owns: nothing.
struct RankStage {
  int stage = 0;  ///< in the model's order
  /// Its graph and costs, and its share of the rank's budgets.
  const ProvisionContext* context = nullptr;
  Policy* policy = nullptr;
};

/// What crosses to other ranks around a pass.
struct PassSends {
  std::vector<PipelinePass> post;   ///< passes whose input's receive is posted before this pass
  std::vector<PipelinePass> await;  ///< passes whose output's send is awaited before this pass
};

/// A backward pass through a stage, split or not; a weight gradient apart is none.
inline bool is_backward(PassKind kind) {
  return kind == PassKind::kBackward || kind == PassKind::kInputGrad;
}

/// What a rank is to do in a step.
struct RankProgram {
  std::vector<PipelinePass> passes;
  /// By pass: it and the next one, a forward and a backward or input gradient, run as one. May be
  /// empty.
  std::vector<bool> fused;
  /// By pass, and one more for the end of the step. May be empty: receives are posted when they are
  /// needed and sends awaited when the pass is over.
  std::vector<PassSends> sends;

  bool is_fused(size_t pass) const { return pass < fused.size() && fused[pass]; }
  /// The pass behind this one, or behind the pair that begins with it.
  size_t after(size_t pass) const { return pass + (is_fused(pass) ? 2 : 1); }
};

struct GateCounts {
  LayerLoad load;
  double load_imbalance = 1.0;  ///< hottest rank of the expert group over the mean
};

struct RankDecision {
  int slot = -1;
  int stage = -1;
  int microbatch = -1;
  int gate = -1;
  double load_imbalance = 1.0;
  Decision decision;
  std::vector<int> changed_units;  ///< given up by this decision, beyond the plan before it
  int64_t duration_ns = 0;         ///< whatever the host's decided() made of it
  /// Reached from here to the rank's next decision or its end.
  int64_t peak_bytes = 0;
};

/// Whoever carries out what the driver emits. A call that throws ends the step.
class RankHost {
 public:
  virtual ~RankHost() = default;
  virtual void open(int slot, int stage, int microbatch) = 0;
  /// `plan_of(slot)` of the driver is in force for these actions.
  virtual void run(const RankTimeline& actions) = 0;
  /// Requires: the gate's action has been run.
  virtual GateCounts counts(int slot, int layer) = 0;
  /// True if all ranks of the expert group say so. Called by all of them, in the same order.
  virtual bool agree(bool mine) = 0;
  virtual void close(int slot) = 0;

  /// `beside`: the other pass of a fused pair, or nullptr.
  virtual void begin_pass(const PipelinePass& /*pass*/, const PipelinePass* /*beside*/) {}
  virtual void end_pass(const PipelinePass& /*pass*/, const PipelinePass* /*beside*/) {}
  /// Around every call of a policy. A decision may be asked for again and the first one not used.
  virtual void deciding() {}
  virtual void decided(RankDecision& /*made*/) {}
};

/// Units: *_bytes without the rank's static ones, 0 = no limit.
struct RankOptions {
  int64_t activation_budget_bytes = 0;  ///< of all stages together
  int64_t host_budget_bytes = 0;
  bool stop_at_death = false;  ///< end at the first pass that exceeds a budget
  /// Issue the first reloads of a backward during the pass before it, with whatever bytes the
  /// budget leaves beyond what was decided.
  bool reload_ahead = true;
};

/// What became of one micro-batch in one virtual stage.
struct RankFlight {
  int stage = -1;
  int microbatch = -1;
  Plan plan;                 ///< at its end
  int64_t rest_bytes = 0;    ///< at the end of its forward
  int64_t exposed_ns = 0;    ///< of its plan, and of what it gave up while it rested
  int demotions = 0;         ///< storages given up by the time its backward begins
  bool repeat_step = false;  ///< a decision of its asked for the step to be repeated
  int64_t peak_bytes = 0;    ///< of the rank, while one of its passes ran
};

struct RankRun {
  MemoryReplay memory;  ///< all flights together
  std::vector<RankDecision> decisions;
  std::vector<RankFlight> flights;   ///< in order of their forwards
  std::vector<PipelinePass> deaths;  ///< passes that exceeded a budget
  int overlapped_segments = 0;
  int serialised_segments = 0;  ///< of fused passes, for want of memory on some rank
  int deferred_passes = 0;      ///< input gradients whose weight gradients were put off
  int undeferred_passes = 0;    ///< the order wanted it, the memory did not
};

class RankDriver {
 public:
  /// Requires: stages, their contexts, policies and graphs and the host outlive the driver.
  RankDriver(std::vector<RankStage> stages, const RankOptions& options, RankHost& host);
  ~RankDriver();

  /// Drives one step. Throws: what the host throws; the driver can be used again after that, the
  /// host's slots are the caller's to close.
  RankRun run(const RankProgram& program);

  const Plan& plan_of(int slot) const;
  /// Live bytes after everything that was handed out.
  const MemoryReplay& memory() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bagualu
