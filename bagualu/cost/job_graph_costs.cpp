#include "bagualu/cost/job_graph_costs.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/cost/op_flops.h"
#include "bagualu/cost/roofline.h"

namespace bagualu {
namespace {

/// Operators of the graph that do the work of one of a JobOpList: the first that the layer has, or
/// all of them in proportion to the bytes that they read and make.
struct Place {
  std::string_view job_op;
  std::vector<std::string_view> graph_ops;
  bool shared = false;
};

const std::vector<Place>& places() {
  static const std::vector<Place> kPlaces = {
      {"qk_norm", {"q_norm", "k_norm"}, true},
      {"rope", {"q_rope", "k_rope"}, true},
      {"cp_gather", {"core_attn"}},
      {"cp_exchange", {"core_attn"}},
      {"cp_reorder", {"core_attn"}},
      {"core_softmax", {"core_attn"}},
      {"attn_residual", {"attn_bda"}},
      {"top_k", {"router"}},
      {"permute", {"dispatch_pack"}},
      {"etp_gather", {"dispatch_unpack", "dispatch_pack"}},
      {"sort_rows", {"dispatch_unpack"}},
      {"unsort_rows", {"combine_pack"}},
      {"etp_reduce", {"combine_pack", "combine_unpack"}},
      {"unpermute", {"combine_unpack"}},
      {"shared_add", {"mlp_bda"}},
      {"mlp_residual", {"mlp_bda"}},
      {"embedding_reduce", {"embedding"}},
      // A layer of the multi-token prediction has these beside an ordinary layer's.
      {"mtp_hidden_norm", {"attn_norm"}},
      {"mtp_embedding_norm", {"attn_norm"}},
      {"mtp_proj", {"attn_norm"}},
      {"final_norm", {"final_norm", "mlp_bda"}},
      {"lm_head", {"lm_head", "mlp_bda"}},
      {"loss", {"loss", "mlp_bda"}},
  };
  return kPlaces;
}

std::string_view without_layer(std::string_view name) {
  if (name.substr(0, 5) != "layer") return name;
  return name.substr(name.find('.') + 1);
}

/// Times of a graph's operators at one load.
struct OpPrices {
  std::vector<double> forward_ns;   ///< by op
  std::vector<double> backward_ns;  ///< by op
};

class Pricer {
 public:
  Pricer(const Graph& graph, const Job& job, const SystemSpec& system)
      : graph_(graph), job_(job), cost_(job, system) {
    for (size_t i = 0; i < graph.ops.size(); ++i) {
      const OpSpec& op = graph.ops[i];
      op_of_[{op.layer, without_layer(op.name)}] = static_cast<int>(i);
    }
  }

  OpPrices at(double factor) const {
    OpPrices prices{std::vector<double>(graph_.ops.size()), std::vector<double>(graph_.ops.size())};
    std::map<std::tuple<bool, bool, bool>, std::vector<JobOpPrice>> known;
    for (int layer = 0; layer < graph_.layers; ++layer) {
      const int64_t number = graph_.first_layer + layer;
      const bool mtp = number >= job_.model.layers;
      const JobLayerKind kind =
          mtp ? JobLayerKind{.moe = job_.model.has_moe()} : layer_kind(job_.model, number);
      auto [found, added] = known.try_emplace({kind.moe, kind.windowed, mtp});
      if (added) found->second = layer_prices(kind, mtp, factor);
      for (const JobOpPrice& price : found->second) charge(layer, price, prices);
    }
    if (graph_.ops.front().kind == OpKind::kEmbedding) charge_part(embedding_ops(job_), prices);
    if (graph_.ops.back().kind == OpKind::kLoss) charge_part(head_ops(job_), prices);
    for (size_t i : {size_t{0}, graph_.ops.size() - 1}) {
      const OpKind kind = graph_.ops[i].kind;
      if (kind != OpKind::kStageRecv && kind != OpKind::kStageSend) continue;
      prices.forward_ns[i] = prices.backward_ns[i] = cost_.send_ns();
    }
    return prices;
  }

