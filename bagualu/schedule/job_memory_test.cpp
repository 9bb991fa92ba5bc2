#include "bagualu/schedule/job_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/measured_jobs.h"
#include "bagualu/model/megatron_args.h"
#include "bagualu/schedule/job_memory_state.h"

namespace bagualu {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

/// Hidden 2048, 128 experts of width 768, top-8 over 8 ranks, 4096 tokens: 32,768 rows when
/// balanced.
Job reference_job(const std::string& layout = "tp=1,pp=4,ep=8,dp=8", int64_t layers = 8) {
  Job job;
  ModelSpec& m = job.model;
  m.layers = layers;
  m.hidden = 2048;
  m.heads = 16;
  m.kv_heads = 16;
  m.head_dim = 128;
  m.vocab = 32000;
  m.experts = 128;
  m.top_k = 8;
  m.expert_ffn = 768;
  m.moe_layer.assign(static_cast<size_t>(layers), 1);
  job.layout = parse_layout(layout, "test", "layout");
  job.stages = default_stages(m, job.layout.pp, job.layout.vpp);
  if (job.layout.vpp > 1) job.pipeline = PipelineKind::kInterleaved;
  job.seq = 4096;
  job.microbatches = 8;
  job.optimizer.distributed = true;
  validate(job, "test");
  return job;
}

std::map<std::string, int64_t> saved_mib(const Job& job, double factor) {
  std::map<std::string, int64_t> mib;
  for (const TensorRow& row : JobMemory(job).tensors(0, factor)) {
    if (row.saved) mib[row.name] = row.bytes / kMiB;
  }
  return mib;
}

// 32,768 rows of 4096 + 3072 + 1536 bytes: 128 + 96 + 48 MiB.
TEST(JobMemory, ExpertBytesAreLinearInRowsAndKnowNothingOfTheExpertsNumber) {
  Job job = reference_job();
  const auto experts = [&](double factor) {
    auto mib = saved_mib(job, factor);
    return std::vector<int64_t>{mib["layer0.rows"], mib["layer0.expert_fc1.out"],
                                mib["layer0.moe_act.out"]};
  };
  EXPECT_EQ(experts(1), (std::vector<int64_t>{128, 96, 48}));
  EXPECT_EQ(experts(2.5), (std::vector<int64_t>{320, 240, 120}));
  EXPECT_EQ(experts(8), (std::vector<int64_t>{1024, 768, 384}));
  job.model.experts = 64;
  EXPECT_EQ(experts(1), (std::vector<int64_t>{128, 96, 48}));
  // Gate weights behind fc2: its output, 128 MiB, is kept too, 400 in all.
  job.moe.probs_in_activation = false;
  EXPECT_EQ(experts(1), (std::vector<int64_t>{128, 96, 48}));
  EXPECT_EQ(saved_mib(job, 1)["layer0.combine.returned"], 128);
}

/// Bytes that a rank's micro-batches in flight hold at most, parts of it that depend on rows only.
std::vector<double> row_units(const Job& job, const RoutedLoads& loads) {
  const JobMemory memory(job);
  const int64_t unit = memory.layer_bytes(0, 1) - memory.layer_bytes(0, 0);
  const int64_t layers = job.model.layers / job.layout.pp;
  std::vector<double> units;
  for (int64_t rank = 0; rank < job.layout.pp; ++rank) {
    const auto most = [&](const RoutedLoads& at) {
      int64_t bytes = 0;
      for (const JobMemoryPoint& point : memory.over_time(rank, at)) {
        bytes = std::max(bytes, point.saved_bytes);
      }
      return bytes;
    };
    RoutedLoads empty;
    empty.factor = 0;
    units.push_back(static_cast<double>(most(loads) - most(empty)) /
                    static_cast<double>(unit * layers));
  }
  return units;
}

void expect_near(const std::vector<double>& found, const std::vector<double>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], wanted[i], 1e-6) << i;
}

