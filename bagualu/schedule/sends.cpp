#include "bagualu/schedule/sends.h"

#include <algorithm>
#include <cstddef>

#include "bagualu/base/error.h"
#include "bagualu/schedule/pass_graph.h"

namespace bagualu {
namespace {

using Node = PassGraph::Node;

// For every node, how many passes of each rank have surely ended when it starts.
class EndedBefore {
 public:
  explicit EndedBefore(const PassGraph& graph)
      : ranks_(graph.order().ranks.size()), counts_(ranks_) {
    for (size_t r = 0; r < ranks_; ++r) {
      counts_[r].assign(graph.order().ranks[r].size() * ranks_, 0);
    }
    for (const Node& node : graph.sorted()) {
      size_t* own = row(node);
      const auto add = [&](const Node& from) {
        const size_t* before = row(from);
        for (size_t r = 0; r < ranks_; ++r) own[r] = std::max(own[r], before[r]);
        own[from.rank] = std::max(own[from.rank], from.index + graph.size_of(from));
      };
      if (graph.before(node).compute != PassGraph::kNone) {
        add({node.rank, graph.before(node).compute});
      }
      for (size_t part = 0; part < graph.size_of(node); ++part) {
        const PassInputs inputs = graph.inputs_of(graph.pass_at(node, part));
        for (size_t i = 0; i < inputs.count; ++i) add(graph.node_of(inputs.pass[i]));
      }
    }
  }

  size_t of(const Node& node, size_t rank) const {
    return counts_[node.rank][node.index * ranks_ + rank];
  }

 private:
  size_t* row(const Node& node) { return &counts_[node.rank][node.index * ranks_]; }

  size_t ranks_;
  std::vector<std::vector<size_t>> counts_;  // by rank, then pass and rank
};

class Planner {
 public:
  explicit Planner(const OverlapOrder& order)
      : order_(order.order), graph_(order_, &order.fused), ended_(graph_) {
    for (const auto& list : order_.ranks) plan_.at.emplace_back(list.size());
    plan_.await_at_end.resize(order_.ranks.size());
  }

  SendPlan make() {
    // By receiver, in the order of its list: what is posted before one pass is so in that order.
    for (size_t r = 0; r < order_.ranks.size(); ++r) {
      for (size_t i = 0; i < order_.ranks[r].size(); i += graph_.size_of({r, i})) {
        for (size_t part = 0; part < graph_.size_of({r, i}); ++part) add_inputs({r, i}, part);
      }
    }
    add_sends();
    return std::move(plan_);
  }

 private:
  void add_inputs(const Node& node, size_t part) {
    const PipelinePass& pass = graph_.pass_at(node, part);
    const PassInputs inputs = graph_.inputs_of(pass);
    for (size_t i = 0; i < inputs.count; ++i) {
      const Node from = graph_.node_of(inputs.pass[i]);
      if (from.rank == node.rank) continue;
      const auto number = static_cast<int>(plan_.messages.size());
      plan_.messages.push_back(
          {inputs.pass[i], pass, static_cast<int>(from.rank), static_cast<int>(node.rank)});
      const size_t previous = graph_.before(node).compute;
      const bool early = previous != PassGraph::kNone && ended_.of(from, node.rank) <= previous;
      const size_t posted = early ? previous : node.index;
      plan_.at[node.rank][posted].post.push_back(number);
      plan_.at[node.rank][node.index].receive.push_back(number);
      await_send(number, from, node.rank, posted);
    }
  }

  // What has ended only grows along a rank's list.
  void await_send(int number, const Node& from, size_t receiver, size_t posted) {
    const auto& list = order_.ranks[from.rank];
    size_t low = from.index + graph_.size_of(from);
    size_t high = list.size();
    while (low < high) {
      const size_t middle = leader(from.rank, (low + high) / 2);
      if (middle >= low && ended_.of({from.rank, middle}, receiver) > posted) {
        high = middle;
      } else {
        low = middle + graph_.size_of({from.rank, middle});
      }
    }
    if (low == list.size()) {
      plan_.await_at_end[from.rank].push_back(number);
    } else {
      plan_.at[from.rank][low].await_sent.push_back(number);
    }
  }

  size_t leader(size_t rank, size_t index) const {
    return graph_.node_of(order_.ranks[rank][index]).index;
  }

  void add_sends() {
    std::vector<std::vector<std::vector<std::pair<size_t, int>>>> sends;  // place in slot, number
    for (const auto& list : order_.ranks) sends.emplace_back(list.size());
    for (size_t n = 0; n < plan_.messages.size(); ++n) {
      const PipelinePass& from = plan_.messages[n].from;
      const Node node = graph_.node_of(from);
      const size_t part = graph_.pass_at(node) == from ? 0 : 1;
      sends[node.rank][node.index].push_back({part, static_cast<int>(n)});
    }
    for (size_t r = 0; r < sends.size(); ++r) {
      for (size_t i = 0; i < sends[r].size(); ++i) {
        std::sort(sends[r][i].begin(), sends[r][i].end());
        for (const auto& [part, number] : sends[r][i]) plan_.at[r][i].send.push_back(number);
      }
    }
  }

  const PipelineOrder& order_;
  PassGraph graph_;
  EndedBefore ended_;
  SendPlan plan_;
};

}  // namespace

SendPlan send_plan(const OverlapOrder& order) { return Planner(order).make(); }

std::vector<int> most_unawaited_sends(const SendPlan& plan) {
  std::vector<int> result;
  for (const auto& list : plan.at) {
    int now = 0;
    int most = 0;
    for (const PassTraffic& traffic : list) {
      now += static_cast<int>(traffic.send.size()) - static_cast<int>(traffic.await_sent.size());
      most = std::max(most, now);
    }
    result.push_back(most);
  }
  return result;
}

}  // namespace bagualu
