#include "stage_cases.h"

#include <array>
#include <utility>

#include "bagualu/cost/megatron_cost.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/schedule/replay.h"

namespace bagualu {
namespace {

constexpr int64_t kTokens = 4096;
constexpr int64_t kFirstMoeLayer = 10;

struct Shape {
  const char* file;
  int64_t ep_size;
};
constexpr std::array<Shape, 4> kShapes = {{{"deepseek-v3.json", 64},
                                           {"qwen3-235b-a22b.json", 16},
                                           {"mixtral-8x22b.json", 8},
                                           {"kimi-k2.json", 64}}};

int64_t between(std::mt19937_64& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

double fraction(std::mt19937_64& random) {
  return std::uniform_real_distribution<double>(0.0, 1.0)(random);
}

int64_t saved_bytes(const Graph& graph, const std::vector<LayerLoad>& loads) {
  int64_t sum = 0;
  for (int u = 0; u < static_cast<int>(graph.units.size()); ++u) {
    sum += graph.unit_bytes(u, graph.load_of(graph.units[u].layer, loads));
  }
  return sum;
}

// Most layers near the mean, some far above it, few without a token.
double load_factor(std::mt19937_64& random) {
  const int64_t kind = between(random, 0, 9);
  if (kind == 0) return 4.0 * fraction(random);
  if (kind == 1) return 0.0;
  return 0.8 + 0.4 * fraction(random);
}

}  // namespace

std::unique_ptr<StageCase> realistic_case(const std::filesystem::path& configs,
                                          const RealisticOptions& options,
                                          std::mt19937_64& random) {
  auto stage = std::make_unique<StageCase>();
  const Shape& shape = kShapes[static_cast<size_t>(between(random, 0, 3))];
  const ModelSpec spec = model_from_file(configs / "models" / shape.file);
  const SystemSpec system = system_from_file(configs / "systems/h800.json");
  MegatronGraphOptions graph_options;
  graph_options.seq = kTokens;
  graph_options.ep_size = shape.ep_size;
  graph_options.first_layer = kFirstMoeLayer;
  graph_options.layer_count = options.layers > 0 ? options.layers : between(random, 1, 8);
  graph_options.has_embedding = graph_options.has_head = false;
  graph_options.fp8_twins = between(random, 0, 3) == 0;
  stage->model = spec.name;
  stage->graph = build_megatron_graph(spec, graph_options);
  stage->cost = megatron_costs(stage->graph, spec, graph_options, system);
  stage->allow_quantise = between(random, 0, 5) == 0;
  const int64_t microbatches =
      options.microbatches > 0 ? options.microbatches : between(random, 1, 4);
  const double balanced = static_cast<double>(kTokens * spec.top_k);
  for (int64_t m = 0; m < microbatches; ++m) {
    std::vector<LayerLoad> loads;
    const double hot = between(random, 0, 3) == 0 ? 1.0 + 1.6 * fraction(random) : 1.0;
    for (int layer = 0; layer < stage->graph.layers; ++layer) {
      const auto rows = static_cast<int64_t>(balanced * hot * load_factor(random));
      loads.push_back({rows, rows});
    }
    stage->loads.push_back(std::move(loads));
  }
  int64_t all = 0;
  for (const auto& loads : stage->loads) {
    const int64_t bytes = saved_bytes(stage->graph, loads);
    all += bytes;
    StageMicrobatch microbatch{&loads, 0, 0};
    if (between(random, 0, 1)) {
      microbatch.free_link_bytes =
          static_cast<int64_t>(0.6 * fraction(random) * static_cast<double>(bytes));
    }
    if (between(random, 0, 2) == 0) microbatch.bubble_ns = between(random, 0, 6'000'000);
    stage->problem.microbatches.push_back(microbatch);
  }
  stage->problem.budget_bytes =
      static_cast<int64_t>((0.1 + 0.95 * fraction(random)) * static_cast<double>(all));
  stage->problem.link_ns_per_byte = 1e9 / system.d2h_bytes_per_s * (0.7 + 1.6 * fraction(random));
  if (between(random, 0, 7) == 0) {
    stage->problem.host_budget_bytes =
        static_cast<int64_t>((0.1 + 0.8 * fraction(random)) * static_cast<double>(all));
  }
  return stage;
}

std::unique_ptr<StageCase> items64_case(std::mt19937_64& random) {
  auto stage = std::make_unique<StageCase>();
  stage->model = "items64";
  stage->recompute_only = true;
  stage->graph.tokens = 1;
  stage->graph.layers = 1;
  int64_t all = 0;
  for (int i = 0; i < 64; ++i) {
    const std::string name = "item" + std::to_string(i);
    OpSpec op;
    op.name = name;
    op.layer = 0;
    op.creates = {i};
    StorageSpec storage;
    storage.name = name + ".out";
    storage.layer = 0;
    storage.producer = storage.unit = i;
    storage.bytes.fixed = kAllocationGranularity * between(random, 1, 1 << 22);
    all += storage.bytes.fixed;
    UnitSpec unit;
    unit.name = name;
    unit.layer = 0;
    unit.producer = i;
    unit.storages = {i};
    stage->graph.ops.push_back(std::move(op));
    stage->graph.storages.push_back(std::move(storage));
    stage->graph.units.push_back(std::move(unit));
    stage->cost.forward.push_back({{{0, between(random, 10'000, 2'000'000)}}, false});
  }
  stage->cost.backward = stage->cost.rebuild = stage->cost.forward;
  stage->loads.push_back({{0, 0}});
  stage->problem.microbatches.push_back({&stage->loads[0], 0, 0});
  stage->problem.budget_bytes =
      static_cast<int64_t>((0.1 + 0.8 * fraction(random)) * static_cast<double>(all));
  return stage;
}

namespace {

std::string_view rebuild_name(Rebuild rebuild) {
  switch (rebuild) {
    case Rebuild::kNever:
      return "never";
    case Rebuild::kOp:
      return "op";
    case Rebuild::kInPieces:
      return "pieces";
  }
  return "";
}

ResidencyId encoding() {
  for (size_t r = 0; r < residencies().size(); ++r) {
    if (residencies()[r].retire == Retire::kEncode) return static_cast<ResidencyId>(r);
  }
  return kSave;
}

Json microbatch_json(const StageCase& stage, size_t m) {
  const Graph& graph = stage.graph;
  const MemoryTable table = memory_table(graph, stage.loads[m]);
  Json op_ns = Json::array(), pieces_ns = Json::array(), encode_ns = Json::array();
  for (int i = 0; i < static_cast<int>(graph.ops.size()); ++i) {
    op_ns.push_back(
        stage.cost.forward_ns(graph, i, graph.load_of(graph.ops[i].layer, stage.loads[m])));
  }
  for (int u = 0; u < static_cast<int>(graph.units.size()); ++u) {
    const LayerLoad& load = graph.load_of(graph.units[u].layer, stage.loads[m]);
    const bool pieces = graph.units[u].rebuild == Rebuild::kInPieces;
    pieces_ns.push_back(pieces ? stage.cost.rebuild[u].eval(load.rows) : 0);
    encode_ns.push_back(stage.cost.residency_ns(graph, u, encoding(), load));
  }
  const StageMicrobatch& limits = stage.problem.microbatches[m];
  return {{"free_link_bytes", limits.free_link_bytes},
          {"bubble_ns", limits.bubble_ns},
          {"storage_bytes", table.storage_bytes},
          {"encoded_bytes", table.encoded_bytes},
          {"op_ns", op_ns},
          {"pieces_ns", pieces_ns},
          {"encode_ns", encode_ns}};
}

Json graph_json(const Graph& graph) {
  Json storages = Json::array(), units = Json::array(), ops = Json::array();
  for (const StorageSpec& s : graph.storages) {
    if (s.kind != StorageKind::kActivation) {
      storages.push_back({{"name", s.name}, {"layer", s.layer}, {"unit", -1}, {"producer", -1}});
      continue;
    }
    storages.push_back(
        {{"name", s.name}, {"layer", s.layer}, {"unit", s.unit}, {"producer", s.producer}});
  }
  for (const UnitSpec& u : graph.units) {
    units.push_back({{"name", u.name},
                     {"rebuild", rebuild_name(u.rebuild)},
                     {"pinned", u.pinned},
                     {"storages", u.storages}});
  }
  for (const OpSpec& op : graph.ops) {
    ops.push_back({{"name", op.name}, {"reads", op.reads}, {"creates", op.creates}});
  }
  return {{"storages", storages}, {"units", units}, {"ops", ops}};
}

}  // namespace

Json stage_case_json(int64_t number, const StageCase& stage, const StagePlan& plan,
                     int64_t solve_ns) {
  const StageProblem& problem = stage.problem;
  Json line = {{"case", number},
               {"model", stage.model},
               {"layers", stage.graph.layers},
               {"budget_bytes", problem.budget_bytes},
               {"host_budget_bytes", nullptr},
               {"link_ns_per_byte", problem.link_ns_per_byte},
               {"allow_quantise", stage.allow_quantise},
               {"recompute_only", stage.recompute_only}};
  if (problem.host_budget_bytes > 0) line["host_budget_bytes"] = problem.host_budget_bytes;
  line.update(graph_json(stage.graph));
  line["microbatches"] = Json::array();
  Json residency = Json::array();
  for (size_t m = 0; m < problem.microbatches.size(); ++m) {
    line["microbatches"].push_back(microbatch_json(stage, m));
    Json names = Json::array();
    for (ResidencyId r : plan.plans[m].residency) names.push_back(residencies()[r].name);
    residency.push_back(std::move(names));
  }
  line["result"] = {{"feasible", plan.feasible},  {"missing_bytes", plan.missing_bytes},
                    {"cost_ns", plan.exposed_ns}, {"bound_ns", plan.bound_ns},
                    {"solve_ns", solve_ns},       {"device_bytes", plan.device_bytes},
                    {"closed", plan.closed},      {"residency", std::move(residency)}};
  return line;
}

}  // namespace bagualu
