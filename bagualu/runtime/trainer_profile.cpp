#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "bagualu/base/error.h"
#include "bagualu/base/mean.h"
#include "bagualu/cost/block_codes.h"
#include "bagualu/cost/op_flops.h"
#include "bagualu/cost/profile.h"
#include "bagualu/runtime/clock.h"
#include "bagualu/runtime/machine.h"
#include "bagualu/runtime/ops/quantise.h"
#include "bagualu/runtime/trainer.h"

namespace bagualu {
namespace {

constexpr int kBalancedRuns = 10;
constexpr int kHotRuns = 5;
constexpr double kTail = 0.1;
constexpr int64_t kCopyBytes = int64_t{4} << 20;
constexpr int64_t kSmallestCopyBytes = int64_t{64} << 10;
constexpr int64_t kProbeMatrix = 96;
constexpr int kCopyRuns = 5;

// (x, ns) samples of one quantity.
class Samples {
 public:
  void add(int64_t x, int64_t ns) { by_x_[x].push_back(ns); }
  bool empty() const { return by_x_.empty(); }
  /// Means by x, without the longest `tail` of the samples.
  Json points(double tail) const {
    Json list = Json::array();
    for (const auto& [x, values] : by_x_) {
      list.push_back(Json::array({x, mean_without_tail(values, tail)}));
    }
    return list;
  }

 private:
  std::map<int64_t, std::vector<int64_t>> by_x_;
};

// Whose time is mostly that of the slowest rank, which is another one every time: pauses of any
// rank are part of every step, so none is left out.
bool waits_for_ranks(const std::string& kind) {
  return kind == op_kind_name(OpKind::kDispatch) || kind == op_kind_name(OpKind::kCombine) ||
         kind == op_kind_name(OpKind::kRouter);
}

// Time of every operator of one micro-batch; of a communication, from its issue to its end.
class OpTimer final : public ExecutorObserver {
 public:
  struct Times {
    std::vector<int64_t> forward_ns, backward_ns;  ///< by op
    std::vector<int64_t> post_ns;                  ///< of exchanges
  };

  explicit OpTimer(const Executor& executor) : executor_(executor) {}
  void on_action(const StageAction& of, int64_t begin_ns, int64_t end_ns) override {
    const auto [kind, id] = of.action;
    const Graph& graph = executor_.graph(of.slot);
    Times& all = times[&graph];
    all.forward_ns.resize(graph.ops.size(), 0);
    all.backward_ns.resize(graph.ops.size(), 0);
    const OpKind op = graph.ops[static_cast<size_t>(id)].kind;
    if ((kind == ActionKind::kForward || kind == ActionKind::kBackward) &&
        (op == OpKind::kDispatch || op == OpKind::kCombine)) {
      all.post_ns.push_back(end_ns - begin_ns);
    }
    if (kind == ActionKind::kForward || kind == ActionKind::kForwardEnd) {
      all.forward_ns[static_cast<size_t>(id)] += end_ns - begin_ns;
    } else if (kind == ActionKind::kBackward || kind == ActionKind::kBackwardEnd) {
      all.backward_ns[static_cast<size_t>(id)] += end_ns - begin_ns;
    }
  }

  std::map<const Graph*, Times> times;

 private:
  const Executor& executor_;
};

// The survival plan whatever happens, so that a profile fits into any legal budget.
class SurvivalPolicy final : public Policy {
 public:
  explicit SurvivalPolicy(const Graph& graph) : plan_(survival_plan(graph)) {}
  std::string_view name() const override { return "survival"; }
  Decision decide(const GateInput&) override {
    Decision decision;
    decision.plan = plan_;
    return decision;
  }

