#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/runtime/executor.h"
#include "bagualu/schedule/step_trace.h"

namespace bagualu {

/// Records a rank's steps as the executor runs them, in the form of schedule/step_trace.h.
/// Frees, drops and gates take no time and are left out.
/// Cost: two looks at the clock and one append per action; text is made in take().
/// Requires: executor, engine and graphs outlive it.
class StepRecorder final : public ExecutorObserver {
 public:
  /// Watches until its destructor. dp_rank: tells the pipelines of a job apart.
  StepRecorder(Executor& executor, TransferEngine& transfers, int rank, int dp_rank);
  ~StepRecorder() override;
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  /// Forgets what was recorded; what comes now belongs to `step`.
  void begin(int64_t step);
  /// What the executing thread does outside the executor: decisions, sums of gradients. `comm`: the
  /// collective that the phase issued and awaited, if any, and the communicator it went through.
  void add_phase(StepAction action, const std::string& name, int64_t start_ns, int64_t end_ns,
                 const Communicator* comm = nullptr);
  /// The step since begin(). Requires: every copy was awaited, every slot closed.
  RankStep take();

  void on_open(int slot, const ExecutorStage& stage, const MicrobatchInput& input) override;
  void on_action(const StageAction& action, int64_t begin_ns, int64_t end_ns) override;
  void on_comm(const StageAction& action, const CommTimes& times) override;
  void on_copy(const StageAction& action, CopyTicket ticket, int64_t bytes) override;

 private:
  struct Passage {
    const Graph* graph = nullptr;
    int stage = -1;
    int microbatch = -1;
  };
  struct Happened {
    StageAction action;
    int passage = -1;
    int64_t begin_ns = 0, end_ns = 0;
  };
  struct Comm {
    StageAction action;  ///< that issued it
    int passage = -1;
    CommTimes times;
  };
  struct Copy {
    StageAction action;
    int passage = -1;
    CopyTicket ticket;
    int64_t size_bytes = 0;
  };
  struct Phase {
    StepEvent event;
    StepTransfer transfer;  ///< no key: none
    size_t before = 0;      ///< the action that it precedes
  };
  class Writer;

  Executor& executor_;
  TransferEngine& transfers_;
  const int rank_;
  const int dp_rank_;
  int64_t step_ = 0;
  int64_t begin_ns_ = 0;
  std::vector<int> open_;  ///< passage by slot, -1 = none
  std::vector<Passage> passages_;
  std::vector<Happened> happened_;
  std::vector<Comm> comms_;
  std::vector<Copy> copies_;
  std::vector<Phase> phases_;
};

}  // namespace bagualu
