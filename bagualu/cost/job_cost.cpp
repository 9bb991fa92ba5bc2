#include "bagualu/cost/job_cost.h"

#include <algorithm>
#include <cmath>

namespace bagualu {
namespace {

constexpr double kNsPerS = 1e9;
// Of a GEMM's operand traffic, what is not hidden behind its arithmetic. In the GEMM times that
// MooreThreads/SimuMax publishes for B200 (configs/system/b200_bf16_ceperm.json), weight gradients
// that accumulate into fp32 take longer than input gradients of the same shape by 0.4 to 1.1 of
// what their extra bytes need at the peak bandwidth, which is half of that at the usual efficiency.
constexpr double kShownTrafficFraction = 0.5;

/// Share of the compute units at work, averaged over the rounds in which a GEMM's output tiles are
/// dealt to them: the last round is seldom full.
double full_rounds_fraction(double rows, double columns, double copies, int64_t units) {
  constexpr double kTile = 128, kWideTile = 256;
  if (units == 0 || rows <= 0) return 1;
  const auto share = [&](double tile_rows, double tile_columns) {
    const double tiles =
        copies * std::ceil(rows / copies / tile_rows) * std::ceil(columns / tile_columns);
    const double rounds = std::ceil(tiles / static_cast<double>(units));
    return rows * columns / (rounds * static_cast<double>(units) * kTile * kWideTile);
  };
  return std::max(share(kTile, kWideTile), share(kWideTile, kTile));
}

struct ModuleOps {
  std::string_view module;
  std::vector<std::string_view> ops;
};

/// What Megatron's module names stand for, in the operators of job_ops.cpp.
const std::vector<ModuleOps>& modules() {
  static const std::vector<ModuleOps> kModules = {
      {"core_attn", {"core_attn", "core_softmax"}},
      {"moe_act", {"moe_act"}},
      {"mlp_act", {"mlp_act", "moe_act", "shared_act"}},
      {"layernorm", {"attn_norm", "mlp_norm", "q_norm", "kv_norm"}},
      {"mla_up_proj", {"q_up", "kv_up", "rope", "q_norm", "kv_norm"}},
      {"mlp", {"mlp_fc1", "mlp_act", "mlp_fc2"}},
      {"moe",
       {"router", "top_k", "permute", "dispatch", "etp_gather", "sort_rows", "expert_fc1",
        "moe_act", "expert_fc2", "unsort_rows", "etp_reduce", "combine", "unpermute", "shared_fc1",
        "shared_act", "shared_fc2", "shared_add"}},
      {"shared_experts", {"shared_fc1", "shared_act", "shared_fc2"}},
      {"qkv_linear", {"qkv", "q_down", "kv_down", "q_up", "kv_up"}},
      {"attn_norm", {"attn_norm"}},
      {"attn_proj", {"attn_proj"}},
      {"mlp_norm", {"mlp_norm"}},
      {"expert_fc1", {"expert_fc1"}},
  };
  return kModules;
}

bool names(const std::vector<std::string>& chosen, std::string_view op) {
  for (const std::string& name : chosen) {
    if (name == "all") return true;
    for (const ModuleOps& entry : modules()) {
      if (entry.module != name) continue;
      if (std::find(entry.ops.begin(), entry.ops.end(), op) != entry.ops.end()) return true;
    }
  }
  return false;
}

/// Rate of a ring over `size` ranks `stride` apart: every rank of a node brings its own port.
double ring_rate(int64_t size, int64_t stride, const SystemSpec& system) {
  const int64_t in_node = std::clamp<int64_t>(system.node_size / stride, 1, size);
  if (in_node == size && size * stride <= system.node_size) return system.node_link_bytes_per_s;
  return std::min(system.node_link_bytes_per_s,
                  static_cast<double>(in_node) * system.link_bytes_per_s);
}

/// Rate at which a rank's rows for other ranks leave, the node's link and the network working side
/// by side; `far_share`: copies that cross the network over those for ranks of other nodes.
double exchange_rate(int64_t size, int64_t stride, double far_share, const SystemSpec& system) {
  const int64_t in_node = std::clamp<int64_t>(system.node_size / stride, 1, size);
  const double others = static_cast<double>(size - 1);
  if (others == 0 || in_node == size) return system.node_link_bytes_per_s;
  const double near = static_cast<double>(in_node - 1) / others;
  const double far = (1 - near) * far_share;
  return 1 / std::max(near / system.node_link_bytes_per_s, far / system.link_bytes_per_s);
}

/// DeepEP (the flex dispatcher) sends a token once to a node, however many of its top_k experts are
/// there: of n nodes, each chosen alike, n (1 - (1 - 1/n)^k) are hit.
double far_share(const Job& job, const SystemSpec& system) {
  if (job.moe.dispatcher != "flex") return 1;
  const double nodes =
      static_cast<double>(job.layout.ep * job.layout.etp) / static_cast<double>(system.node_size);
  if (nodes <= 1) return 1;
  const double top_k = static_cast<double>(job.model.top_k);
  return nodes * (1 - std::pow(1 - 1 / nodes, top_k)) / top_k;
}

}  // namespace

PartTimes& PartTimes::add(const PartTimes& other, double times) {
  forward_ns += times * other.forward_ns;
  input_gradient_ns += times * other.input_gradient_ns;
  weight_gradient_ns += times * other.weight_gradient_ns;
  recompute_ns += times * other.recompute_ns;
  forward_exposed_ns += times * other.forward_exposed_ns;
  backward_exposed_ns += times * other.backward_exposed_ns;
  recompute_exposed_ns += times * other.recompute_exposed_ns;
  for (size_t i = 0; i < by_class_ns.size(); ++i) by_class_ns[i] += times * other.by_class_ns[i];
  model_flops += times * other.model_flops;
  dense_weights += times * other.dense_weights;
  expert_weights += times * other.expert_weights;
  offload_bytes += times * other.offload_bytes;
  return *this;
}

bool recomputes(const RecomputeSettings& settings, std::string_view op) {
  if (settings.granularity == RecomputeGranularity::kFull) return true;
  return settings.granularity == RecomputeGranularity::kSelective && names(settings.modules, op);
}

bool offloads(const OffloadSettings& settings, std::string_view op) {
  return names(settings.modules, op);
}

JobLinks job_links(const Job& job, const SystemSpec& system) {
  const JobLayout& l = job.layout;
  const double e = system.collective_efficiency_fraction;
  const int64_t stage_ranks = l.world_size / l.pp;
  JobLinks links;
  links.tp_bytes_per_s = e * ring_rate(l.tp, 1, system);
  links.etp_bytes_per_s = e * ring_rate(l.etp, 1, system);
  links.cp_bytes_per_s = e * ring_rate(l.cp, l.tp, system);
  links.ep_bytes_per_s = e * exchange_rate(l.ep, l.etp, far_share(job, system), system);
  links.ep_node_bytes_per_s = e * system.node_link_bytes_per_s;
  links.ep_network_bytes_per_s = e * system.link_bytes_per_s / far_share(job, system);
  links.dp_bytes_per_s = e * ring_rate(l.dp() * l.cp, l.tp, system);
  links.expert_dp_bytes_per_s = e * ring_rate(l.expert_dp(), l.ep * l.etp, system);
  links.pp_bytes_per_s =
      e * (l.pp == 1 || l.world_size <= system.node_size || stage_ranks < system.node_size
               ? system.node_link_bytes_per_s
               : system.link_bytes_per_s);
  return links;
}

JobCost::JobCost(const Job& job, const SystemSpec& system)
    : job_(job), system_(system), links_(job_links(job, system)) {
  peak_flops_per_ns_ = (job.fp8                  ? system.fp8_flops_per_s
                        : job.element_bytes == 4 ? system.fp32_flops_per_s
                                                 : system.bf16_flops_per_s) /
                       kNsPerS;
  memory_bytes_per_ns_ = system.memory_bytes_per_s * system.memory_efficiency_fraction / kNsPerS;
  embedding_ = price(embedding_ops(job));
  head_ = price(head_ops(job));
}

double JobCost::wire_bytes_per_ns(const JobOp& op) const {
  switch (op.wire) {
    case JobOpClass::kCpExchange:
      return links_.cp_bytes_per_s / kNsPerS;
    case JobOpClass::kEpExchange:
      return links_.ep_bytes_per_s / kNsPerS;
    default:
      return (op.expert ? links_.etp_bytes_per_s : links_.tp_bytes_per_s) / kNsPerS;
  }
}

namespace {

/// The class' efficiency and, if the machine has one, its table of measured times.
struct ClassRate {
  double efficiency_fraction = 1;
  const std::vector<MeasuredOperator>* table = nullptr;
};

ClassRate rate_of(JobOpClass kind, bool backward, const SystemSpec& s) {
  const MeasuredOperators& m = s.measured_operators;
  switch (kind) {
    case JobOpClass::kAttention:
      return backward ? ClassRate{s.attention_backward_efficiency_fraction, &m.attention_backward}
                      : ClassRate{s.attention_forward_efficiency_fraction, &m.attention_forward};
    case JobOpClass::kGroupedGemm:
      return {s.grouped_gemm_efficiency_fraction, &m.grouped_gemm};
    case JobOpClass::kGemm:
      return {s.gemm_efficiency_fraction, &m.gemm};
    default:
      return {1, &m.memory};
  }
}

/// Share of full rounds of the GEMM of a pass; 1 for what is none.
double rounds_of(const JobOp& op, const JobWork& work, int64_t units) {
  if (op.rows <= 0) return 1;
  if (&work == &op.forward) return full_rounds_fraction(op.rows, op.out, op.copies, units);
  if (&work == &op.input_gradient) return full_rounds_fraction(op.rows, op.in, op.copies, units);
  return full_rounds_fraction(op.in * op.copies, op.out, op.copies, units);
}

}  // namespace

double JobCost::busy_ns(const JobOp& op, const JobWork& work, bool backward) const {
  if (work.flops == 0 && work.memory_bytes == 0) return 0;
  const ClassRate rate = rate_of(op.kind, backward, system_);
  const double of_class = work.flops > 0 ? work.flops : work.memory_bytes;
  if (!rate.table->empty()) return measured_ns(*rate.table, of_class);
  const double launch = static_cast<double>(op.kernels * system_.launch_ns);
  const double traffic = work.memory_bytes / memory_bytes_per_ns_;
  if (work.flops == 0) return launch + traffic;
  const double arithmetic = work.flops / (peak_flops_per_ns_ * rate.efficiency_fraction *
                                          rounds_of(op, work, system_.compute_units));
  return launch + std::max(traffic, arithmetic + kShownTrafficFraction * traffic);
}

double JobCost::exposed_ns(const JobOp& op, const JobWork& work, double busy_ns) const {
  if (work.collectives == 0) return 0;
  const double latency = static_cast<double>(work.collectives * system_.collective_latency_ns);
  const double rate = wire_bytes_per_ns(op);
  const double hidden_ns = work.hidden_wire_bytes / rate;
  const double beside = system_.comm_overlap_fraction * std::min(hidden_ns, busy_ns);
  return latency + work.wire_bytes / rate + hidden_ns - beside;
}

PartTimes JobCost::price_of(const JobOp& op) const {
  PartTimes part;
  const double forward = busy_ns(op, op.forward, false);
  const double input = busy_ns(op, op.input_gradient, true);
  const double weight = busy_ns(op, op.weight_gradient, true);
  const double forward_wait = exposed_ns(op, op.forward, forward);
  const double input_wait = exposed_ns(op, op.input_gradient, input);
  const double weight_wait = exposed_ns(op, op.weight_gradient, weight);
  part.forward_ns += forward + forward_wait;
  part.input_gradient_ns += input + input_wait;
  part.weight_gradient_ns += weight + weight_wait;
  part.forward_exposed_ns += forward_wait;
  part.backward_exposed_ns += input_wait + weight_wait;
  const double waits = forward_wait + input_wait + weight_wait;
  part.by_class_ns[static_cast<size_t>(op.kind)] += forward + input + weight;
  part.by_class_ns[static_cast<size_t>(op.wire)] += waits;
  if (recomputes(job_.recompute, op.name)) {
    part.recompute_ns += forward + forward_wait;
    part.recompute_exposed_ns += forward_wait;
  }
  part.model_flops += op.model_flops;
  (op.expert ? part.expert_weights : part.dense_weights) += op.weights;
  if (offloads(job_.offload, op.name)) part.offload_bytes += op.saved_bytes;
  return part;
}

PartTimes JobCost::price(const JobOpList& ops) const {
  PartTimes part;
  double beside_exchange_ns = 0;
  for (const JobOp& op : ops) {
    const PartTimes one = price_of(op);
    part += one;
    if (op.with_exchange) beside_exchange_ns += one.by_class_ns[static_cast<size_t>(op.kind)];
  }
  part.offload_bytes *= job_.offload.fraction;
  // The rows' exchange beside the shared expert, or beside another micro-batch's compute.
  const double exchange = part.by_class_ns[static_cast<size_t>(JobOpClass::kEpExchange)];
  const double compute =
      part.forward_ns + part.backward_ns() - part.forward_exposed_ns - part.backward_exposed_ns;
  const double window = job_.overlap.expert ? compute : beside_exchange_ns;
  const double hidden = system_.comm_overlap_fraction * std::min(exchange, window);
  if (hidden > 0) {
    // Exchanges of forward and backward are alike, two each.
    part.forward_ns -= hidden / 2;
    part.input_gradient_ns -= hidden / 2;
    part.forward_exposed_ns -= hidden / 2;
    part.backward_exposed_ns -= hidden / 2;
    part.by_class_ns[static_cast<size_t>(JobOpClass::kEpExchange)] -= hidden;
  }
  return part;
}

std::vector<JobOpPrice> JobCost::op_prices(const JobOpList& ops) const {
  std::vector<JobOpPrice> prices;
  for (const JobOp& op : ops) {
    const PartTimes one = price_of(op);
    prices.push_back({op.name, one.forward_ns, one.input_gradient_ns, one.weight_gradient_ns});
  }
  return prices;
}

const PartTimes& JobCost::layer_of(JobLayerKind kind, bool mtp, double factor) {
  if (!kind.moe) factor = 1;
  for (const Priced& entry : priced_) {
    if (entry.kind == kind && entry.mtp == mtp && entry.factor == factor) return entry.times;
  }
  PartTimes times = price(layer_ops(job_, kind, factor));
  if (mtp) {
    times += price(mtp_ops(job_));
    PartTimes head = head_;
    head.dense_weights = 0;  // the output layer's own
    times += head;
  }
  priced_.push_back({kind, mtp, factor, times});
  return priced_.back().times;
}

const PartTimes& JobCost::layer(int64_t layer, double factor) {
  return layer_of(layer_kind(job_.model, layer), false, factor);
}

const PartTimes& JobCost::mtp_layer(double factor) {
  return layer_of({.moe = job_.model.has_moe()}, true, factor);
}

const PartTimes& JobCost::embedding() { return embedding_; }
const PartTimes& JobCost::head() { return head_; }

double JobCost::send_ns() const {
  if (job_.layout.pp == 1) return 0;
  // Without sequence parallelism every tp rank holds the whole: each sends its part, and the
  // receivers gather them.
  const double tp = static_cast<double>(job_.layout.tp);
  const double whole = static_cast<double>(job_.tokens() * job_.model.hidden * job_.element_bytes);
  double ns = static_cast<double>(system_.collective_latency_ns) +
              whole / tp * kNsPerS / links_.pp_bytes_per_s;
  if (tp > 1 && !job_.layout.sequence_parallel) {
    ns += static_cast<double>(system_.collective_latency_ns) +
          whole * (tp - 1) / tp * kNsPerS / links_.tp_bytes_per_s;
  }
  return ns;
}

}  // namespace bagualu
