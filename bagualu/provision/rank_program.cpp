#include "bagualu/provision/rank_program.h"

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

// Nothing is executed: the driver's own replay is all there is.
class LoadsHost final : public RankHost {
 public:
  LoadsHost(const std::vector<RankStage>& stages, const LoadOf& load_of)
      : stages_(stages), load_of_(load_of) {}

  void open(int slot, int stage, int microbatch) override {
    const auto at = static_cast<size_t>(slot);
    if (slots_.size() <= at) slots_.resize(at + 1);
    slots_[at] = {stage, microbatch};
  }
  void run(const RankTimeline&) override {}
  GateCounts counts(int slot, int layer) override {
    const auto [stage, microbatch] = slots_[static_cast<size_t>(slot)];
    const LayerLoad load = load_of_(stage, microbatch, layer);
    int64_t balanced = 1;
    for (const RankStage& one : stages_) {
      if (one.stage == stage) balanced = std::max<int64_t>(1, one.context->balanced.rows);
    }
    return {load, static_cast<double>(load.rows) / static_cast<double>(balanced)};
  }
  bool agree(bool mine) override { return mine; }
  void close(int) override {}

 private:
  const std::vector<RankStage>& stages_;
  const LoadOf& load_of_;
  std::vector<std::pair<int, int>> slots_;  ///< stage and micro-batch
};

}  // namespace

RankProgram rank_program(const OverlapOrder& order, const SendPlan& sends, int rank) {
  const auto at = static_cast<size_t>(rank);
  RankProgram program;
  program.passes = order.order.ranks.at(at);
  if (!order.fused.empty()) program.fused = order.fused.at(at);
  program.sends.resize(program.passes.size() + 1);
  for (size_t k = 0; k < program.passes.size(); ++k) {
    const PassTraffic& traffic = sends.at[at][k];
    for (int message : traffic.post) {
      program.sends[k].post.push_back(sends.messages[static_cast<size_t>(message)].to);
    }
    for (int message : traffic.await_sent) {
      program.sends[k].await.push_back(sends.messages[static_cast<size_t>(message)].from);
    }
  }
  for (int message : sends.await_at_end[at]) {
    program.sends.back().await.push_back(sends.messages[static_cast<size_t>(message)].from);
  }
  return program;
}

int most_in_flight(const RankProgram& program, int stage) {
  int now = 0, most = 0;
  for (size_t k = 0; k < program.passes.size();) {
    const size_t next = program.after(k);
    int ended = 0;
    for (size_t i = k; i < next; ++i) {
      const PipelinePass& pass = program.passes[i];
      if (pass.stage != stage) continue;
      if (pass.kind == PassKind::kForward) ++now;
      if (is_backward(pass.kind)) ++ended;
    }
    most = std::max(most, now);
    now -= ended;
    k = next;
  }
  return most;
}

int most_flights(const RankProgram& program) {
  const auto awaited = [&](const PipelinePass& pass) {
    return std::any_of(program.sends.begin(), program.sends.end(), [&](const PassSends& sends) {
      return std::find(sends.await.begin(), sends.await.end(), pass) != sends.await.end();
    });
  };
  const auto listed = [&](const PipelinePass& pass) {
    return std::find(program.passes.begin(), program.passes.end(), pass) != program.passes.end();
  };
  std::vector<PipelinePass> open;     // their forwards
  std::vector<PipelinePass> pending;  // what still stands between a flight and its end
  const auto begin = [&](const PipelinePass& forward) {
    if (std::find(open.begin(), open.end(), forward) == open.end()) open.push_back(forward);
  };
  size_t most = 0;
  const auto over = [&](const PipelinePass& done) {
    pending.erase(std::remove(pending.begin(), pending.end(), done), pending.end());
    for (const PipelinePass& one : pending) {
      if (one.stage == done.stage && one.microbatch == done.microbatch) return;
    }
    const PipelinePass forward{done.stage, PassKind::kForward, done.microbatch};
    open.erase(std::remove(open.begin(), open.end(), forward), open.end());
  };
  for (size_t k = 0; k <= program.passes.size(); ++k) {
    if (k < program.sends.size()) {
      for (const PipelinePass& pass : program.sends[k].post) {
        if (pass.kind == PassKind::kForward) begin(pass);
      }
      most = std::max(most, open.size());
      for (const PipelinePass& pass : program.sends[k].await) {
        if (is_backward(pass.kind)) over(pass);
      }
    }
    if (k == program.passes.size()) break;
    const PipelinePass& pass = program.passes[k];
    if (pass.kind == PassKind::kForward) begin(pass);
    most = std::max(most, open.size());
    const PipelinePass weights{pass.stage, PassKind::kWeightGrad, pass.microbatch};
    const PipelinePass below{pass.stage - 1, pass.kind, pass.microbatch};
    if (is_backward(pass.kind)) {
      over({pass.stage + 1, pass.kind, pass.microbatch});  // a neighbour on this rank waited for it
      if (pass.kind == PassKind::kInputGrad && listed(weights)) pending.push_back(weights);
      if (awaited(pass) || listed(below)) pending.push_back(pass);
      if (std::none_of(pending.begin(), pending.end(), [&](const PipelinePass& one) {
            return one.stage == pass.stage && one.microbatch == pass.microbatch;
          })) {
        over(pass);
      }
    } else if (pass.kind == PassKind::kWeightGrad) {
      over(pass);
    }
  }
  return static_cast<int>(most);
}

