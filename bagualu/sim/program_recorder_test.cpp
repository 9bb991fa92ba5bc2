#include "bagualu/sim/program_recorder.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <tuple>

#include "bagualu/cost/megatron_cost.h"
#include "bagualu/graph/megatron_moe.h"
#include "bagualu/graph/test_models.h"
#include "bagualu/provision/test_setup.h"
#include "bagualu/sim/program_bytes.h"

namespace bagualu {
namespace {

/// All stages of a pipeline rank, their loads and what becomes of them.
struct RecordedRank {
  std::vector<Graph> graphs;
  std::vector<CostTable> costs;
  std::vector<ProvisionContext> contexts;
  std::vector<std::unique_ptr<Policy>> policies;
  std::vector<RankStage> stages;
  OverlapOrder order;
  SendPlan sends;
  RankProgram program;
  RankOptions options;

  void add_stage(int number, Graph graph, CostTable cost) {
    graphs.push_back(std::move(graph));
    costs.push_back(std::move(cost));
    stages.push_back({number, nullptr, nullptr});
  }
  void decide_by(const std::string& policy, const LayerLoad& balanced, const LayerLoad& worst,
                 int64_t message_bytes, double of_calm) {
    std::vector<int> numbers;
    std::vector<const Graph*> pointers;
    for (size_t s = 0; s < stages.size(); ++s) {
      numbers.push_back(stages[s].stage);
      pointers.push_back(&graphs[s]);
    }
    const RankFloor floor = rank_floor(program, numbers, pointers, worst, message_bytes);
    std::vector<int64_t> calm;
    for (const Floor& one : floor.stages) calm.push_back(2 * one.activation_bytes);
    options.activation_budget_bytes =
        of_calm == 0 ? 0
                     : static_cast<int64_t>(of_calm * static_cast<double>(floor.activation_bytes));
    const auto budgets = stage_budgets(floor, calm, options.activation_budget_bytes);
    contexts.resize(stages.size());
    for (size_t s = 0; s < stages.size(); ++s) {
      contexts[s].graph = &graphs[s];
      contexts[s].cost = &costs[s];
      contexts[s].balanced = balanced;
      contexts[s].worst_case = worst;
      contexts[s].activation_budget_bytes = budgets[s];
      contexts[s].allow_quantise = true;
      policies.push_back(make_policy(policy, contexts[s], {}));
      stages[s].context = &contexts[s];
      stages[s].policy = policies.back().get();
    }
  }
};

struct Recorded {
  RankRun run;
  StepProgram program;
  std::vector<int32_t> rows, piece_rows;  ///< by cell
};

Recorded record(const RecordedRank& rank, int microbatches, const LayerLoad& balanced,
                const LayerLoad& worst, std::mt19937& random) {
  RecorderOptions options;
  options.static_bytes = 1000;
  options.exchange_counts = true;
  ProgramRecorder recorder(rank.stages, microbatches, rank.sends, options);
  Recorded made;
  made.rows.resize(static_cast<size_t>(recorder.cells()));
  made.piece_rows.resize(made.rows.size());
  RankDriver driver(rank.stages, rank.options, recorder);
  const bool hot = random() % 2 == 0;
  recorder.begin(driver, [&](int stage, int microbatch, int layer) {
    const auto at = static_cast<size_t>(recorder.cell(stage, microbatch, layer));
    const int64_t most = hot ? worst.rows : balanced.rows * 5 / 4;
    const auto rows = static_cast<int64_t>(random() % static_cast<unsigned>(most + 1));
    const int64_t pieces = std::min(rows, worst.piece_rows);
    made.rows[at] = static_cast<int32_t>(rows);
    made.piece_rows[at] = static_cast<int32_t>(pieces);
    return GateCounts{{rows, pieces},
                      static_cast<double>(rows) / static_cast<double>(balanced.rows)};
  });
  made.run = driver.run(rank.program);
  made.program = recorder.take();
  return made;
}

void expect_the_bytes_of_the_driver(const Recorded& made) {
  const ProgramBytes bytes = program_bytes(made.program, made.rows.data(), made.piece_rows.data());
  EXPECT_EQ(bytes.peak_bytes, made.run.memory.peak_bytes + 1000);
  EXPECT_EQ(bytes.end_bytes, 0);
}

// Every transfer is issued once and awaited after that, at most once; sends may end with the step.
void expect_transfers_in_order(const StepProgram& program) {
  std::vector<int> issued(program.transfers.size()), awaited(program.transfers.size());
  for (const SimInstruction& one : program.instructions) {
    if (one.step == SimStep::kCompute) {
      ASSERT_GE(one.time, 0);
      continue;
    }
    const auto at = static_cast<size_t>(one.transfer);
    if (one.step == SimStep::kIssue) {
      EXPECT_EQ(issued[at]++, 0);
    } else {
      EXPECT_EQ(issued[at], 1) << program.names[static_cast<size_t>(one.name)];
      EXPECT_EQ(awaited[at]++, 0);
    }
  }
  for (size_t t = 0; t < issued.size(); ++t) {
    EXPECT_EQ(issued[t], 1);
    EXPECT_EQ(awaited[t], 1) << program.names[static_cast<size_t>(program.transfers[t].name)];
  }
}

struct Case {
  PipelineKind kind = PipelineKind::k1F1B;
  int pp = 2, vpp = 1, microbatches = 4;
  bool overlap = false;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> kCases = {
      {},
      {PipelineKind::k1F1B, 2, 1, 5, true},
      {PipelineKind::kInterleaved, 2, 2, 4, false},
      {PipelineKind::kZbV, 2, 1, 4, false},
      {PipelineKind::kDualPipeV, 2, 1, 4, true},
      {PipelineKind::kZbH1, 2, 1, 4, true},
  };
  return kCases;
}

void set_order(const Case& of, int pp_rank, RecordedRank& rank) {
  rank.order = make_overlap_order(of.kind, of.pp, of.vpp, of.microbatches, of.overlap);
  rank.sends = send_plan(rank.order);
  rank.program = rank_program(rank.order, rank.sends, pp_rank);
}

void expect_sound(RecordedRank& rank, const std::string& policy, const Case& of,
                  const LayerLoad& balanced, const LayerLoad& worst, int64_t message_bytes,
                  double of_floor, std::mt19937& random) {
  rank.decide_by(policy, balanced, worst, message_bytes, of_floor);
  const Recorded made = record(rank, of.microbatches, balanced, worst, random);
  expect_the_bytes_of_the_driver(made);
  expect_transfers_in_order(made.program);
}

TEST(ProgramRecorder, NativeProgramsHaveThePeaksOfTheDriver) {
  const SmallModel model({.layers = 4, .ep_size = 2, .dense_first = true, .shared = true});
  std::mt19937 random(5);
  for (const Case& of : cases()) {
    for (const int pp_rank : {0, 1}) {
      for (const std::string policy : {"adaptive", "full-recompute", "save-all", "kwai"}) {
        SCOPED_TRACE(policy + " " + std::string(pipeline_kind_name(of.kind)));
        RecordedRank rank;
        set_order(of, pp_rank, rank);
        ParallelLayout layout;
        layout.world_size = of.pp * 2;
        layout.ep_size = 2;
        layout.pp_size = of.pp;
        layout.virtual_per_rank = of.vpp;
        layout.pipeline = of.kind;
        const std::vector<StageSlice> slices = stage_slices(model.spec, layout);
        for (int64_t number : layout.stages_of_rank(pp_rank)) {
          NativeGraphOptions options = model.graph_options;
          options.stage = slices[static_cast<size_t>(number)];
          options.split_weight_grads = of.overlap || of.kind != PipelineKind::k1F1B;
          Graph graph = build_native_graph(model.spec, options);
          CostTable cost = roofline_costs(graph, model.spec, options, model.system);
          rank.add_stage(static_cast<int>(number), std::move(graph), std::move(cost));
        }
        const int64_t message = model.graph_options.seq * model.spec.hidden * 4;
        expect_sound(rank, policy, of, model.context.balanced, model.context.worst_case, message,
                     policy == "save-all" ? 0 : 1.1, random);
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace bagualu
