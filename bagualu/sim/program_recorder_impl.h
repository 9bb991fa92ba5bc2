// Inside of ProgramRecorder, in two files: what the driver calls and instructions
// (program_recorder.cpp), bytes and times of instructions (program_prices.cpp).
#pragma once

#include <array>
#include <map>
#include <tuple>
#include <vector>

#include "bagualu/sim/program_recorder.h"
#include "bagualu/sim/program_writer.h"

namespace bagualu {

class ProgramRecorder::Impl {
 public:
  Impl(std::vector<RankStage> stages, int microbatches, const SendPlan& sends,
       const RecorderOptions& options);

  void begin(const RankDriver& driver, CountsOf counts_of, Agree agree);
  StepProgram take() { return writer_.take(); }
  void open(int slot, int stage, int microbatch);
  void run(const StageAction& action);
  void decide(int slot, int64_t ns);
  GateCounts counts(int slot, int layer);
  bool agree(bool mine);

  int32_t gates() const { return gates_; }
  int microbatches() const { return microbatches_; }
  int32_t cell(int stage, int microbatch, int layer) const {
    return cell_of(tables_[static_cast<size_t>(index_of(stage))], microbatch, layer);
  }

 private:
  static constexpr size_t kActionKinds = static_cast<size_t>(ActionKind::kWeightGrad) + 1;

  /// A stage with what is looked up for its operators and storages again and again.
  struct StageTables {
    int stage = -1;
    const Graph* graph = nullptr;
    const CostTable* cost = nullptr;
    std::vector<int32_t> gate_of;  ///< by layer: place among the rank's gates, or -1
    std::array<std::vector<int32_t>, kActionKinds> times;  ///< by op; -1: not asked for yet
    std::array<std::vector<int32_t>, kActionKinds> names;  ///< by id; -1: not in this program
  };

  struct SlotState {
    int stage = -1;  ///< index of the tables
    int microbatch = -1;
    std::vector<int32_t> copies;  ///< by storage: its transfer under way
    struct Communication {
      int op = -1;
      bool backward = false;
      int32_t transfer = -1;
    };
    std::vector<Communication> under_way;
  };

  int index_of(int stage) const;
  int32_t cell_of(const StageTables& of, int microbatch, int layer) const {
    if (layer < 0) return -1;
    const int32_t gate = of.gate_of[static_cast<size_t>(layer)];
    return gate < 0 ? -1 : microbatch * gates_ + gate;
  }
  int32_t cell_of_op(int op) const {
    return cell_of(*of_, slot_->microbatch, graph().ops[static_cast<size_t>(op)].layer);
  }
  int32_t cell_of_storage(int s) const {
    return cell_of(*of_, slot_->microbatch, graph().storages[static_cast<size_t>(s)].layer);
  }
  const Graph& graph() const { return *of_->graph; }
  LayerLoad load(int32_t cell) const {
    return cell < 0 ? LayerLoad{} : loads_[static_cast<size_t>(cell)];
  }

  // ---- bytes ----
  void add_storage(ByteSum& sum, int storage, int sign) {
    sum.add(graph().storages[static_cast<size_t>(storage)].bytes, cell_of_storage(storage), sign,
            graph().tokens);
  }
  void add_piece(int storage);
  /// Taken at the start, returned at the end.
  void add_workspace(const Workspace& workspace, int32_t cell);
  void add_passing(const ByteFormula& formula, int32_t cell);
  void create(const OpSpec& op);
  void create_gradients(const OpSpec& op, bool split);
  void make_again(const OpSpec& op);
  void bytes_of_pass(const Action& action);
  int64_t encoded_bytes(int storage) const;

  // ---- instructions ----
  void compute(const Action& action);
  void communicate(const Action& action);
  void end_communication(const Action& action);
  void exchange_counts(const Action& action);
  void copy_out(const Action& action);
  void copy_in(const Action& action);
  void await_copy(const Action& action);
  void recode(const Action& action);
  SimInstruction instruction(SimStep step, const Action& action, int32_t cell);
  void issue(const Action& action, SimTransfer transfer, int32_t cell);
  int32_t name(const Action& action);

  // ---- times ----
  int32_t time_of(const Action& action);
  int32_t base_time(const Action& action);
  OpTime op_time(const Action& action) const;

  SimTransfer exchange_of(const OpSpec& op, bool backward, int32_t cell) const;
  int32_t message_of(const OpSpec& op, bool forward) const;

  std::vector<StageTables> tables_;
  const RecorderOptions options_;
  const int microbatches_;
  int32_t gates_ = 0;
  /// Number by receiving stage, whether a gradient, and micro-batch.
  std::map<std::tuple<int, bool, int>, int32_t> messages_;
  std::map<std::tuple<int, int, std::vector<int>>, int32_t> piece_times_;
  ProgramWriter writer_;
  const RankDriver* driver_ = nullptr;
  CountsOf counts_of_;
  Agree agree_;
  std::vector<LayerLoad> loads_;  ///< by cell, once known
  std::vector<SlotState> slots_;
  // Of the action at hand.
  StageTables* of_ = nullptr;
  SlotState* slot_ = nullptr;
  const Plan* plan_ = nullptr;
};

}  // namespace bagualu