// 1F1B, 4 ranks, 8 micro-batches: 4, 3, 2, 1 in flight; each micro-batch at 2.5 adds 1.5 where it
// is among them.
TEST(JobMemory, ASpikeStacksOnTheWarmUp) {
  const Job job = reference_job();
  expect_near(row_units(job, {}), {4, 3, 2, 1});
  expect_near(row_units(job, {.spikes = {{2, 2.5}}}), {5.5, 4.5, 3.5, 2.5});
  expect_near(row_units(job, {.spikes = {{6, 2.5}}}), {5.5, 4.5, 3.5, 2.5});
  expect_near(row_units(job, {.spikes = {{2, 2.5}, {3, 2.5}}}), {7, 6, 5, 2.5});
  expect_near(row_units(job, {.spikes = {{0, 2.5}, {1, 2.5}, {2, 2.5}, {3, 2.5}}}),
              {10, 7.5, 5, 2.5});
  const RankMemory told = JobMemory(job).describe(0, {.spikes = {{2, 2.5}}});
  EXPECT_EQ(told.in_flight, 4);
  EXPECT_EQ(told.cause.pass.stage, 0);
}

TEST(JobMemory, MicrobatchesBeyondTheStagesDoNotRaiseThePeak) {
  for (const char* layout : {"tp=1,pp=4,ep=8,dp=8", "tp=1,pp=4,vpp=2,ep=8,dp=8"}) {
    Job job = reference_job(layout);
    std::vector<int64_t> peaks;
    for (const int64_t microbatches : {12, 16, 64, 256}) {
      job.microbatches = microbatches;
      const JobMemory memory(job);
      for (int64_t rank = 0; rank < 4; ++rank) peaks.push_back(memory.peak_bytes(rank, {}));
    }
    for (size_t i = 4; i < peaks.size(); ++i) EXPECT_EQ(peaks[i], peaks[i - 4]) << layout;
  }
}

// Chunks of 1 layer, p = 4, v = 2, m = 8: warm-ups of 10, 8, 6, 4 and one more: 11, 9, 7, 5.
TEST(JobMemory, InterleavedRanksHoldTheirPublishedNumberOfChunks) {
  const Job job = reference_job("tp=1,pp=4,vpp=2,ep=8,dp=8");
  expect_near(row_units(job, {}), {5.5, 4.5, 3.5, 2.5});
}

// Every order holds as many activations of a virtual stage as its data say.
TEST(JobMemory, EveryOrderHoldsItsActivationsInFlight) {
  for (const PipelineKind kind :
       {PipelineKind::k1F1B, PipelineKind::kZbH1, PipelineKind::kZbH2, PipelineKind::kZbV,
        PipelineKind::kVHalf, PipelineKind::kDualPipe, PipelineKind::kDualPipeV}) {
    Job job = reference_job("tp=1,pp=4,ep=8,dp=8", 16);
    const int64_t per_rank = is_v_shaped(kind) ? 2 : 1;
    job.pipeline = kind;
    job.stages = default_stages(job.model, 4, per_rank);
    job.microbatches = 16;
    validate(job, "test");
    const JobMemory memory(job);
    const int64_t unit = (memory.layer_bytes(0, 1) - memory.layer_bytes(0, 0)) * 4 / per_rank;
    const std::vector<int> expected =
        in_flight(make_order(kind, 4, static_cast<int>(per_rank), 16));
    RoutedLoads empty;
    empty.factor = 0;
    for (int64_t rank = 0; rank < 4; ++rank) {
      const auto balanced = memory.over_time(rank, {});
      const auto without = memory.over_time(rank, empty);
      int64_t rows = 0;
      for (size_t i = 0; i < balanced.size(); ++i) {
        rows = std::max(rows, balanced[i].saved_bytes - without[i].saved_bytes);
      }
      EXPECT_EQ(rows, unit * expected[static_cast<size_t>(rank)])
          << pipeline_kind_name(kind) << " rank " << rank;
      int64_t highest = 0;
      for (const JobMemoryPoint& point : balanced) highest = std::max(highest, point.peak_bytes);
      EXPECT_EQ(memory.peak_bytes(rank, {}), highest) << pipeline_kind_name(kind);
    }
  }
}