 private:
  Plan plan_;
};

// Counts that send as much as possible to the experts of `hot_rank` (all alike if it is -1).
std::vector<int64_t> forced_counts(int64_t experts, int64_t ep_size, int64_t all_tokens,
                                   int64_t top_k, int64_t hot_rank) {
  const int64_t local = experts / ep_size;
  std::vector<int64_t> counts(experts, 0);
  int64_t left = all_tokens * top_k;
  const auto spread = [&](int64_t begin, int64_t end) {
    const int64_t share = std::min(left / (end - begin), all_tokens);
    const int64_t extra = share == all_tokens ? 0 : left % (end - begin);
    for (int64_t e = begin; e < end; ++e) counts[e] += share + (e - begin < extra ? 1 : 0);
    left -= share * (end - begin) + extra;
  };
  if (hot_rank < 0) {
    spread(0, experts);
    return counts;
  }
  spread(hot_rank * local, (hot_rank + 1) * local);
  // top_k larger than the local experts: the rest goes to the other ranks, evenly.
  for (int64_t e = 0; e < experts && left > 0; ++e) {
    const int64_t take = std::min(left, all_tokens - counts[e]);
    counts[e] += take;
    left -= take;
  }
  return counts;
}

struct CopySpeed {
  double d2h_bytes_per_s, h2d_bytes_per_s, hidden_fraction;
};

template <class Run>
double fastest_ns(Run&& run) {
  double best = 0.0;
  for (int i = 0; i < kCopyRuns; ++i) {
    const int64_t begin = steady_now_ns();
    run();
    const auto took = static_cast<double>(std::max<int64_t>(steady_now_ns() - begin, 1));
    best = i == 0 ? took : std::min(best, took);
  }
  return best;
}

CopySpeed measure_copies(TransferEngine& engine, HostArena& host, int64_t bytes) {
  const at::Tensor device = at::zeros({bytes}, at::kByte);
  auto block = host.alloc(bytes);
  BGL_CHECK(block.ok(), "no host memory for the copy probe");
  const auto copy_out = [&] {
    engine.wait(engine.copy(Direction::kD2H, block.value().data(), device.data_ptr(), bytes, {},
                            "copy probe"));
  };
  const auto copy_in = [&] {
    engine.wait(engine.copy(Direction::kH2D, device.data_ptr(), block.value().data(), bytes, {},
                            "copy probe"));
  };
  const double out_ns = fastest_ns(copy_out), in_ns = fastest_ns(copy_in);
  // A product that takes a few times as long as the copy, alone and with the copy beside it.
  at::Tensor a = at::ones({kProbeMatrix, kProbeMatrix}), b = at::ones({kProbeMatrix, kProbeMatrix}),
             c = at::empty({kProbeMatrix, kProbeMatrix});
  const double product_ns = fastest_ns([&] { at::mm_out(c, a, b); });
  const int repeats = std::clamp(static_cast<int>(2.0 * out_ns / product_ns), 1, 2000);
  const auto products = [&] {
    for (int i = 0; i < repeats; ++i) at::mm_out(c, a, b);
  };
  const double alone_ns = fastest_ns(products);
  const double both_ns = fastest_ns([&] {
    const CopyTicket ticket = engine.copy(Direction::kD2H, block.value().data(), device.data_ptr(),
                                          bytes, {}, "copy probe");
    products();
    engine.wait(ticket);
  });
  const double hidden = std::clamp(1.0 - (both_ns - alone_ns) / out_ns, 0.0, 1.0);
  return {static_cast<double>(bytes) * 1e9 / out_ns, static_cast<double>(bytes) * 1e9 / in_ns,
          hidden};
}

// Bytes of the full copy per second, encoding and decoding taken together.
double measure_encoding(int64_t bytes) {
  at::Tensor values = at::ones({bytes / 4});
  at::Tensor codes = at::empty({block_code_bytes(bytes, 4)}, at::kByte);
  const double encode_ns = fastest_ns([&] { ops::quantise_encode(values, codes); });
  const double decode_ns = fastest_ns([&] { ops::quantise_decode(codes, values); });
  return 2.0 * static_cast<double>(bytes) * 1e9 / (encode_ns + decode_ns);
}

// As large as the budgets leave room for, half of it kept for everything else.
int64_t probe_bytes(const DeviceArena& arena, const HostArena& host) {
  int64_t bytes = kCopyBytes;
  if (arena.budget_bytes() > 0) {
    bytes = std::min(bytes, (arena.budget_bytes() - arena.live_bytes()) / 2);
  }
  if (host.limit_bytes() > 0) bytes = std::min(bytes, host.limit_bytes());
  return std::max(bytes, kSmallestCopyBytes);
}

}  // namespace

// Runs micro-batches of random tokens whose routing is forced to even and to one hot rank after the
// other, so that every operator is timed at the loads that matter, inside its real step. With
// several stages one micro-batch at a time goes through all of them.
Json Trainer::measure_profile() {
  std::map<std::string, Samples> forward, backward;
  Samples fc1, act, post;
  std::vector<std::unique_ptr<SurvivalPolicy>> policies;
  std::vector<RankStage> list;
  for (auto& stage : stages_) {
    stage->cost.forward.resize(stage->graph.ops.size());
    stage->cost.backward.resize(stage->graph.ops.size());
    stage->cost.rebuild.resize(stage->graph.units.size());
    stage->context = {.graph = &stage->graph,
                      .cost = &stage->cost,
                      .balanced = balanced_,
                      .worst_case = worst_case_};
    policies.push_back(std::make_unique<SurvivalPolicy>(stage->graph));
    list.push_back({stage->number, &stage->context, policies.back().get()});
  }
  runner_.set_stages(std::move(list), {});
  TrainerOptions alone = options_;
  alone.overlap = false;
  const RankProgram program = make_program(alone, 1);
  const auto run = [&](int64_t hot_rank, bool record) {
    RoutingOverride routing;
    routing.tokens_per_expert.resize(static_cast<size_t>(spec_.layers));
    for (int64_t layer = 0; layer < spec_.layers; ++layer) {
      if (!spec_.is_moe(layer)) continue;
      routing.tokens_per_expert[static_cast<size_t>(layer)] = forced_counts(
          spec_.experts, ep_.size(), options_.shape.tokens() * ep_.size(), spec_.top_k, hot_rank);
    }
    OpTimer timer(executor_);
    executor_.add_observer(&timer);
    const PassesReport report = runner_.train(program, [&](int, int, int64_t) {
      MicrobatchInput input;
      input.ids = ids_[0];
      input.targets = targets_[0];
      input.routing = spec_.moe_layers() > 0 ? &routing : nullptr;
      return input;
    });
    executor_.remove_observer(&timer);
    if (!record) return;
    for (const MicrobatchReport& microbatch : report.microbatches) {
      const Graph& graph = stages_[static_cast<size_t>(microbatch.stage)]->graph;
      const OpTimer::Times& times = timer.times.at(&graph);
      for (size_t i = 0; i < graph.ops.size(); ++i) {
        const OpSpec& op = graph.ops[i];
        const auto layer = static_cast<size_t>(std::max(op.layer, 0));
        const int64_t x =
            scales_with_rows(op.kind) ? microbatch.routing[layer]->load.rows : graph.tokens;
        const std::string kind(op_kind_name(op.kind));
        forward[kind].add(x, times.forward_ns[i]);
        if (op.has_backward) backward[kind].add(x, times.backward_ns[i]);
      }
      for (const int64_t ns : times.post_ns) post.add(0, ns);
      const auto gates = static_cast<int64_t>(graph.gates.size());
      for (const GateSpec& gate : graph.gates) {
        const int64_t rows = microbatch.routing[static_cast<size_t>(gate.layer)]->load.rows;
        fc1.add(rows, microbatch.expert_times.fc1_ns / gates);
        act.add(rows, microbatch.expert_times.act_ns / gates);
      }
    }
  };
  run(-1, false);  // first touch of every buffer and kernel
  for (int i = 0; i < kBalancedRuns; ++i) run(-1, true);
  if (ep_.size() > 1) {
    for (int64_t hot = 0; hot < ep_.size(); ++hot) {
      for (int i = 0; i < kHotRuns; ++i) run(hot, true);
    }
  }
  model_.zero_gradients();

  Json ops = Json::object();
  for (const auto& [kind, samples] : forward) {
    const double tail = waits_for_ranks(kind) ? 0 : kTail;
    ops[kind]["forward"] = samples.points(tail);
    ops[kind]["backward"] = backward.count(kind) > 0 ? backward.at(kind).points(tail)
                                                     : Json::array({Json::array({0, 0})});
  }
  Json rebuild = Json::object();
  if (!fc1.empty()) rebuild = {{"expert_fc1", fc1.points(kTail)}, {"moe_act", act.points(kTail)}};
  const CopySpeed copies = measure_copies(transfers_, host_, probe_bytes(arena_, host_));
  host_.trim();
  return {{"version", 1},
          {"machine", to_json(this_machine())},
          {"model_key", profile_key(spec_, graph_options(options_))},
          {"ops", ops},
          {"rebuild", rebuild},
          {"d2h_bytes_per_s", copies.d2h_bytes_per_s},
          {"h2d_bytes_per_s", copies.h2d_bytes_per_s},
          {"copy_hidden_fraction", copies.hidden_fraction},
          {"encode_bytes_per_s", measure_encoding(probe_bytes(arena_, host_) / 2)},
          {"exchange_post_ns", post.empty() ? Json(0) : post.points(kTail)[0][1]}};
}

}  // namespace bagualu
