#include "bagualu/provision/job_search.h"

#include <algorithm>
#include <utility>

#include "bagualu/model/job_static.h"
#include "bagualu/model/parameters.h"
#include "bagualu/provision/job_survival.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/schedule/job_time.h"

namespace bagualu {
namespace {

std::vector<int64_t> divisors(int64_t n, int64_t max) {
  std::vector<int64_t> found;
  for (int64_t d = 1; d <= std::min(n, max); ++d) {
    if (n % d == 0) found.push_back(d);
  }
  return found;
}

/// Gives the job what the point says; stages anew.
void apply(const SearchPoint& point, const std::vector<NamedRecompute>& recompute, Job* job) {
  job->layout = point.layout;
  job->pipeline = point.pipeline;
  job->micro_batch_size = point.micro_batch_size;
  job->microbatches = point.microbatches;
  job->recompute = recompute[point.recompute].settings;
  job->stages = default_stages(job->model, point.layout.pp,
                               virtual_stages_per_rank(point.pipeline, point.layout.vpp));
}

/// Walks the space in a fixed order and keeps what fits.
class Searcher {
 public:
  Searcher(const Job& base, const SystemSpec& system, SearchSpace space, const RoutedLoads& loads,
           int64_t budget_bytes)
      : job_(base),
        system_(system),
        space_(std::move(space)),
        loads_(loads),
        budget_bytes_(budget_bytes),
        parameters_(model_parameters(base.model)),
        global_batch_(base.micro_batch_size * base.microbatches * base.layout.dp()) {
    if (space_.recompute.empty()) space_.recompute = default_recompute(base.model);
  }

  SearchResult run(size_t keep) {
    const int64_t world = job_.layout.world_size;
    for (const int64_t tp : divisors(world, space_.ranks_per_node)) {
      for (const int64_t cp : divisors(world / tp, space_.max_cp)) {
        for (const int64_t pp : divisors(world / (tp * cp), space_.max_pp)) {
          JobLayout layout;
          layout.world_size = world;
          layout.tp = tp;
          layout.cp = cp;
          layout.pp = pp;
          layout.sequence_parallel = tp > 1;
          experts(layout);
        }
      }
    }
    finish(keep);
    result_.recompute = space_.recompute;
    return std::move(result_);
  }

 private:
  void experts(JobLayout layout) {
    if (!job_.model.has_moe()) {
      orders(layout);
      return;
    }
    const int64_t of_stage = layout.world_size / layout.pp;
    for (const int64_t etp : divisors(of_stage, layout.tp)) {
      if (job_.model.expert_ffn % etp != 0) continue;
      for (const int64_t ep : divisors(of_stage / etp, job_.model.experts)) {
        if (job_.model.experts % ep != 0) continue;
        layout.ep = ep;
        layout.etp = etp;
        orders(layout);
      }
    }
  }

  void orders(JobLayout layout) {
    for (const PipelineKind kind : space_.pipelines) {
      const bool alone = kind == PipelineKind::k1F1B;
      if (layout.pp == 1 && !alone) continue;
      const int64_t least = kind == PipelineKind::kInterleaved ? 2 : 1;
      const int64_t most = kind == PipelineKind::kInterleaved ? space_.max_vpp : 1;
      for (int64_t vpp = least; vpp <= most; ++vpp) {
        const int64_t per_rank = virtual_stages_per_rank(kind, vpp);
        // A virtual stage without a layer is a stage for nothing.
        if (layout.pp * per_rank > job_.model.layers) break;
        layout.vpp = vpp;
        job_.layout = layout;
        job_.pipeline = kind;
        job_.stages = default_stages(job_.model, layout.pp, per_rank);
        batches();
      }
    }
  }

  void batches() {
    const int64_t replicas = job_.layout.dp();
    if (global_batch_ % replicas != 0) return;
    for (const int64_t size : space_.micro_batch_sizes) {
      if (global_batch_ / replicas % size != 0) continue;
      job_.micro_batch_size = size;
      job_.microbatches = global_batch_ / replicas / size;
      if (job_fault(job_)) continue;
      for (size_t r = 0; r < space_.recompute.size(); ++r) {
        job_.recompute = space_.recompute[r].settings;
        look_at(r);
      }
    }
  }