TEST(JobMemory, TheClosedFormOf1F1BIsItsWalk) {
  for (const int64_t microbatches : {1, 2, 3, 4, 5, 9}) {
    for (const char* module : {"", "expert_fc1"}) {
      Job job = reference_job("tp=1,pp=4,ep=8,dp=8", 18);
      job.model.moe_layer[0] = job.model.moe_layer[6] = 0;
      job.model.dense_ffn = 4096;
      job.microbatches = microbatches;
      if (*module != 0) job.offload.modules = {module};
      const JobMemory::State state(job, nullptr);
      for (int64_t rank = 0; rank < 4; ++rank) {
        EXPECT_EQ(state.alike_peak(rank, {.factor = 1.3}),
                  state.walk_rank(rank, {.factor = 1.3}, nullptr).bytes);
        const std::vector<double> each(18, 1.3);
        EXPECT_EQ(state.alike_peak(rank, {.by_layer = each}),
                  state.walk_rank(rank, {.factor = 1.3}, nullptr).bytes)
            << "equal loads, layer by layer";
      }
    }
  }
}

TEST(JobMemory, FastPathReportAndTimelineAgree) {
  for (const char* layout :
       {"tp=1,pp=4,ep=8,dp=8", "tp=2,pp=4,vpp=2,ep=8,dp=8", "tp=2,cp=2,pp=2,ep=4,etp=2,dp=4"}) {
    for (const RecomputeGranularity recompute :
         {RecomputeGranularity::kNone, RecomputeGranularity::kSelective,
          RecomputeGranularity::kFull}) {
      Job job = reference_job(layout);
      job.recompute.granularity = recompute;
      if (recompute == RecomputeGranularity::kSelective) {
        job.recompute.modules = {"moe_act", "layernorm", "core_attn"};
      }
      const JobMemory memory(job);
      for (int64_t rank = 0; rank < job.layout.pp; ++rank) {
        const int64_t peak = memory.peak_bytes(rank, {.factor = 1.5});
        const RankMemory told = memory.describe(rank, {.factor = 1.5});
        EXPECT_EQ(told.peak_bytes, peak) << layout;
        int64_t sum = 0;
        for (const KindBytes& kind : told.by_kind) sum += kind.bytes;
        EXPECT_EQ(sum, peak) << layout;
        int64_t highest = 0;
        for (const JobMemoryPoint& point : memory.over_time(rank, {.factor = 1.5})) {
          highest = std::max(highest, point.peak_bytes);
        }
        EXPECT_EQ(highest, peak) << layout;
      }
    }
  }
}

/// Four layers that keep 100 MiB, 5 of them their input, and a head of `head` MiB at the loss; the
/// first `recomputed` keep their input only.
int64_t four_layers(int64_t recomputed, int64_t head, int64_t late = 0) {
  Job job = reference_job("tp=1,pp=1,ep=8,dp=8", 4);
  job.recompute.granularity = RecomputeGranularity::kFull;
  job.recompute.block = true;
  job.recompute.layers = recomputed;
  JobMemory::State state(job, nullptr);
  auto layer = std::make_shared<KindProfile>();
  layer->whole.input = {5 * kMiB, 0};
  layer->whole.saved = {100 * kMiB, 0};
  layer->whole.forward = {{{100 * kMiB, 0}, 0}};
  layer->whole.backward = {{{100 * kMiB, 0}, 1}};
  auto loss = std::make_shared<KindProfile>();
  loss->profile.forward = {{{head * kMiB, 0}, 0}};
  loss->profile.backward = {{{head * kMiB, 0}, 1}};
  loss->profile.late = {late * kMiB, 0};
  state.kinds = {nullptr, layer, loss};  // the reference job's layers are MoE layers
  state.boundary_bytes = 0;
  state.embedding_gradient_bytes = 0;
  return state.walk_rank(0, {}, nullptr).bytes / kMiB;
}

