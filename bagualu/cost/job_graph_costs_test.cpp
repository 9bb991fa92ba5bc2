#include "bagualu/cost/job_graph_costs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "bagualu/base/json.h"
#include "bagualu/graph/megatron_moe.h"
#include "bagualu/model/strategy.h"

namespace bagualu {
namespace {

const std::string kConfigs = std::string(BAGUALU_SOURCE_DIR) + "/configs/";

struct Planned {
  const char* model;
  const char* strategy;
};

Job planned(const Planned& of) {
  return job_from_strategy_file(kConfigs + "strategies/" + of.strategy + ".json",
                                model_from_file(kConfigs + "models/" + of.model + ".json"));
}

Graph stage_graph(const Job& job, int64_t first, int64_t layers) {
  MegatronGraphOptions options = megatron_options(job);
  options.first_layer = first;
  options.layer_count = layers;
  options.has_embedding = first == 0;
  options.has_head = first + layers == job.model.layers;
  return build_megatron_graph(job.model, options);
}

bool is_exchange(const OpSpec& op) {
  return op.kind == OpKind::kDispatch || op.kind == OpKind::kCombine;
}

/// Forward and backward of a layer, what its rows' exchange takes apart.
struct Sums {
  double work_ns = 0, exchange_ns = 0;
};

Sums layer_sums(const Graph& graph, const CostTable& costs, int layer, const LayerLoad& load) {
  Sums sums;
  for (int i = 0; i < static_cast<int>(graph.ops.size()); ++i) {
    if (graph.ops[i].layer != layer) continue;
    const auto ns =
        static_cast<double>(costs.forward_ns(graph, i, load) + costs.backward_ns(graph, i, load));
    (is_exchange(graph.ops[i]) ? sums.exchange_ns : sums.work_ns) += ns;
  }
  return sums;
}

TEST(JobGraphCosts, LayersOfEveryStrategyCostWhatJobCostSays) {
  const SystemSpec system = system_from_file(kConfigs + "systems/h100.json");
  for (const Planned& of :
       {Planned{"qwen3-30b-a3b", "qwen3-30b-16-gb200"},
        Planned{"qwen3-235b-a22b", "qwen3-235b-256-h100"},
        Planned{"deepseek-v3", "deepseek-v3-1024-h100"},
        Planned{"deepseek-v3", "deepseek-v3-1024-h100-fp8"},
        Planned{"deepseek-v3", "deepseek-v3-256-b200-mxfp8"},
        Planned{"llama-3-70b", "llama-3-70b-64"}, Planned{"mixtral-8x7b", "mixtral-8x7b-64"},
        Planned{"mixtral-8x22b", "mixtral-8x22b-128"}}) {
    SCOPED_TRACE(of.strategy);
    Job job = planned(of);
    job.overlap.expert = job.overlap.shared_expert = false;  // nothing beside the exchange
    const Graph graph = stage_graph(job, 0, 4);
    const int64_t rows = job.balanced_rows();
    const CostTable costs = job_graph_costs(graph, job, system, 4 * rows);
    JobCost cost(job, system);
    for (int layer = 0; layer < 4; ++layer) {
      for (const double factor : {0.5, 1.0, 1.05, 1.5, 3.5}) {
        const PartTimes& parts = cost.layer(layer, factor);
        const double exchange = parts.by_class_ns[static_cast<size_t>(JobOpClass::kEpExchange)];
        const Sums sums = layer_sums(
            graph, costs, layer,
            {.rows = static_cast<int64_t>(std::llround(factor * static_cast<double>(rows)))});
        // Tokens are permuted as at the balanced load, whatever comes; tiles are uneven between
        // points.
        const double tolerance = factor == 1.0 ? 1e-4 : 0.03 + 0.015 * std::abs(factor - 1.0);
        const double expected = parts.forward_ns + parts.backward_ns() - exchange;
        EXPECT_NEAR(sums.work_ns / expected, 1.0, tolerance) << layer << " " << factor;
        EXPECT_NEAR(sums.exchange_ns, exchange, 1e-3 * exchange) << layer << " " << factor;
      }
    }
  }
}

TEST(JobGraphCosts, EndsAndMessagesArePriced) {
  const SystemSpec system = system_from_file(kConfigs + "systems/h100.json");
  Job job = planned({"mixtral-8x7b", "mixtral-8x7b-64"});
  const int64_t layers = job.model.layers;
  JobCost cost(job, system);
  const Graph head = stage_graph(job, layers - 1, 1);
  const CostTable costs = job_graph_costs(head, job, system, job.balanced_rows());
  double sum = 0;
  for (int i = 0; i < static_cast<int>(head.ops.size()); ++i) {
    if (head.ops[i].layer >= 0 || head.ops[i].kind == OpKind::kStageRecv) continue;
    sum += static_cast<double>(costs.forward_ns(head, i, {}) + costs.backward_ns(head, i, {}));
  }
  const PartTimes& part = cost.head();
  EXPECT_NEAR(sum, part.forward_ns + part.backward_ns(), 10);
  EXPECT_EQ(costs.forward_ns(head, 0, {}), std::llround(cost.send_ns()));
}

}  // namespace
}  // namespace bagualu
