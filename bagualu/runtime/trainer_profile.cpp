#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "bagualu/base/error.h"
#include "bagualu/cost/block_codes.h"
#include "bagualu/cost/op_flops.h"
#include "bagualu/cost/profile.h"
#include "bagualu/runtime/machine.h"
#include "bagualu/runtime/ops/quantise.h"
#include "bagualu/runtime/trainer.h"

namespace bagualu {
namespace {

constexpr int kBalancedRuns = 4;
constexpr int kHotRuns = 2;
constexpr int64_t kCopyBytes = int64_t{4} << 20;
constexpr int64_t kSmallestCopyBytes = int64_t{64} << 10;
constexpr int64_t kProbeMatrix = 96;
constexpr int kCopyRuns = 5;

// (x, ns) samples of one quantity; the median per x is kept.
class Samples {
 public:
  void add(int64_t x, int64_t ns) { by_x_[x].push_back(ns); }
  bool empty() const { return by_x_.empty(); }
  Json points() const {
    Json list = Json::array();
    for (auto [x, values] : by_x_) {
      std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
      list.push_back(Json::array({x, values[values.size() / 2]}));
    }
    return list;
  }

 private:
  std::map<int64_t, std::vector<int64_t>> by_x_;
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

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

struct CopySpeed {
  double d2h_bytes_per_s, h2d_bytes_per_s, hidden_fraction;
};

template <class Run>
double fastest_ns(Run&& run) {
  double best = 0.0;
  for (int i = 0; i < kCopyRuns; ++i) {
    const int64_t begin = now_ns();
    run();
    const auto took = static_cast<double>(std::max<int64_t>(now_ns() - begin, 1));
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
// other, so that every operator is timed at the loads that matter, inside its real step.
Json Trainer::measure_profile() {
  std::map<std::string, Samples> forward, backward;
  Samples fc1, act;
  SurvivalPolicy policy(graph_);
  const int64_t moe_layers = spec_.moe_layers();
  const auto run = [&](int64_t hot_rank, bool record) {
    RoutingOverride routing;
    if (moe_layers > 0) {
      routing.tokens_per_expert.assign(
          spec_.layers, forced_counts(spec_.experts, ep_.size(), graph_.tokens * ep_.size(),
                                      spec_.top_k, hot_rank));
    }
    executor_.set_observer([&](const Action& action, int64_t ns) {
      if (!record || (action.kind != ActionKind::kForward && action.kind != ActionKind::kBackward)) {
        return;
      }
      const OpSpec& op = graph_.ops[action.id];
      auto& samples = action.kind == ActionKind::kForward ? forward : backward;
      const int64_t x = scales_with_rows(op.kind) ? executor_.routing(op.layer).load.rows
                                                  : graph_.tokens;
      samples[std::string(op_kind_name(op.kind))].add(x, ns);
    });
    MicrobatchInput input;
    input.ids = ids_;
    input.targets = targets_;
    input.routing = moe_layers > 0 ? &routing : nullptr;
    runner_.train(input, policy, balanced_);
    executor_.set_observer({});
    if (!record || moe_layers == 0) return;
    for (int64_t layer = 0; layer < spec_.layers; ++layer) {
      if (!spec_.is_moe(layer)) continue;
      const int64_t rows = executor_.routing(static_cast<int>(layer)).load.rows;
      fc1.add(rows, executor_.expert_times().fc1_ns / moe_layers);
      act.add(rows, executor_.expert_times().act_ns / moe_layers);
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
    ops[kind]["forward"] = samples.points();
    ops[kind]["backward"] = backward.count(kind) > 0 ? backward.at(kind).points()
                                                     : Json::array({Json::array({0, 0})});
  }
  Json rebuild = Json::object();
  if (!fc1.empty()) rebuild = {{"expert_fc1", fc1.points()}, {"moe_act", act.points()}};
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
          {"encode_bytes_per_s", measure_encoding(probe_bytes(arena_, host_) / 2)}};
}

}  // namespace bagualu