 private:
  std::vector<JobOpPrice> layer_prices(JobLayerKind kind, bool mtp, double factor) const {
    std::vector<JobOpPrice> prices = cost_.op_prices(layer_ops(job_, kind, factor));
    if (!mtp) return prices;
    for (const JobOpList& more : {mtp_ops(job_), head_ops(job_)}) {
      const std::vector<JobOpPrice> of = cost_.op_prices(more);
      prices.insert(prices.end(), of.begin(), of.end());
    }
    return prices;
  }

  void charge_part(const JobOpList& ops, OpPrices& prices) const {
    for (const JobOpPrice& price : cost_.op_prices(ops)) charge(-1, price, prices);
  }

  int find(int layer, std::string_view name) const {
    const auto found = op_of_.find({layer, name});
    return found == op_of_.end() ? -1 : found->second;
  }

  double bytes_of(int op) const {
    int64_t bytes = 0;
    for (const auto* list : {&graph_.ops[op].reads, &graph_.ops[op].creates}) {
      for (int s : *list) bytes += graph_.storages[s].bytes.eval(graph_.tokens, {});
    }
    return static_cast<double>(bytes);
  }

  void charge(int layer, const JobOpPrice& price, OpPrices& prices) const {
    std::vector<int> ops;
    bool shared = false;
    const auto place = std::find_if(places().begin(), places().end(),
                                    [&](const Place& one) { return one.job_op == price.name; });
    if (place == places().end()) {
      ops.push_back(find(layer, price.name));
    } else {
      shared = place->shared;
      for (std::string_view name : place->graph_ops) {
        const int op = find(layer, name);
        if (op >= 0 && (shared || ops.empty())) ops.push_back(op);
      }
    }
    BGL_CHECK(!ops.empty() && ops.front() >= 0, "no operator for", price.name, layer);
    double all = 0;
    for (int op : ops) all += bytes_of(op);
    for (int op : ops) {
      const double share = shared ? bytes_of(op) / all : 1.0;
      prices.forward_ns[op] += share * price.forward_ns;
      prices.backward_ns[op] += share * price.backward_ns();
    }
  }

  const Graph& graph_;
  const Job& job_;
  const JobCost cost_;
  std::map<std::pair<int, std::string_view>, int> op_of_;
};

// Dense where loads usually are. Tiles make prices uneven, so that more points would not help.
std::vector<double> load_factors(double largest) {
  std::vector<double> factors;
  for (const double factor :
       {0.0,  0.0625, 0.125, 0.25, 0.5, 0.75, 0.875, 1.0,  1.125, 1.25, 1.5,
        1.75, 2.0,    2.5,   3.0,  4.0, 6.0,  8.0,   12.0, 16.0,  32.0, 64.0}) {
    if (factor < largest || factor <= 1.0) factors.push_back(factor);
  }
  if (largest > 1.0) factors.push_back(largest);
  return factors;
}

}  // namespace

CostTable job_graph_costs(const Graph& graph, const Job& job, const SystemSpec& system,
                          int64_t largest_rows) {
  const Pricer pricer(graph, job, system);
  const auto balanced = static_cast<double>(std::max<int64_t>(1, job.balanced_rows()));
  CostTable costs;
  costs.forward.resize(graph.ops.size());
  costs.backward.resize(graph.ops.size());
  costs.rebuild.resize(graph.units.size());
  const auto whole = [](double ns) { return static_cast<int64_t>(std::llround(ns)); };
  const bool loads = job.model.has_moe() && !graph.gates.empty();
  const double largest = loads ? static_cast<double>(largest_rows) / balanced : 1.0;
  for (const double factor : loads ? load_factors(largest) : std::vector<double>{1.0}) {
    const auto rows = static_cast<int64_t>(std::llround(factor * balanced));
    // Some operator tables are logarithmic: no load is priced as a very small one.
    const OpPrices prices = pricer.at(std::max(factor, 1e-3));
    for (size_t i = 0; i < graph.ops.size(); ++i) {
      const bool follows = scales_with_rows(graph.ops[i].kind) && loads;
      if (!follows && factor != 1.0) continue;
      if (!costs.forward[i].points.empty() && costs.forward[i].points.back().first >= rows)
        continue;
      costs.forward[i].points.emplace_back(follows ? rows : 0, whole(prices.forward_ns[i]));
      costs.backward[i].points.emplace_back(follows ? rows : 0, whole(prices.backward_ns[i]));
    }
  }
  set_copy_rates(system, costs);
  return costs;
}

}  // namespace bagualu
