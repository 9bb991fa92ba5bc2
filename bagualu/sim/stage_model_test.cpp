#include "bagualu/sim/stage_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/model/strategy.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/sim/program_bytes.h"

namespace bagualu {
namespace {

const std::string kConfigs = std::string(BAGUALU_SOURCE_DIR) + "/configs/";

SystemSpec h100() { return system_from_file(kConfigs + "systems/h100.json"); }

/// 16 layers with 64 experts on 4 pipeline ranks, 8 to an expert group.
Job small_job(int64_t microbatches = 8, PipelineKind kind = PipelineKind::k1F1B) {
  Job job;
  ModelSpec& m = job.model;
  m.name = "small";
  m.layers = 16;
  m.hidden = 2048;
  m.heads = 16;
  m.kv_heads = 4;
  m.head_dim = 128;
  m.vocab = 32000;
  m.experts = 64;
  m.top_k = 6;
  m.expert_ffn = 1024;
  m.shared_ffn = 2048;
  m.moe_layer.assign(16, 1);
  job.layout.pp = 4;
  job.layout.ep = 8;
  job.layout.world_size = 32;
  job.pipeline = kind;
  job.seq = 4096;
  job.microbatches = microbatches;
  job.stages = default_stages(m, 4, virtual_stages_per_rank(kind, 1));
  validate(job, "test");
  return job;
}

SimPolicy by(const std::string& policy, bool overlap = false) {
  SimPolicy made;
  made.label = made.policy = policy;
  made.overlap = overlap;
  return made;
}

std::vector<int32_t> random_rows(const StageModel& model, int pp_rank, double most,
                                 std::mt19937& random) {
  std::vector<int32_t> rows(static_cast<size_t>(model.cells(pp_rank)));
  for (int32_t& one : rows) {
    const double factor = most * static_cast<double>(random() % 1001) / 1000.0;
    one = static_cast<int32_t>(factor * static_cast<double>(model.balanced_rows()));
  }
  return rows;
}

int64_t peak_of(const RankOutcome& outcome, const std::vector<int32_t>& rows) {
  return program_bytes(*outcome.program, rows.data()).peak_bytes;
}

TEST(StageModel, ProgramsHaveThePeaksOfTheDriver) {
  std::mt19937 random(3);
  for (const PipelineKind kind :
       {PipelineKind::k1F1B, PipelineKind::kZbH1, PipelineKind::kDualPipeV}) {
    for (const bool overlap : {false, true}) {
      const Job job = small_job(6, kind);
      const int64_t budget = 24 * kGiB;
      for (const std::string policy : {"adaptive", "full-recompute", "save-all", "kwai"}) {
        StageModel model(job, h100(), by(policy, overlap), budget, 0);
        for (const int rank : {0, 3}) {
          SCOPED_TRACE(policy + (overlap ? " overlap " : " ") + std::to_string(rank));
          const std::vector<int32_t> rows = random_rows(model, rank, 2.5, random);
          const RankOutcome outcome = model.decide(rank, rows.data());
          EXPECT_EQ(peak_of(outcome, rows), outcome.peak_bytes);
          if (policy == "adaptive") {
            EXPECT_EQ(model.short_by_bytes(rank), 0);
            EXPECT_FALSE(outcome.died);
            EXPECT_LE(outcome.peak_bytes, budget);
          }
        }
      }
    }
  }
}

/// Rows of a whole group: member m up to most[m] times the balanced ones, at random.
std::vector<int32_t> group_rows(const StageModel& model, int pp_rank,
                                const std::vector<double>& most, std::mt19937& random) {
  std::vector<int32_t> rows(static_cast<size_t>(model.cells(pp_rank)) * most.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const double factor = most[i % most.size()] * static_cast<double>(random() % 1001) / 1000.0;
    rows[i] = static_cast<int32_t>(factor * static_cast<double>(model.balanced_rows()));
  }
  return rows;
}

std::vector<int32_t> rows_of(const std::vector<int32_t>& rows, size_t member, size_t members) {
  std::vector<int32_t> own;
  for (size_t i = member; i < rows.size(); i += members) own.push_back(rows[i]);
  return own;
}

/// Exchanges in the order in which they are issued.
std::vector<std::string> exchanges(const StepProgram& program) {
  std::vector<std::string> issued;
  for (const SimInstruction& one : program.instructions) {
    if (one.step != SimStep::kIssue) continue;
    const SimTransfer& transfer = program.transfers[static_cast<size_t>(one.transfer)];
    if (transfer.kind != SimTransferKind::kExchange) continue;
    issued.push_back(std::to_string(one.microbatch) + " " +
                     program.names[static_cast<size_t>(one.name)]);
  }
  return issued;
}

bool same(const StepProgram& a, const StepProgram& b) {
  const auto text = [](const StepProgram& program) {
    std::string all;
    for (const SimInstruction& one : program.instructions) {
      all += std::to_string(one.microbatch) + program.names[static_cast<size_t>(one.name)] + ";";
    }
    return all;
  };
  return text(a) == text(b);
}

TEST(StageModel, MembersBelowALevelShareItsProgramAndNeverExceedIt) {
  std::mt19937 random(7);
  const int64_t budget = 13 * kGiB;
  for (const std::string policy : {"adaptive", "full-recompute", "kwai"}) {
    StageModel model(small_job(), h100(), by(policy), budget, 0);
    ASSERT_EQ(model.members(), 8);
    for (const int rank : {0, 2}) {
      const auto rows = group_rows(model, rank, {1.2, 1.2, 1.0, 1.5, 1.2, 1.5, 1.4, 2.5}, random);
      const auto group = model.group(rank, rows.data(), {1.2, 1.5});
      ASSERT_EQ(group.size(), 8u);
      EXPECT_EQ(group[0].program, group[2].program);
      // Where a plan does not survive the level (kwai's may not), everyone is driven for himself.
      if (policy != "kwai") {
        EXPECT_EQ(group[3].program, group[6].program);
      }
      EXPECT_NE(group[0].program, group[3].program);
      for (size_t m = 0; m < 8; ++m) {
        const auto own = rows_of(rows, m, 8);
        if (policy == "adaptive") {
          EXPECT_FALSE(group[m].died);
          EXPECT_LE(group[m].peak_bytes, budget);
        }
        EXPECT_LE(peak_of(group[m], own), group[m].peak_bytes);
        EXPECT_EQ(exchanges(*group[m].program), exchanges(*group[0].program));
      }
      const auto hot = rows_of(rows, 7, 8);
      EXPECT_EQ(peak_of(group[7], hot), group[7].peak_bytes);
      EXPECT_TRUE(same(*group[7].program, *model.decide(rank, hot.data()).program));
    }
  }
}

// A member without room for a forward beside a backward speaks for the whole group.
TEST(StageModel, AGroupIssuesTheSameExchangesWhateverItsMembersVote) {
  std::mt19937 random(9);
  int64_t denied = 0;
  const int64_t budget = 12 * kGiB;
  for (const PipelineKind kind : {PipelineKind::k1F1B, PipelineKind::kDualPipeV}) {
    StageModel model(small_job(6, kind), h100(), by("adaptive", true), budget, 0);
    ASSERT_EQ(model.short_by_bytes(1), 0);
    for (const std::vector<double>& levels : {std::vector<double>{1.2}, std::vector<double>{}}) {
      const auto rows = group_rows(model, 1, {1.0, 1.1, 3.0, 1.2, 1.0, 6.0, 1.1, 2.0}, random);
      const auto group = model.group(1, rows.data(), levels);
      const std::vector<std::string> order = exchanges(*group[0].program);
      EXPECT_FALSE(order.empty());
      for (size_t m = 0; m < 8; ++m) {
        EXPECT_EQ(exchanges(*group[m].program), order) << m;
        EXPECT_EQ(group[m].serialised_segments, group[0].serialised_segments);
        EXPECT_FALSE(group[m].died);
        EXPECT_LE(peak_of(group[m], rows_of(rows, m, 8)), budget);
      }
      denied += group[0].serialised_segments;
    }
  }
  EXPECT_GT(denied, 0);
}

TEST(StageModel, OutcomesDoNotDependOnWhatWasAskedBefore) {
  std::mt19937 random(11);
  for (const bool overlap : {false, true}) {
    StageModel model(small_job(6), h100(), by("adaptive", overlap), 12 * kGiB, 0);
    const auto rows = random_rows(model, 1, 3.0, random);
    const RankOutcome first = model.decide(1, rows.data());
    EXPECT_GT(first.mitigated_gates, 0);
    for (int i = 0; i < 5; ++i) model.decide(1, random_rows(model, 1, 3.0, random).data());
    const RankOutcome again = model.decide(1, rows.data());
    EXPECT_TRUE(same(*first.program, *again.program));
    EXPECT_EQ(first.peak_bytes, again.peak_bytes);
    EXPECT_EQ(first.exposed_ns, again.exposed_ns);
  }
}

TEST(StageModel, AThresholdOnTheHottestRankBindsTheWholeGroup) {
  SimPolicy policy = by("threshold");
  policy.options.threshold = 2.0;
  StageModel model(small_job(), h100(), policy, 0, 0);
  std::vector<int32_t> rows(static_cast<size_t>(model.cells(0)) * 8,
                            static_cast<int32_t>(model.balanced_rows()));
  const auto calm = model.group(0, rows.data(), {1.2});
  EXPECT_EQ(calm[0].mitigated_gates, 0);
  rows[5] *= 3;  // member 5 in the first layer of the first micro-batch
  const auto group = model.group(0, rows.data(), {1.2});
  for (const RankOutcome& one : group) EXPECT_EQ(one.mitigated_gates, 1);
  EXPECT_EQ(group[0].program, group[1].program);
}

TEST(StageModel, PoliciesWithOnePlanSurviveTheLoadTheyAreFittedFor) {
  for (const std::string policy : {"static", "kwai", "adapipe"}) {
    const int64_t budget = 10 * kGiB;
    StageModel model(small_job(), h100(), by(policy), budget, 0);
    for (const int rank : {0, 3}) {
      const std::vector<int32_t> rows(
          static_cast<size_t>(model.cells(rank)),
          static_cast<int32_t>(1.2 * static_cast<double>(model.balanced_rows())));
      const RankOutcome outcome = model.decide(rank, rows.data());
      EXPECT_FALSE(outcome.died) << policy << rank;
      EXPECT_LE(outcome.peak_bytes, budget);
    }
    const std::vector<int32_t> hot(static_cast<size_t>(model.cells(0)),
                                   static_cast<int32_t>(model.largest_rows()));
    const RankOutcome dead = model.decide(0, hot.data());
    EXPECT_TRUE(dead.died);
    EXPECT_TRUE(dead.program->dies);
    EXPECT_GT(dead.peak_bytes, budget);
  }
}

TEST(StageModel, PeaksOfSaveAllAreThoseOfJobMemory) {
  const Job job = small_job();
  const JobMemory memory(job);
  StageModel model(job, h100(), by("save-all"), 0, 0);
  for (int rank = 0; rank < 4; ++rank) {
    const std::vector<int32_t> rows(static_cast<size_t>(model.cells(rank)),
                                    static_cast<int32_t>(model.balanced_rows()));
    const auto expected = static_cast<double>(memory.peak_bytes(rank, {}));
    EXPECT_NEAR(static_cast<double>(model.decide(rank, rows.data()).peak_bytes) / expected, 1.0,
                0.03)
        << rank;
  }
}

TEST(StageModel, CellsAreLayersWithExpertsOfEveryMicrobatch) {
  Job job = small_job(2, PipelineKind::kDualPipeV);  // rank 1 has stages 1 and 6 of 8
  job.model.moe_layer[2] = 0;                        // layers 2, 3 and 12, 13
  job.model.dense_ffn = 8192;
  StageModel model(job, h100(), by("save-all"), 0, 0);
  EXPECT_EQ(model.moe_layers(), 15);
  const std::vector<SimCell> expected = {{0, 2}, {0, 11}, {0, 12}, {1, 2}, {1, 11}, {1, 12}};
  EXPECT_EQ(model.cell_places(1), expected);
  EXPECT_EQ(model.balanced_rows(), 4096 * 6);
  // 8 ranks, 6 of whose 8 experts a token may choose.
  EXPECT_EQ(model.largest_rows(), 8 * 4096 * 6);
}

// The whole replica: every pipeline rank's group, run against each other.
TEST(StageModel, TheEngineFindsTheSamePeaksAndNobodyWaitsForEver) {
  std::mt19937 random(13);
  for (const PipelineKind kind :
       {PipelineKind::k1F1B, PipelineKind::kZbH1, PipelineKind::kZbV, PipelineKind::kDualPipeV}) {
    for (const bool overlap : {false, true}) {
      for (const std::string policy : {"adaptive", "full-recompute"}) {
        SCOPED_TRACE(policy + " " + std::string(pipeline_kind_name(kind)));
        StageModel model(small_job(5, kind), h100(), by(policy, overlap), 14 * kGiB, 0);
        std::vector<std::vector<int32_t>> rows;
        std::vector<std::vector<RankOutcome>> outcomes;
        std::vector<SimGroup> groups(4);
        for (int rank = 0; rank < 4; ++rank) {
          rows.push_back(group_rows(model, rank, {1.0, 1.1, 2.5, 1.2, 1.0, 3.0, 1.1, 1.1}, random));
          outcomes.push_back(model.group(rank, rows.back().data(), {1.2}));
        }
        for (size_t rank = 0; rank < 4; ++rank) {
          for (const RankOutcome& one : outcomes[rank]) {
            ASSERT_FALSE(one.died);
            groups[rank].programs.push_back(one.program.get());
          }
          groups[rank].rows = rows[rank].data();
        }
        const SimReplicaResult result = SimEngine(model.links()).run(groups);
        ASSERT_EQ(result.by_member.size(), 32u);
        for (size_t i = 0; i < 32; ++i) {
          const size_t rank = i / 8, member = i % 8;
          EXPECT_EQ(result.by_member[i].peak_bytes,
                    peak_of(outcomes[rank][member], rows_of(rows[rank], member, 8)));
        }
      }
    }
  }
}

// Exchanges behind whose issue their own end comes at once.
int bare_exchanges(const StepProgram& program) {
  int bare = 0;
  for (size_t i = 0; i + 1 < program.instructions.size(); ++i) {
    const SimInstruction &one = program.instructions[i], &next = program.instructions[i + 1];
    if (one.step != SimStep::kIssue || next.step != SimStep::kAwait) continue;
    bare += one.transfer == next.transfer ? 1 : 0;
  }
  return bare;
}

// Pairs cut the backward at its exchanges: else it runs to its end beside the forward's first part.
TEST(StageModel, SlotsHaveComputeBesideMostExchanges) {
  for (const PipelineKind kind : {PipelineKind::k1F1B, PipelineKind::kDualPipeV}) {
    const Job job = small_job(12, kind);
    std::vector<int> bare;
    for (const bool overlap : {false, true}) {
      StageModel model(job, h100(), by("save-all", overlap), 0, 0);
      const std::vector<int32_t> rows(static_cast<size_t>(model.cells(3)),
                                      static_cast<int32_t>(model.balanced_rows()));
      bare.push_back(bare_exchanges(*model.decide(3, rows.data()).program));
    }
    EXPECT_LT(2 * bare[1], bare[0]);
  }
}

TEST(StageModel, RefusesWhatItCannotSimulate) {
  Job job = small_job(8, PipelineKind::kDualPipe);
  EXPECT_THROW(StageModel(job, h100(), by("adaptive"), 0, 0), InvalidInput);
  EXPECT_THROW(StageModel(small_job(), h100(), by("no such policy"), 0, 0), InvalidInput);
  StageModel model(small_job(), h100(), by("adaptive"), kGiB, 0);
  EXPECT_GT(model.short_by_bytes(0), 0);
}

}  // namespace
}  // namespace bagualu
