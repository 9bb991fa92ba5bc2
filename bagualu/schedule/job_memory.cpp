#include "bagualu/schedule/job_memory.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/schedule/job_memory_state.h"

namespace bagualu {

struct LayerProfileCache::State {
  std::map<LayerKey, std::shared_ptr<const KindProfile>> kinds;
  std::shared_ptr<OrderStore> orders = std::make_shared<OrderStore>();
};
LayerProfileCache::LayerProfileCache() : state_(std::make_unique<State>()) {}
LayerProfileCache::~LayerProfileCache() = default;

namespace {

KindProfile size_kind(const Job& job, LayerKind kind) {
  KindProfile sized;
  const Graph graph = kind_graph(job, kind);
  sized.profile = profile_layer(graph, walk_settings(graph, job));
  if (kind == LayerKind::kHead) return sized;
  // What full recompute runs again keeps everything in between.
  Job plain = job;
  plain.recompute = {};
  plain.offload = {};
  sized.whole = job.recompute.granularity == RecomputeGranularity::kFull
                    ? profile_layer(graph, walk_settings(graph, plain))
                    : sized.profile;
  return sized;
}

}  // namespace

Graph kind_graph(const Job& job, LayerKind kind) {
  MegatronGraphOptions options = megatron_options(job);
  if (kind == LayerKind::kHead) return build_megatron_head(job.model, options);
  const bool moe = kind == LayerKind::kMoe;
  for (int64_t layer = 0; layer < job.model.layers; ++layer) {
    if (job.model.is_moe(layer) != moe) continue;
    options.first_layer = layer;
    return build_megatron_graph(job.model, options);
  }
  BGL_CHECK(false, static_cast<int>(kind));
  return {};
}

LayerKey layer_key(const Job& job, LayerKind kind) {
  const ModelSpec& m = job.model;
  const JobLayout& l = job.layout;
  LayerKey key;
  key.numbers = {static_cast<int64_t>(kind),
                 m.hidden,
                 m.heads,
                 m.kv_heads,
                 m.head_dim,
                 m.vocab,
                 m.dense_ffn,
                 m.experts,
                 m.top_k,
                 m.expert_ffn,
                 m.shared_ffn,
                 m.q_lora_rank,
                 m.kv_lora_rank,
                 m.qk_nope_head_dim,
                 m.qk_rope_head_dim,
                 m.v_head_dim,
                 (m.gated_mlp ? 1 : 0) + (m.layer_norm ? 2 : 0) + (m.qk_norm ? 4 : 0) +
                     (m.qk_norm_full_width ? 8 : 0) + (m.dropout > 0 ? 16 : 0),
                 l.tp,
                 l.cp,
                 l.ep,
                 l.etp,
                 l.sequence_parallel ? 1 : 0,
                 job.micro_batch_size,
                 job.seq,
                 job.element_bytes,
                 (job.fp8 ? 1 : 0) + (job.attention_unfused ? 2 : 0) +
                     (job.attention_dropout > 0 ? 4 : 0) + (job.accumulation_fusion ? 8 : 0) +
                     (job.allocator.weight_grad_stand_ins ? 16 : 0) +
                     (job.moe.probs_in_activation ? 32 : 0) + (job.moe.pad_to_capacity ? 64 : 0) +
                     (job.moe.dispatcher == "allgather" ? 128 : 0) +
                     (job.cp_exchange == CpExchange::kAllToAll ? 256 : 0) +
                     (job.activation_fusion ? 512 : 0) + (job.allocator.engine_gemms ? 1024 : 0) +
                     (job.cp_exchange == CpExchange::kAllGather ? 2048 : 0),
                 static_cast<int64_t>(job.cross_entropy),
                 job.moe.router_bytes,
                 job.vocab_multiple,
                 job.allocator.rounding_bytes,
                 static_cast<int64_t>(job.recompute.granularity),
                 job.offload.min_tensor_elements};
  key.capacity_factor = job.moe.pad_to_capacity ? job.moe.capacity_factor : 0;
  key.offload_fraction = job.offload.fraction;
  if (job.recompute.granularity == RecomputeGranularity::kSelective) {
    key.modules = job.recompute.modules;
  }
  key.offload_modules = job.offload.modules;
  return key;
}

JobMemory::State::State(const Job& made_for, LayerProfileCache* cache)
    : job(made_for), parameters(model_parameters(made_for.model)) {
  bool dense = false;
  bool moe = false;
  runs.resize(job.stages.size());
  for (size_t s = 0; s < job.stages.size(); ++s) {
    for (int64_t i = 0; i < job.stages[s].layer_count; ++i) {
      const LayerKind which = kind_of(job.stages[s].first_layer + i);
      (which == LayerKind::kMoe ? moe : dense) = true;
      if (runs[s].empty() || runs[s].back().kind != which) runs[s].push_back({which, 0});
      ++runs[s].back().count;
    }
  }
  for (int64_t rank = 0; rank < job.layout.pp; ++rank) {
    static_bytes.push_back(job_static_bytes(job, parameters, rank));
  }
  if (dense) kinds[0] = kind(LayerKind::kDense, cache);
  if (moe) kinds[1] = kind(LayerKind::kMoe, cache);
  kinds[2] = kind(LayerKind::kHead, cache);
  const auto& offloaded = job.offload.modules;
  offloads_all = std::find(offloaded.begin(), offloaded.end(), "all") != offloaded.end();
  orders = cache == nullptr ? std::make_shared<OrderStore>() : cache->state_->orders;
  boundary_bytes = job.sequence_tokens() * job.model.hidden * job.element_bytes;
  embedding_gradient_bytes =
      job.padded_vocab() / job.layout.tp * job.model.hidden * job.element_bytes;
}

std::shared_ptr<const KindProfile> JobMemory::State::kind(LayerKind which,
                                                          LayerProfileCache* cache) const {
  if (cache == nullptr) return std::make_shared<KindProfile>(size_kind(job, which));
  auto& found = cache->state_->kinds[layer_key(job, which)];
  if (!found) found = std::make_shared<KindProfile>(size_kind(job, which));
  return found;
}

JobMemory::JobMemory(const Job& job, LayerProfileCache* cache)
    : state_(std::make_unique<State>(job, cache)) {}
JobMemory::~JobMemory() = default;
JobMemory::JobMemory(JobMemory&&) noexcept = default;

int64_t JobMemory::static_bytes(int64_t pp_rank) const {
  return state_->static_bytes[static_cast<size_t>(pp_rank)];
}

int64_t JobMemory::peak_bytes(int64_t pp_rank, const RoutedLoads& loads) const {
  const bool alike = loads.spikes.empty() && loads.by_microbatch.empty();
  return static_bytes(pp_rank) + (alike ? state_->alike_peak(pp_rank, loads)
                                        : state_->walk_rank(pp_rank, loads, nullptr).bytes);
}

int64_t JobMemory::layer_bytes(int64_t layer, double factor) const {
  const KindProfile& sized = state_->layer_kind(layer);
  return sized.profile.saved.at(expert_rows(state_->job, factor));
}

std::vector<JobMemoryPoint> JobMemory::over_time(int64_t pp_rank, const RoutedLoads& loads) const {
  std::vector<JobMemoryPoint> points;
  state_->walk_rank(pp_rank, loads, &points);
  const int64_t base = static_bytes(pp_rank);
  for (JobMemoryPoint& point : points) {
    point.saved_bytes += base;
    point.peak_bytes += base;
  }
  return points;
}

}  // namespace bagualu