// 3 * 5 + 100 during a rebuild, with and without the last layer. A head of 500 at the loss stands
// on 3 * 5 + 100, or on 4 * 5; one that is freed after the rebuild stands on it.
TEST(JobMemory, RecomputeIsWorthWhatItDoesToThePeak) {
  EXPECT_EQ(four_layers(3, 0), 115);
  EXPECT_EQ(four_layers(4, 0), 115);
  EXPECT_EQ(four_layers(3, 500), 615);
  EXPECT_EQ(four_layers(4, 500), 520);
  EXPECT_EQ(four_layers(3, 500, 500), 615);
  EXPECT_EQ(four_layers(4, 500, 500), 615);
}

// The fused kernel keeps a sum per query and head, 4 bytes: that is all a recompute can save.
TEST(JobMemory, RecomputedFusedAttentionSavesNothingQuadratic) {
  Job job = reference_job();
  const auto saving = [&] {
    Job changed = job;
    changed.recompute.granularity = RecomputeGranularity::kSelective;
    changed.recompute.modules = {"core_attn"};
    return JobMemory(job).layer_bytes(0, 1) - JobMemory(changed).layer_bytes(0, 1);
  };
  EXPECT_EQ(saving(), 4096 * 16 * 4);
  job.attention_unfused = true;
  EXPECT_EQ(saving(), int64_t{4096} * 4096 * 16 * 2);
}

TEST(JobMemory, ACacheGivesTheSameBytes) {
  LayerProfileCache cache;
  for (int round = 0; round < 2; ++round) {
    for (const char* layout : {"tp=1,pp=4,ep=8,dp=8", "tp=2,pp=4,ep=8,dp=8"}) {
      for (const double fraction : {0.0, 1.0}) {
        Job job = reference_job(layout);
        if (fraction > 0) job.offload.modules = {"expert_fc1"};
        EXPECT_EQ(JobMemory(job, &cache).peak_bytes(1, {}), JobMemory(job).peak_bytes(1, {}));
      }
    }
  }
}

/// Largest rank of a stage: ranks of a stage stand next to each other. One value: of all ranks.
int64_t measured_peak(const MeasuredJob& row, int64_t rank) {
  if (row.peak_bytes.size() == 1) return row.peak_bytes.front();
  const int64_t of_stage = row.job.layout.world_size / row.job.layout.pp;
  const auto begin = row.peak_bytes.begin() + rank * of_stage;
  return *std::max_element(begin, begin + of_stage);
}

int64_t predicted_peak(const Job& job) {
  const JobMemory memory(job);
  int64_t peak = 0;
  for (int64_t rank = 0; rank < job.layout.pp; ++rank) {
    peak = std::max(peak, memory.peak_bytes(rank, {}));
  }
  return peak;
}

double error_of(int64_t predicted, int64_t measured) {
  return static_cast<double>(predicted) / static_cast<double>(measured) - 1;
}

// The best other predictor has 0.46 % on average on all 43 rows of that table, 1.38 % at most.
TEST(JobMemoryMeasured, B200PeaksOfEveryStage) {
  double sum = 0;
  const MeasuredJobs measured =
      measured_jobs_from_file(BAGUALU_SOURCE_DIR "/tests/data/simumax_b200.json");
  ASSERT_EQ(measured.rows.size(), 22u);
  for (const MeasuredJob& row : measured.rows) {
    const JobMemory memory(row.job);
    for (int64_t rank = 0; rank < row.job.layout.pp; ++rank) {
      EXPECT_NEAR(error_of(memory.peak_bytes(rank, {}), measured_peak(row, rank)), 0, 0.0015)
          << row.id << " rank " << rank;
    }
    sum += std::abs(error_of(predicted_peak(row.job),
                             *std::max_element(row.peak_bytes.begin(), row.peak_bytes.end())));
  }
  EXPECT_LE(sum / 22, 0.0005);
}

