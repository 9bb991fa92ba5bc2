#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "bagualu/provision/rank_program.h"
#include "bagualu/schedule/sends.h"
#include "bagualu/sim/step_program.h"

namespace bagualu {

struct RecorderOptions {
  int64_t static_bytes = 0;
  /// Ranks of an expert group exchange counts behind every router, and votes, and go on when all
  /// have: an exchange without bytes at each.
  bool exchange_counts = false;
  /// Rows of a load over those that the exchange brings to one rank: the experts' tensor-parallel
  /// size, whose ranks gather what each received.
  int64_t rows_per_received = 1;
};

/// A host of the rank driver that executes nothing and compiles what the driver emits, for any
/// graph, native or megatron.
///   forward, backward, both gradients apart, recompute, encode, decode of a compute operator
///     -> kCompute; the time of a backward includes what it rebuilds in pieces
///   the same of an exchange (Stream::kComm) -> kIssue, and its end -> kAwait
///   stage_recv, stage_send -> kIssue and kAwait of a message numbered as in the SendPlan; between
///     two stages of this rank nothing but bytes
///   offload, drain, reload, await -> kIssue and kAwait of a copy
///   free, drop -> bytes at the end of the instruction before
/// Bytes change as replay_memory() changes them, so that the program's peak at the recorded loads
/// is RankRun::memory.peak_bytes. Where phases of a workspace compete, the one that is largest at
/// the recorded load counts at every load (megatron graphs have one).
/// Names are those of action_text(): "backward layer3.expert_fc1".
class ProgramRecorder final : public RankHost {
 public:
  using CountsOf = std::function<GateCounts(int stage, int microbatch, int layer)>;
  /// RankHost::agree().
  using Agree = std::function<bool(bool mine)>;

  /// Requires: stages (as the driver has them), their contexts, graphs and costs outlive this.
  ProgramRecorder(std::vector<RankStage> stages, int microbatches, const SendPlan& sends,
                  const RecorderOptions& options);
  ~ProgramRecorder() override;

  /// Micro-batches times layers with a gate on this rank.
  int32_t cells() const;
  /// microbatch * gates + place of the layer among those with a gate, stages in the rank's order.
  /// Returns: -1 for a layer without one.
  int32_t cell(int stage, int microbatch, int layer) const;

  /// Before every RankDriver::run(). Without `agree` the rank decides alone.
  void begin(const RankDriver& driver, CountsOf counts_of, Agree agree = {});
  /// What was recorded since begin(); once.
  StepProgram take();
  /// The compute thread decides for that long; nothing else records a decision.
  /// Requires: the slot is open.
  void decide(int slot, int64_t ns);

  void open(int slot, int stage, int microbatch) override;
  void run(const RankTimeline& actions) override;
  GateCounts counts(int slot, int layer) override;
  bool agree(bool mine) override;
  void close(int slot) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bagualu
