#include "bagualu/provision/stage_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "bagualu/base/units.h"
#include "bagualu/provision/test_setup.h"
#include "bagualu/schedule/pipeline.h"

namespace bagualu {
namespace {

/// Graphs with what makes units depend on each other: outputs that were not kept, several outputs
/// of one operator, units of several storages, collectives.
struct RandomStage {
  Graph graph;
  CostTable cost;
  std::vector<std::vector<LayerLoad>> loads;
  StageProblem problem;
  bool quantise = false;
};

int64_t between(std::mt19937& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

void add_random_op(RandomStage& stage, std::mt19937& random) {
  Graph& graph = stage.graph;
  const int id = static_cast<int>(graph.ops.size());
  OpSpec op;
  op.name = "op" + std::to_string(id);
  op.layer = 0;
  // One kind whose time follows the tokens, one whose time follows the rows.
  op.kind = between(random, 0, 2) == 0 ? OpKind::kExperts : OpKind::kQkv;
  for (int s = 0; s < static_cast<int>(graph.storages.size()); ++s) {
    if (between(random, 0, 2) == 0) op.reads.push_back(s);
  }
  const bool collective = between(random, 0, 7) == 0;
  for (int64_t outputs = between(random, 1, 2); outputs > 0; --outputs) {
    const int s = static_cast<int>(graph.storages.size());
    StorageSpec storage;
    storage.name = "storage" + std::to_string(s);
    storage.layer = 0;
    storage.producer = id;
    storage.lossy_element_bytes = between(random, 0, 1) * 2;
    if (op.kind == OpKind::kExperts) {
      storage.bytes.per_row = between(random, 1, 300);
    } else {
      storage.bytes.per_token = between(random, 1, 4000);
    }
    const bool saved = collective || between(random, 0, 3) > 0;
    if (saved) {
      const bool join = !op.creates.empty() && between(random, 0, 1) == 0 &&
                        graph.storages[op.creates.back()].unit >= 0;
      if (!join) {
        UnitSpec unit;
        unit.name = "unit" + std::to_string(graph.units.size());
        unit.layer = 0;
        unit.producer = id;
        unit.rebuild = collective ? Rebuild::kNever : Rebuild::kOp;
        if (op.kind == OpKind::kExperts && !collective && between(random, 0, 3) == 0) {
          unit.rebuild = Rebuild::kInPieces;
        }
        unit.pinned = between(random, 0, 9) == 0;
        graph.units.push_back(unit);
      }
      storage.unit = static_cast<int>(graph.units.size()) - 1;
      graph.units.back().storages.push_back(s);
    }
    op.creates.push_back(s);
    graph.storages.push_back(storage);
  }
  stage.cost.forward.push_back({{{0, 1000}, {1000, 1000 + between(random, 0, 900'000)}}, false});
  graph.ops.push_back(op);
}

void make_random_stage(std::mt19937& random, RandomStage& stage) {
  stage.graph.tokens = 1000;
  stage.graph.layers = 1;
  const int64_t most_units = between(random, 1, 5);
  while (static_cast<int64_t>(stage.graph.units.size()) < most_units) add_random_op(stage, random);
  for (size_t u = 0; u < stage.graph.units.size(); ++u) {
    stage.cost.rebuild.push_back({{{0, 0}, {1000, between(random, 0, 900'000)}}, false});
  }
  stage.cost.encode_bytes_per_s = 5e9;
  stage.cost.d2h_bytes_per_s = stage.cost.h2d_bytes_per_s = 1e9;
  stage.quantise = between(random, 0, 2) == 0;
  const int64_t microbatches = between(random, 1, stage.graph.units.size() <= 3 ? 3 : 1);
  for (int64_t m = 0; m < microbatches; ++m) {
    const int64_t rows = between(random, 0, 4) * 1000;
    stage.loads.push_back({{rows, rows}});
  }
  int64_t all = 0;
  for (const auto& loads : stage.loads) {
    int64_t bytes = 0;
    for (const StorageSpec& s : stage.graph.storages) {
      if (s.unit >= 0) bytes += s.bytes.eval(stage.graph.tokens, loads[0]);
    }
    all += bytes;
    stage.problem.microbatches.push_back({&loads,
                                          between(random, 0, 1) * bytes * between(random, 0, 6) / 8,
                                          between(random, 0, 1) * between(random, 0, 1'500'000)});
  }
  stage.problem.budget_bytes = all * between(random, 0, 9) / 8;
  if (between(random, 0, 1)) stage.problem.link_ns_per_byte = 0.04 * double(between(random, 1, 40));
  if (between(random, 0, 3) == 0) stage.problem.host_budget_bytes = all * between(random, 1, 4) / 8;
}

void run_again(const Graph& graph, int op, std::set<int>& ops) {
  if (!ops.insert(op).second) return;
  for (int s : graph.ops[op].reads) {
    if (graph.storages[s].unit < 0) run_again(graph, graph.storages[s].producer, ops);
  }
}

struct Evaluated {
  bool fits = true;
  int64_t cost_ns = 0;
  int64_t device_bytes = 0;
};

/// The problem's statement, word for word.
Evaluated evaluate(const RandomStage& stage, const std::vector<std::vector<ResidencyId>>& choice) {
  const Graph& graph = stage.graph;
  Evaluated result;
  int64_t host = 0;
  for (size_t m = 0; m < choice.size(); ++m) {
    const LayerLoad& load = stage.loads[m][0];
    std::set<int> ops;
    int64_t compute = 0, offloaded = 0;
    for (size_t u = 0; u < graph.units.size(); ++u) {
      const UnitSpec& unit = graph.units[u];
      const ResidencySpec& spec = residencies()[choice[m][u]];
      int64_t bytes = 0, encoded = 0;
      for (int s : unit.storages) {
        const int64_t full = graph.storages[s].bytes.eval(graph.tokens, load);
        bytes += full;
        encoded += round_up(spec.device_bytes(full, graph.storages[s].lossy_element_bytes),
                            kAllocationGranularity);
      }
      if (spec.retire == Retire::kKeep) result.device_bytes += bytes;
      if (spec.retire == Retire::kOffload) offloaded += bytes;
      if (spec.retire == Retire::kEncode) {
        result.device_bytes += encoded;
        compute += stage.cost.residency_ns(graph, static_cast<int>(u), choice[m][u], load);
      }
      if (spec.retire != Retire::kDrop) continue;
      if (unit.rebuild == Rebuild::kOp) run_again(graph, unit.producer, ops);
      if (unit.rebuild == Rebuild::kInPieces && bytes > 0) {
        compute += stage.cost.rebuild[u].eval(load.rows);
      }
    }
    for (int op : ops) compute += stage.cost.forward_ns(graph, op, load);
    const StageMicrobatch& limits = stage.problem.microbatches[m];
    const int64_t past = offloaded - limits.free_link_bytes;
    if (past > 0 && stage.problem.link_ns_per_byte <= 0) result.fits = false;
    result.cost_ns += std::max<int64_t>(0, compute - limits.bubble_ns) +
                      link_ns(stage.problem.link_ns_per_byte, past);
    host += offloaded;
  }
  result.fits = result.fits && result.device_bytes <= stage.problem.budget_bytes &&
                (stage.problem.host_budget_bytes == 0 || host <= stage.problem.host_budget_bytes);
  return result;
}

bool allowed(const RandomStage& stage, size_t unit, ResidencyId residency) {
  const UnitSpec& spec = stage.graph.units[unit];
  const ResidencySpec& choice = residencies()[residency];
  if (choice.retire == Retire::kKeep) return true;
  return !spec.pinned && (!choice.changes_numerics || stage.quantise) &&
         (!choice.needs_rebuild || spec.rebuild != Rebuild::kNever);
}

/// -1 if nothing fits.
int64_t exhaustive(const RandomStage& stage) {
  const size_t units = stage.graph.units.size();
  std::vector<std::vector<ResidencyId>> choice(stage.loads.size(),
                                               std::vector<ResidencyId>(units, kSave));
  int64_t best = -1;
  for (;;) {
    const Evaluated result = evaluate(stage, choice);
    if (result.fits && (best < 0 || result.cost_ns < best)) best = result.cost_ns;
    size_t i = 0;
    for (; i < units * choice.size(); ++i) {
      ResidencyId& residency = choice[i / units][i % units];
      do {
        ++residency;
      } while (residency < residencies().size() && !allowed(stage, i % units, residency));
      if (residency < residencies().size()) break;
      residency = kSave;
    }
    if (i == units * choice.size()) return best;
  }
}

TEST(StagePlan, IsWithinTheToleranceOfTheExhaustiveOptimumOfAnyGraph) {
  std::mt19937 random(11);
  const PoolTolerance tolerance;
  int solved = 0, infeasible = 0;
  for (int i = 0; i < 1500; ++i) {
    RandomStage stage;
    make_random_stage(random, stage);
    StagePlanner planner(stage.graph, stage.cost, stage.quantise);
    StagePlan plan;
    planner.plan(stage.problem, plan);
    const int64_t optimum = exhaustive(stage);
    if (!plan.feasible) {
      EXPECT_LT(optimum, 0) << i;
      ++infeasible;
      continue;
    }
    ++solved;
    std::vector<std::vector<ResidencyId>> choice;
    for (const Plan& p : plan.plans) choice.push_back(p.residency);
    for (const auto& residency : choice) {
      for (size_t u = 0; u < residency.size(); ++u) EXPECT_TRUE(allowed(stage, u, residency[u]));
    }
    const Evaluated real = evaluate(stage, choice);
    EXPECT_TRUE(real.fits) << i;
    EXPECT_EQ(real.cost_ns, plan.exposed_ns) << i;
    EXPECT_EQ(real.device_bytes, plan.device_bytes) << i;
    EXPECT_LE(plan.bound_ns, optimum) << i;
    EXPECT_LE(plan.exposed_ns, optimum + tolerance.gap_ns(optimum)) << i;
  }
  EXPECT_GT(solved, 500);
  EXPECT_GT(infeasible, 50);
}

TEST(StagePlan, NothingIsDoneWhereEverythingFits) {
  const SmallModel model({});
  StagePlanner planner(model.graph, model.cost, false);
  const std::vector<LayerLoad> loads = model.even();
  StageProblem problem;
  problem.microbatches = {{&loads, 0, 0}, {&loads, 0, 0}};
  problem.budget_bytes = int64_t{1} << 40;
  StagePlan plan;
  planner.plan(problem, plan);
  EXPECT_TRUE(plan.feasible);
  EXPECT_EQ(plan.exposed_ns, 0);
  for (const Plan& p : plan.plans) {
    EXPECT_EQ(p.residency, uniform_plan(model.graph, kSave).residency);
  }
}

// One storage per micro-batch whose rebuild takes half a unit of time.
struct OneUnit {
  static constexpr int64_t kUnitNs = 1'000'000;

  OneUnit() {
    graph.tokens = 1;
    graph.layers = 1;
    OpSpec op;
    op.name = "act";
    op.layer = 0;
    op.creates = {0};
    StorageSpec storage;
    storage.name = "act.out";
    storage.layer = 0;
    storage.bytes.fixed = 1024;
    storage.producer = storage.unit = 0;
    UnitSpec unit;
    unit.name = "act";
    unit.layer = 0;
    unit.producer = 0;
    unit.storages = {0};
    graph.ops = {op};
    graph.storages = {storage};
    graph.units = {unit};
    cost.forward = cost.rebuild = {{{{0, kUnitNs / 2}}, false}};
  }
  Graph graph;
  CostTable cost;
};

// The same work costs nothing where the pipeline has slack, and half a unit elsewhere:
// stage 0 of 4, 8 micro-batches, forward 1, backward 2; a rebuild lengthens the
// backward.
TEST(StagePlan, RecomputesWhereThePipelineHasSlack) {
  const OneUnit model;
  const PipelineOrder order = one_f_one_b(4, 8);
  const PipelineTimes times = equal_times(order, OneUnit::kUnitNs, 2 * OneUnit::kUnitNs);
  const std::vector<std::vector<int64_t>> free_ns = slack(order, times);
  std::vector<int64_t> backward_slack(8);
  for (size_t i = 0; i < order.ranks[0].size(); ++i) {
    const PipelinePass& pass = order.ranks[0][i];
    if (pass.kind == PassKind::kBackward) backward_slack[pass.microbatch] = free_ns[0][i];
  }
  const std::vector<LayerLoad> loads(1);
  StagePlanner planner(model.graph, model.cost, false);
  const auto recomputed = [&](int64_t dropped, int64_t& exposed) {
    StageProblem problem;
    for (int64_t ns :
         {backward_slack[3], backward_slack[4], backward_slack[5], backward_slack[6]}) {
      problem.microbatches.push_back({&loads, 0, ns});
    }
    problem.budget_bytes = (4 - dropped) * 1024;
    StagePlan plan;
    planner.plan(problem, plan);
    exposed = plan.exposed_ns;
    std::vector<int> result;
    for (int m = 0; m < 4; ++m) {
      if (plan.plans[m].residency[0] == kRecompute) result.push_back(3 + m);
    }
    return result;
  };
  int64_t exposed = -1;
  EXPECT_EQ(recomputed(0, exposed), std::vector<int>{});
  for (const int64_t dropped : {1, 2, 3}) {
    for (int m : recomputed(dropped, exposed)) EXPECT_GE(m, 4) << dropped;
    EXPECT_EQ(exposed, 0) << dropped;
  }
  EXPECT_EQ(recomputed(4, exposed), (std::vector<int>{3, 4, 5, 6}));
  EXPECT_EQ(exposed, OneUnit::kUnitNs / 2);
}

}  // namespace
}  // namespace bagualu