  void look_at(size_t recompute) {
    ++result_.configurations;
    if (result_.fitting > 0 && !static_fits()) return;
    const JobMemory memory(job_, &cache_);
    const RoutedLoads loads = possible_loads(loads_, job_);
    SearchPoint point;
    point.layout = job_.layout;
    point.pipeline = job_.pipeline;
    point.micro_batch_size = job_.micro_batch_size;
    point.microbatches = job_.microbatches;
    point.recompute = recompute;
    for (int64_t rank = 0; rank < job_.layout.pp; ++rank) {
      point.peak_bytes = std::max(point.peak_bytes, memory.peak_bytes(rank, loads));
      if (point.peak_bytes > budget_bytes_ && result_.fitting > 0) return;
    }
    if (point.peak_bytes > budget_bytes_) {
      const int64_t missing = point.peak_bytes - budget_bytes_;
      if (result_.short_by_bytes != 0 && missing >= result_.short_by_bytes) return;
      result_.short_by_bytes = missing;
      result_.nearest = point;
      return;
    }
    ++result_.fitting;
    const JobTime time = job_time(job_, system_, loads);
    point.iteration_ns = time.iteration_ns;
    point.tokens_per_s = time.tokens_per_s;
    point.mfu_fraction = time.mfu_fraction;
    points_.push_back(std::move(point));
  }

  /// What needs no layer to be sized: the model's state alone.
  bool static_fits() const {
    for (int64_t rank = 0; rank < job_.layout.pp; ++rank) {
      if (job_static_bytes(job_, parameters_, rank) > budget_bytes_) return false;
    }
    return true;
  }

  /// Sorts, and finds survivable factors where they decide something: for the best that are shown
  /// and for those that may lie on the front.
  void finish(size_t keep) {
    if (result_.fitting > 0) result_.short_by_bytes = 0;
    std::stable_sort(points_.begin(), points_.end(), [](const auto& a, const auto& b) {
      return a.iteration_ns != b.iteration_ns ? a.iteration_ns < b.iteration_ns
                                              : a.peak_bytes < b.peak_bytes;
    });
    double most = 0;
    for (size_t i = 0; i < points_.size(); ++i) {
      apply(points_[i], space_.recompute, &job_);
      const JobMemory memory(job_, &cache_);
      const bool shown = i < keep;
      const bool ahead = survives(memory, most);
      if (!shown && !ahead) continue;
      points_[i].survivable_factor = weakest(memory);
      if (shown) result_.best.push_back(points_[i]);
      if (points_[i].survivable_factor <= most) continue;
      most = points_[i].survivable_factor;
      result_.pareto.push_back(points_[i]);
    }
  }

  /// More than `factor` on every rank.
  bool survives(const JobMemory& memory, double factor) const {
    const double more = factor + 1.0 / 1024;
    if (more > worst_imbalance(job_)) return false;
    for (int64_t rank = 0; rank < job_.layout.pp; ++rank) {
      if (memory.peak_bytes(rank, {.factor = more}) > budget_bytes_) return false;
    }
    return true;
  }

  double weakest(const JobMemory& memory) const {
    double least = worst_imbalance(job_);
    for (int64_t rank = 0; rank < job_.layout.pp; ++rank) {
      least = std::min(least, largest_survivable_factor(job_, memory, rank, budget_bytes_));
    }
    return least;
  }

  Job job_;
  const SystemSpec& system_;
  SearchSpace space_;
  const RoutedLoads& loads_;
  const int64_t budget_bytes_;
  const ModelParameters parameters_;
  const int64_t global_batch_;
  LayerProfileCache cache_;
  SearchResult result_;
  std::vector<SearchPoint> points_;
};

NamedRecompute selective(std::vector<std::string> modules) {
  NamedRecompute made;
  made.settings.granularity = RecomputeGranularity::kSelective;
  for (const std::string& module : modules) made.name += (made.name.empty() ? "" : "+") + module;
  made.settings.modules = std::move(modules);
  return made;
}

}  // namespace

std::vector<NamedRecompute> default_recompute(const ModelSpec& model) {
  std::vector<NamedRecompute> made(1);
  made[0].name = "none";
  if (model.has_moe()) {
    made.push_back(selective({"moe_act"}));
    made.push_back(selective({"layernorm", "moe_act"}));
    if (model.has_mla()) made.push_back(selective({"layernorm", "mla_up_proj", "moe_act"}));
    made.push_back(selective({"layernorm", "moe"}));
  } else {
    made.push_back(selective({"layernorm"}));
    made.push_back(selective({"layernorm", "mlp"}));
  }
  NamedRecompute full;
  full.name = "full";
  full.settings.granularity = RecomputeGranularity::kFull;
  made.push_back(full);
  return made;
}

Job job_of(const Job& base, const SearchResult& result, const SearchPoint& point) {
  Job job = base;
  apply(point, result.recompute, &job);
  return job;
}

SearchResult search_jobs(const Job& base, const SystemSpec& system, SearchSpace space,
                         const RoutedLoads& loads, int64_t budget_bytes, size_t keep) {
  return Searcher(base, system, std::move(space), loads, budget_bytes).run(keep);
}

}  // namespace bagualu