int most_boundaries(const RankProgram& program) {
  std::vector<PipelinePass> posted, unawaited;
  const auto remove = [](std::vector<PipelinePass>& list, const PipelinePass& pass) {
    list.erase(std::remove(list.begin(), list.end(), pass), list.end());
  };
  size_t most = 0;
  for (size_t k = 0; k < program.passes.size();) {
    const size_t next = program.after(k);
    if (k < program.sends.size()) {
      for (const PipelinePass& pass : program.sends[k].post) posted.push_back(pass);
    }
    most = std::max(most, posted.size() + unawaited.size());
    if (k < program.sends.size()) {
      for (const PipelinePass& pass : program.sends[k].await) remove(unawaited, pass);
    }
    for (size_t i = k; i < next; ++i) {
      const PipelinePass& pass = program.passes[i];
      remove(posted, pass);
      // Between two stages of this rank the output is held until the other pass begins.
      const int step = pass.kind == PassKind::kForward ? 1 : -1;
      if (pass.kind != PassKind::kWeightGrad) {
        remove(unawaited, {pass.stage - step, pass.kind, pass.microbatch});
        unawaited.push_back(pass);
      }
    }
    most = std::max(most, posted.size() + unawaited.size());
    k = next;
  }
  return static_cast<int>(most);
}

RankFloor rank_floor(const RankProgram& program, const std::vector<int>& stages,
                     const std::vector<const Graph*>& graphs, const LayerLoad& worst_case,
                     int64_t message_bytes) {
  BGL_CHECK(stages.size() == graphs.size(), stages.size(), graphs.size());
  RankFloor floor;
  bool neighbours = false;
  for (size_t s = 0; s < stages.size(); ++s) {
    floor.in_flight.push_back(std::max(1, most_in_flight(program, stages[s])));
    floor.stages.push_back(compute_floor(*graphs[s], worst_case, floor.in_flight.back()));
    floor.activation_bytes += floor.stages.back().activation_bytes;
    floor.host_bytes += floor.stages.back().host_bytes;
    neighbours = neighbours || graphs[s]->ops.front().kind == OpKind::kStageRecv ||
                 graphs[s]->ops.back().kind == OpKind::kStageSend;
  }
  if (neighbours) floor.boundary_bytes = most_boundaries(program) * message_bytes;
  floor.activation_bytes += floor.boundary_bytes;
  return floor;
}

std::vector<int64_t> stage_calm_bytes(const RankFloor& floor,
                                      const std::vector<const Graph*>& graphs,
                                      const LayerLoad& balanced) {
  std::vector<int64_t> calm;
  for (size_t s = 0; s < graphs.size(); ++s) {
    const Graph& graph = *graphs[s];
    const MicrobatchBytes one = microbatch_bytes(graph, uniform_plan(graph, kSave),
                                                 memory_table(graph, every_layer(graph, balanced)));
    calm.push_back((floor.in_flight[s] - 1) * one.rest_bytes +
                   std::max(one.forward_peak_bytes, one.backward_peak_bytes));
  }
  return calm;
}

std::vector<int64_t> stage_budgets(const RankFloor& floor, const std::vector<int64_t>& calm_bytes,
                                   int64_t budget_bytes) {
  const size_t stages = floor.stages.size();
  if (budget_bytes == 0) return std::vector<int64_t>(stages, 0);
  std::vector<int64_t> budgets, wanted;
  int64_t wanted_sum = 0;
  for (size_t s = 0; s < stages; ++s) {
    const int64_t least = floor.stages[s].activation_bytes;
    budgets.push_back(least);
    wanted.push_back(std::max<int64_t>(calm_bytes[s] - least, 1));
    wanted_sum += wanted.back();
  }
  // Below the floor (only a caller that changes budgets gets there) every stage has its floor.
  int64_t left = std::max<int64_t>(budget_bytes - floor.activation_bytes, 0);
  for (size_t s = 0; s < stages; ++s) {
    const auto part =
        static_cast<int64_t>(static_cast<double>(left) * static_cast<double>(wanted[s]) /
                             static_cast<double>(wanted_sum));
    budgets[s] += std::min(part, left);
    left -= std::min(part, left);
    wanted_sum -= wanted[s];
  }
  return budgets;
}

RankRun replay_rank(const std::vector<RankStage>& stages, const RankOptions& options,
                    const RankProgram& program, const LoadOf& load_of) {
  LoadsHost host(stages, load_of);
  return RankDriver(stages, options, host).run(program);
}

}  // namespace bagualu
