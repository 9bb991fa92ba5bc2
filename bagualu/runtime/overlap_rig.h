// Ranks that are threads of one process, and micro-batches interleaved operator by operator at
// random, on a copy engine and a process group that are as hostile as their contracts allow.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bagualu/graph/native_moe.h"
#include "bagualu/runtime/executor.h"
#include "bagualu/runtime/loopback_group.h"
#include "bagualu/runtime/runner_rig.h"
#include "bagualu/runtime/transfer_fake.h"

namespace bagualu {

/// Calls `body` once per rank, each in a thread of its own. An exception is a failure of the test.
inline void on_every_rank(int64_t size, const std::function<void(int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&body, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// One rank with everything under it; its own copy of the model.
struct OverlapRank {
  OverlapRank(const ModelSpec& model, TrainerOptions settings, int64_t rank,
              const std::string& ep_group, uint64_t seed, CommOptions comm = {})
      : spec(model),
        options(with_rank(std::move(settings), rank)),
        graph(split_graph(spec, options)),
        ep(ep_group, options.layout.ep_rank(rank), options.layout.ep_size, std::move(comm)),
        state(spec, options.layout, options.shape.dtype),
        transfers({.seed = seed}),
        executor({ExecutorStage{.graph = &graph}}, spec,
                 {options.shape.micro_batch_size,
                  options.shape.seq,
                  options.shape.dtype,
                  options.chunk_rows,
                  {.verify_checksums = true}},
                 state, {ep}, {*DeviceArena::installed(), host, transfers}) {
    state.init_parameters(options.seed, ep.rank());
    ep.reserve_gather(spec.experts);
  }

  static TrainerOptions with_rank(TrainerOptions options, int64_t rank) {
    options.rank = rank;
    return options;
  }

  // Every weight gradient may come later.
  static Graph split_graph(const ModelSpec& spec, const TrainerOptions& options) {
    NativeGraphOptions native = graph_options(options);
    native.split_weight_grads = true;
    return build_native_graph(spec, native);
  }

  MicrobatchInput input(int64_t microbatch) const {
    std::mt19937_64 random(1000 * options.rank + microbatch);
    MicrobatchInput result;
    result.microbatch = microbatch;
    result.ids = at::empty({graph.tokens}, at::kLong);
    result.targets = at::empty({graph.tokens}, at::kLong);
    for (int64_t t = 0; t < graph.tokens; ++t) {
      result.ids.data_ptr<int64_t>()[t] = static_cast<int64_t>(random() % spec.vocab);
      result.targets.data_ptr<int64_t>()[t] = static_cast<int64_t>(random() % spec.vocab);
    }
    result.routing = routing;
    result.dropout_seed = 99 + static_cast<uint64_t>(microbatch);
    result.loss_scale = 1.0 / static_cast<double>(graph.tokens);
    return result;
  }

  const ModelSpec spec;
  const TrainerOptions options;
  const Graph graph;
  Communicator ep;
  ModelState state;
  HostArena host;
  FakeTransferEngine transfers;
  Executor executor;
  const RoutingOverride* routing = nullptr;
};

/// Losses of every micro-batch and the gradients of all.
struct StepNumbers {
  std::vector<MicrobatchLosses> losses;
  std::vector<std::pair<std::string, at::Tensor>> gradients;
};

inline std::vector<std::string> differences(const StepNumbers& a, const StepNumbers& b) {
  Numbers x{{}, a.gradients}, y{{}, b.gradients};
  std::vector<std::string> found = differences(x, y);
  for (size_t m = 0; m < a.losses.size(); ++m) {
    x.losses = a.losses[m];
    y.losses = b.losses[m];
    Numbers only_x{x.losses, {}}, only_y{y.losses, {}};
    for (const std::string& name : differences(only_x, only_y)) {
      found.push_back("micro-batch " + std::to_string(m) + " " + name);
    }
  }
  return found;
}

inline StepNumbers step_numbers(OverlapRank& rank, const std::vector<MicrobatchResult>& results) {
  StepNumbers numbers;
  for (const MicrobatchResult& result : results) numbers.losses.push_back(result.losses);
  for (const auto& [name, gradient] : rank.state.gradients()) {
    numbers.gradients.emplace_back(name, gradient.clone());
  }
  return numbers;
}

/// One micro-batch after the other, everything saved.
inline StepNumbers plain_step(OverlapRank& rank, int64_t microbatches) {
  const Plan plan = uniform_plan(rank.graph, kSave);
  const Timeline timeline = build_timeline(rank.graph, plan);
  rank.state.zero_gradients();
  std::vector<MicrobatchResult> results;
  for (int64_t m = 0; m < microbatches; ++m) {
    rank.executor.open(0, 0, rank.input(m));
    rank.executor.set_plan(0, plan);
    rank.executor.run(0, timeline);
    results.push_back(rank.executor.close(0));
  }
  return step_numbers(rank, results);
}

/// Cross entropy of one micro-batch, forward only.
inline double evaluate(OverlapRank& rank, int64_t microbatch) {
  const Plan plan = uniform_plan(rank.graph, kRecompute);
  MicrobatchInput input = rank.input(microbatch);
  input.train = false;
  Timeline timeline;
  MicrobatchState state = initial_state(rank.graph);
  while (!state.forward_done(rank.graph)) append_forward(rank.graph, plan, state, timeline);
  append_end(rank.graph, plan, state, timeline);
  for (size_t s = 0; s < state.storage.size(); ++s) {  // routing is pinned by any plan
    if (state.storage[s] == StorageFate::kLive) {
      timeline.push_back({ActionKind::kFree, static_cast<int>(s)});
    }
  }
  rank.executor.open(0, 0, input);
  rank.executor.set_plan(0, plan);
  rank.executor.run(0, timeline);
  return rank.executor.close(0).losses.cross_entropy_sum;
}

/// Random order of several micro-batches. What the ranks of a group must agree on (which
/// micro-batch advances) comes from `shared_seed`; plans, deferrals and early rebuilds, on which
/// they need not, from `own_seed`.
class RandomStep {
 public:
  RandomStep(OverlapRank& rank, int64_t microbatches, uint64_t shared_seed, uint64_t own_seed)
      : rank_(rank),
        graph_(rank.graph),
        microbatches_(microbatches),
        shared_(static_cast<Random::result_type>(shared_seed)),
        own_(static_cast<Random::result_type>(own_seed)),
        most_(1 + static_cast<size_t>(shared_() % 3)),
        results_(microbatches) {}

  /// Called before every action; may throw, as the action itself might.
  std::function<void(const StageAction&)> before_action;
  /// Called after the last action.
  std::function<void()> after_actions;

  StepNumbers run() {
    rank_.state.zero_gradients();
    while (closed_ < microbatches_) {
      advance_one();
      while (below(own_, 3) == 0) do_something_else();
    }
    if (after_actions) after_actions();
    return step_numbers(rank_, results_);
  }

 private:
  struct Flight {
    int64_t microbatch = 0;
    int slot = 0;
    Plan plan;
    MicrobatchState state;
  };

  // The next operator of some micro-batch, the same on every rank.
  void advance_one() {
    std::vector<int64_t> able;
    size_t active = 0;
    for (const Flight& flight : flights_) {
      if (flight.state.backward_done()) continue;
      ++active;
      if (may_advance(flight)) able.push_back(flight.microbatch);
    }
    if (active < most_ && next_ < microbatches_) able.push_back(next_);
    const int64_t chosen =
        able.empty() ? -1 : able[static_cast<size_t>(below(shared_, std::ssize(able)))];
    if (chosen == next_) return open();
    for (size_t i = 0; i < flights_.size(); ++i) {
      if (flights_[i].microbatch == chosen) advance(flights_[i]);
    }
    if (chosen < 0) flush_all();
    close_finished();
  }

  // Gradients are added in the order of micro-batches, operator by operator.
  bool may_advance(const Flight& flight) const {
    if (!flight.state.forward_done(graph_)) return true;
    const int next =
        flight.state.in_backward ? flight.state.next_backward : std::ssize(graph_.ops) - 1;
    return std::all_of(flights_.begin(), flights_.end(), [&](const Flight& other) {
      return other.microbatch >= flight.microbatch || other.state.backward_done() ||
             (other.state.in_backward && other.state.next_backward < next);
    });
  }

  void open() {
    Flight flight;
    flight.microbatch = next_++;
    while (rank_.executor.is_open(flight.slot)) ++flight.slot;
    flight.plan = random_plan(graph_, own_);
    flight.state = initial_state(graph_);
    rank_.executor.open(flight.slot, 0, rank_.input(flight.microbatch));
    flights_.push_back(std::move(flight));
  }

  void advance(Flight& flight) {
    Timeline timeline;
    if (!flight.state.forward_done(graph_)) {
      const int gate = append_forward_op(graph_, flight.plan, flight.state, timeline);
      carry_out(flight, timeline);
      if (gate >= 0 && below(own_, 2) == 0) change_plan(flight);
      return;
    }
    const int op = flight.state.in_backward ? flight.state.next_backward : -1;
    for (Flight& other : flights_) {
      if (other.microbatch < flight.microbatch) flush(other, op);
    }
    append_backward_op(graph_, flight.plan, below(own_, 2) == 0, flight.state, timeline);
    if (flight.state.backward_done()) append_end(graph_, flight.plan, flight.state, timeline);
    carry_out(flight, timeline);
  }

  void change_plan(Flight& flight) {
    Timeline timeline;
    flight.plan = random_plan(graph_, own_);
    keep_past_choices(graph_, flight.state, flight.plan);
    append_demotions(graph_, flight.plan, flight.state, timeline);
    carry_out(flight, timeline);
  }

  // Weight gradients up to that of `op`; all if op < 0.
  void flush(Flight& flight, int op) {
    auto& left = flight.state.weight_grads;
    while (!left.empty() && (op < 0 || std::find(left.begin(), left.end(), op) != left.end())) {
      Timeline timeline;
      append_weight_grad(graph_, flight.state, timeline);
      carry_out(flight, timeline);
    }
  }

  void flush_all() {
    for (Flight& flight : flights_) flush(flight, -1);
  }

  // What a rank may do without asking the others.
  void do_something_else() {
    if (flights_.empty()) return;
    Flight& flight = flights_[static_cast<size_t>(below(own_, std::ssize(flights_)))];
    Timeline timeline;
    if (!flight.state.weight_grads.empty() && oldest_with_weight_grads(flight)) {
      append_weight_grad(graph_, flight.state, timeline);
    } else if (flight.state.in_backward && !flight.state.backward_done()) {
      const auto storage = static_cast<int>(below(own_, std::ssize(graph_.storages)));
      append_rebuild(graph_, flight.plan, storage, flight.state, timeline);
    } else if (flight.state.forward_done(graph_) && !flight.state.in_backward) {
      append_drains(graph_, flight.plan, flight.state, timeline);
      if (below(own_, 2) == 0) append_prefetch(graph_, flight.plan, flight.state, timeline);
    }
    carry_out(flight, timeline);
    close_finished();
  }

  bool oldest_with_weight_grads(const Flight& flight) const {
    const int op = flight.state.weight_grads.front();
    return std::none_of(flights_.begin(), flights_.end(), [&](const Flight& other) {
      const auto& left = other.state.weight_grads;
      return other.microbatch < flight.microbatch &&
             std::find(left.begin(), left.end(), op) != left.end();
    });
  }

  void carry_out(const Flight& flight, const Timeline& timeline) {
    rank_.executor.set_plan(flight.slot, flight.plan);
    for (const Action& action : timeline) {
      if (before_action) before_action({flight.slot, action});
      rank_.executor.run(flight.slot, {action});
    }
  }

  void close_finished() {
    std::erase_if(flights_, [&](const Flight& flight) {
      const MicrobatchState& state = flight.state;
      if (!state.backward_done() || !state.weight_grads.empty()) return false;
      results_[flight.microbatch] = rank_.executor.close(flight.slot);
      ++closed_;
      return true;
    });
  }

  OverlapRank& rank_;
  const Graph& graph_;
  const int64_t microbatches_;
  Random shared_, own_;
  const size_t most_;  ///< micro-batches whose forward or backward is under way
  std::vector<Flight> flights_;
  std::vector<MicrobatchResult> results_;
  int64_t next_ = 0, closed_ = 0;
};

}  // namespace bagualu