TEST(JobMemoryMeasured, OffloadRatiosOfFigure7FitOrNotAndWithin1Percent) {
  const MeasuredJobs measured =
      measured_jobs_from_file(BAGUALU_SOURCE_DIR "/tests/data/kwai_fig7.json");
  // By recompute mode: fraction, predicted, measured of the lowest and highest measured fraction.
  std::map<std::string, std::vector<std::array<double, 3>>> ends;
  for (const MeasuredJob& row : measured.rows) {
    const RankMemory told = JobMemory(row.job).describe(0, {});
    EXPECT_EQ(told.peak_bytes, predicted_peak(row.job)) << "rank 0 has the most in flight";
    const int64_t needed = told.reserved_bytes + told.communication_bytes;
    EXPECT_EQ(needed > row.device_bytes, row.out_of_memory) << row.id;
    if (row.out_of_memory) continue;
    EXPECT_NEAR(error_of(told.peak_bytes, row.peak_bytes.front()), 0, 0.01) << row.id;
    ends[row.group].push_back({row.job.offload.fraction, static_cast<double>(told.peak_bytes),
                               static_cast<double>(row.peak_bytes.front())});
  }
  for (const auto& [mode, points] : ends) {
    const double width = points.back()[0] - points.front()[0];
    const double predicted = (points.front()[1] - points.back()[1]) / width;
    const double of_row = (points.front()[2] - points.back()[2]) / width;
    EXPECT_NEAR(predicted / of_row, 1, 0.02) << mode << ": bytes per offload ratio";
  }
}

// Peak less static bytes of the last rank in Megatron's functional tests, of all MoE rows whose
// arguments describe the run (GPUs known, no FSDP, CUDA graphs or state-space layers). The interval
// runs from a balanced router to 1.5 times as many rows, or to where it is 12 % wide.
TEST(JobMemoryMeasured, MegatronsFunctionalTestsLieInsideTheImbalanceInterval) {
  // What lies outside, and why.
  const std::map<std::string, std::string> misses = {
      {"moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_"
       "instances/dev_dgx_gb200_2nd",
       "loads a checkpoint first: 27 % above its twin that does not"},
      {"moe/gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4/dev_dgx_h100",
       "0.5 % below balanced: the last rank received less than its share"},
      {"moe/gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4_1node/dev_dgx_gb200",
       "0.2 % below balanced, the same"},
      {"moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_muon/dev_dgx_gb200",
       "1.7 % below balanced; its twin on H100 lies inside"},
      {"moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed/dev_dgx_h100",
       "9 % above: a multi-token prediction layer with unfused attention"},
      {"moe/gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_fine_grained_offloading/dev_dgx_gb200",
       "7 % above: a multi-token prediction layer; the row without it is 0.1 % off"}};
  const Json file = read_json_file(BAGUALU_SOURCE_DIR "/tests/data/megatron_ci_memory.json");
  int computed = 0;
  for (const Json& row : file["rows"]) {
    const auto id = row["id"].get<std::string>();
    const Json& args = row["args"];
    const bool described = row["moe"].get<bool>() && row["world_size"].is_number() &&
                           row["vocab"].is_number() && !id.starts_with("nemotron") &&
                           args.dump().find("fsdp") == std::string::npos &&
                           args.dump().find("cuda-graph") == std::string::npos;
    if (!described) continue;
    ++computed;
    const Job job = megatron_job_from_json(args, id,
                                           {.world_size = row["world_size"].get<int64_t>(),
                                            .vocab = row["vocab"].get<int64_t>(),
                                            .variables = {}})
                        .job;
    const JobMemory memory(job);
    const int64_t rank = job.layout.pp - 1;
    const int64_t base = memory.static_bytes(rank);
    const auto low = static_cast<double>(memory.peak_bytes(rank, {}) - base);
    const auto high =
        std::min(1.12 * low, static_cast<double>(memory.peak_bytes(rank, {.factor = 1.5}) - base));
    const auto measured =
        static_cast<double>(row["peak_bytes"].get<int64_t>() - row["static_bytes"].get<int64_t>());
    EXPECT_EQ(measured < low || measured > high, misses.count(id) > 0)
        << id << " " << low / kMiB << " to " << high / kMiB << ", measured " << measured / kMiB;
  }
  EXPECT_EQ(computed, 34);
}

}  // namespace
}  // namespace bagualu
