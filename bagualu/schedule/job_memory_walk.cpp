#include <algorithm>
#include <cmath>
#include <utility>

#include "bagualu/schedule/job_memory_state.h"

namespace bagualu {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

/// Adds layers of a stage one by one; the highest moment of each pass is kept with its part.
class StageSum {
 public:
  /// `fraction`: of the groups that fine-grained offloading may move.
  StageSum(double fraction, bool lists_parts) : fraction_(fraction), lists_parts_(lists_parts) {}

  /// Equal layers: the last one's passes stand on all the others.
  void add_run(const LayerProfile& part, int64_t rows, int first, int64_t count) {
    if (lists_parts_ || count < 3) {
      for (int64_t i = 0; i < count; ++i) add(part, rows, first + static_cast<int>(i));
      return;
    }
    add(part, rows, first);
    const StageBytes before = sum_;
    add(part, rows, first + 1);
    sum_.saved += (sum_.saved - before.saved) * (count - 3);
    add(part, rows, first + static_cast<int>(count) - 1);
  }

  void add(const LayerProfile& part, int64_t rows, int number) {
    const int64_t forward = sum_.saved + draining_ + part.forward_bytes(rows);
    const int64_t backward = sum_.saved + draining_ + part.backward_bytes(rows);
    if (forward > sum_.forward) {
      sum_.forward = forward;
      sum_.forward_part = number;
    }
    if (backward > sum_.backward) {
      sum_.backward = backward;
      sum_.backward_part = number;
    }
    // What is freed last stands beside every layer's backward.
    if (part.late.at(rows) > 0 && behind_ + part.late.at(rows) > sum_.backward) {
      sum_.backward = behind_ + part.late.at(rows);
      sum_.backward_part = behind_part_;
    }
    if (backward > behind_) {
      behind_ = backward;
      behind_part_ = number;
    }
    sum_.saved += part.saved.at(rows);
    if (lists_parts_) parts_.push_back(&part);
    // Copied to the host while the next layer runs forward, and back while it runs backward.
    const int64_t movable = part.offloaded.at(rows);
    draining_ = static_cast<int64_t>(static_cast<double>(movable) * fraction_);
    sum_.saved += movable - draining_;
  }
  void keep(int64_t bytes) { sum_.saved += bytes; }
  void gradient_of_embedding(int64_t bytes) {
    if (bytes <= sum_.backward) return;
    sum_.backward = bytes;
    sum_.backward_part = -1;
  }
  /// Megatron-Kwai moves a fraction of a micro-batch's saved bytes, rounded up to a MiB: largest
  /// tensors first and views last, above a half the other way round. One tensor is cut.
  void move_fraction(double fraction, int64_t max_split_bytes) {
    std::vector<LayerProfile::Movable> tensors;
    for (const LayerProfile* part : parts_) {
      tensors.insert(tensors.end(), part->movable.begin(), part->movable.end());
    }
    std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
      return a.strided != b.strided ? b.strided : a.bytes > b.bytes;
    });
    if (fraction > 0.5) std::reverse(tensors.begin(), tensors.end());
    int64_t all = 0;
    for (const auto& tensor : tensors) all += tensor.bytes;
    const auto bytes = static_cast<int64_t>(std::ceil(static_cast<double>(all) * fraction));
    sum_.moved = std::min((bytes + kMiB - 1) / kMiB * kMiB, all);
    int64_t left = sum_.moved;
    for (const auto& tensor : tensors) {
      if (left < tensor.bytes) {
        if (left > 0) cut_tensor(tensor.bytes, tensor.bytes - left, max_split_bytes);
        return;
      }
      left -= tensor.bytes;
    }
  }
  const StageBytes& sum() const { return sum_; }

 private:
  double fraction_;
  bool lists_parts_;
  StageBytes sum_;
  int64_t draining_ = 0;
  int64_t behind_ = 0;  ///< highest backward of the parts before this one
  int behind_part_ = 0;
  std::vector<const LayerProfile*> parts_;

  // The rest of a cut tensor takes the smallest block that some other tensor has left behind.
  void cut_tensor(int64_t whole, int64_t rest, int64_t max_split_bytes) {
    constexpr int64_t kLargestSlack = 20 * kMiB;  // kLargeBuffer of c10's caching allocator
    sum_.cut = whole;
    if (max_split_bytes == 0 || rest < max_split_bytes) return;
    int64_t slack = kLargestSlack;
    for (const LayerProfile* part : parts_) {
      const auto& blocks = part->block_bytes;
      const auto block = std::lower_bound(blocks.begin(), blocks.end(), rest);
      if (block != blocks.end()) slack = std::min(slack, *block - rest);
    }
    if (slack < kLargestSlack) sum_.slack = slack;
  }
};

}  // namespace

StageBytes JobMemory::State::stage_bytes(int64_t stage, const RoutedLoads& loads,
                                         int64_t microbatch) const {
  if (job.recompute.granularity == RecomputeGranularity::kFull) {
    return full_recompute_bytes(stage, loads, microbatch);
  }
  const StageContent& content = job.stages[static_cast<size_t>(stage)];
  const bool alike = loads.by_layer.empty();
  StageSum sum(job.offload.fraction, offloads_all);
  int64_t rows = alike ? expert_rows(job, loads.at(0, microbatch)) : 0;
  int number = 0;
  for (const LayerRun& run : runs[static_cast<size_t>(stage)]) {
    const LayerProfile& part = kinds[static_cast<size_t>(run.kind)]->profile;
    if (alike || run.kind == LayerKind::kDense) {
      sum.add_run(part, rows, number, run.count);
    } else {
      for (int64_t i = 0; i < run.count; ++i) {
        rows = expert_rows(job, loads.at(content.first_layer + number + i, microbatch));
        sum.add(part, rows, number + static_cast<int>(i));
      }
    }
    number += static_cast<int>(run.count);
  }
  for (int64_t i = 0; i < content.mtp_layers; ++i) {
    // The embedding of the next tokens, and it side by side with the hidden state.
    sum.keep(3 * boundary_bytes);
    sum.add(layer_kind(job.model.layers - 1).profile, rows, number++);
    sum.add(kinds[2]->profile, 0, number++);
  }
  if (content.head) sum.add(kinds[2]->profile, 0, number);
  if (content.embedding) sum.gradient_of_embedding(embedding_gradient_bytes + boundary_bytes);
  // The last stage's backward follows its forward at once: nothing is moved.
  if (offloads_all && !content.head) {
    sum.move_fraction(job.offload.fraction, job.allocator.max_split_bytes);
  }
  return sum.sum();
}

// Groups of layers keep their first input. In the backward a group's forward runs again, keeping
// everything, and then its backward.
StageBytes JobMemory::State::full_recompute_bytes(int64_t stage, const RoutedLoads& loads,
                                                  int64_t microbatch) const {
  const StageContent& content = job.stages[static_cast<size_t>(stage)];
  const int64_t split =
      job.recompute.distribute_saved && !job.layout.sequence_parallel ? job.layout.tp : 1;
  StageBytes sum;
  const auto raise = [&](int64_t& highest, int& part, int64_t bytes, int number) {
    if (bytes <= highest) return;
    highest = bytes;
    part = number;
  };
  const int64_t layers = content.layer_count + content.mtp_layers;
  int64_t first = 0;
  while (first < layers) {
    // uniform: groups of `layers`; block: the first `layers` one by one, the others kept whole
    const bool recomputed = !job.recompute.block || first < job.recompute.layers;
    const int64_t size = job.recompute.block
                             ? 1
                             : std::min(std::max<int64_t>(1, job.recompute.layers), layers - first);
    int64_t inside = 0;
    const int64_t kept = sum.saved;
    for (int64_t i = first; i < first + size; ++i) {
      const int64_t layer = std::min(content.first_layer + i, job.model.layers - 1);
      const int64_t rows =
          job.model.is_moe(layer) ? expert_rows(job, loads.at(layer, microbatch)) : 0;
      const LayerProfile& whole = layer_kind(layer).whole;
      const auto number = static_cast<int>(i);
      const int64_t before = recomputed ? boundary_bytes : 0;
      raise(sum.forward, sum.forward_part, kept + before + whole.forward_bytes(rows), number);
      raise(sum.backward, sum.backward_part,
            kept + inside +
                std::max(whole.forward_bytes(rows) + boundary_bytes, whole.backward_bytes(rows)),
            number);
      inside += whole.saved.at(rows);
      if (i == first) sum.saved += recomputed ? whole.input.fixed / split : whole.saved.at(rows);
    }
    first += size;
  }
  if (content.head) {
    const LayerProfile& head = kinds[2]->profile;
    const auto number = static_cast<int>(layers);
    raise(sum.forward, sum.forward_part, sum.saved + head.forward_bytes(0), number);
    if (head.late.fixed > 0) sum.backward += head.late.fixed;
    raise(sum.backward, sum.backward_part, sum.saved + head.backward_bytes(0), number);
    sum.saved += head.saved.at(0);
  }
  if (content.embedding) {
    raise(sum.backward, sum.backward_part, embedding_gradient_bytes + boundary_bytes, -1);
  }
  return sum;
}

const PipelineOrder& OrderStore::of(PipelineKind kind, int pp, int chunks, int microbatches) {
  PipelineOrder& order = orders_[{kind, pp, chunks, microbatches}];
  if (order.ranks.empty()) order = make_order(kind, pp, chunks, microbatches);
  return order;
}

const std::vector<std::vector<RankMoment>>& OrderStore::moments(PipelineKind kind, int pp,
                                                                int chunks, int microbatches) {
  auto& moments = moments_[{kind, pp, chunks, microbatches}];
  if (!moments.empty()) return moments;
  const PipelineOrder& order = of(kind, pp, chunks, microbatches);
  for (const auto& passes : order.ranks) moments.push_back(rank_moments(passes, order.stages));
  return moments;
}

const std::vector<PipelinePass>& JobMemory::State::passes(int64_t pp_rank,
                                                          int64_t microbatches) const {
  const PipelineOrder& order =
      orders->of(job.pipeline, static_cast<int>(job.layout.pp),
                 static_cast<int>(job.stages_per_rank()), static_cast<int>(microbatches));
  return order.ranks[static_cast<size_t>(pp_rank)];
}

namespace {

/// Micro-batches after which nothing new happens if all are alike: the longest warm-up of any order
/// and one steady round, whole groups of pp.
int64_t enough_microbatches(const Job& job) {
  if (job.pipeline == PipelineKind::k1F1B) return std::min(job.microbatches, job.layout.pp + 1);
  return std::min(job.microbatches,
                  (job.pipeline == PipelineKind::kInterleaved ? 3 : 4) * job.layout.pp);
}

}  // namespace

// The gradient sent by the backward before, and with a successor the one it had received, stay in
// the schedule's variables until the next backward replaces them. Sends beside compute: the next
// pass's tensor is there already, from both sides.
int64_t JobMemory::State::held_bytes(const PipelinePass& pass, bool backward_seen) const {
  if (job.layout.pp == 1) return 0;
  const auto last_stage = static_cast<int>(job.stages.size()) - 1;
  const bool forward = pass.kind == PassKind::kForward;
  int64_t held = 0;
  if (backward_seen) {
    held = (pass.stage > 0 ? boundary_bytes : 0) +
           (forward && pass.stage < last_stage ? boundary_bytes : 0);
  }
  const bool receives_early = job.pipeline == PipelineKind::kInterleaved && job.overlap.p2p;
  return held + (receives_early ? 2 * boundary_bytes : 0);
}

RankPeak JobMemory::State::walk_rank(int64_t pp_rank, const RoutedLoads& loads,
                                     std::vector<JobMemoryPoint>* points,
                                     bool with_resident) const {
  const bool alike = loads.spikes.empty();
  const int64_t microbatches =
      alike && points == nullptr ? enough_microbatches(job) : job.microbatches;
  std::vector<PipelinePass> resident;
  std::vector<StageBytes> of_stage(job.stages.size());
  std::vector<uint8_t> known(job.stages.size(), 0);
  StageBytes one;
  const auto bytes_of = [&](const PipelinePass& pass) -> const StageBytes& {
    const auto s = static_cast<size_t>(pass.stage);
    if (!alike) return one = stage_bytes(pass.stage, loads, pass.microbatch);
    if (known[s] == 0) {
      of_stage[s] = stage_bytes(pass.stage, loads, pass.microbatch);
      known[s] = 1;
    }
    return of_stage[s];
  };
  RankPeak peak;
  int64_t saved = 0;
  int64_t in_flight = 0;
  bool backward_seen = false;
  int64_t buffers = 0;  // two, into which reloaded bytes come, in turn
  int64_t copying = 0;  // of the last forward, to the host, until the next forward has run
  for (const int64_t stage : offloads_all ? stages_held(job, pp_rank) : std::vector<int64_t>()) {
    buffers = std::max(buffers, 2 * bytes_of({static_cast<int>(stage)}).moved);
  }
  saved += buffers;
  for (const PipelinePass& pass : passes(pp_rank, microbatches)) {
    const StageBytes& bytes = bytes_of(pass);
    const bool forward = pass.kind == PassKind::kForward;
    const int64_t held = held_bytes(pass, backward_seen) + bytes.cut;
    const int64_t before = saved;
    const int64_t high =
        pass.kind == PassKind::kWeightGrad
            ? saved
            : held + saved + (forward ? bytes.forward : bytes.backward - bytes.saved);
    if (forward) {
      saved += bytes.saved - copying;
      copying = bytes.moved - bytes.slack;
      ++in_flight;
      if (with_resident) resident.push_back(pass);
    }
    if (high > peak.bytes) {
      peak.bytes = high;
      peak.pass = pass;
      peak.part = forward ? bytes.forward_part : bytes.backward_part;
      peak.in_flight = in_flight;
      peak.held = held;
      peak.resident = resident;
    }
    if (points != nullptr) points->push_back({pass, before, high});
    if (pass.kind == PassKind::kBackward || pass.kind == PassKind::kWeightGrad) {
      saved -= bytes.saved - bytes.moved + bytes.slack;
      --in_flight;
      std::erase_if(resident, [&](const PipelinePass& held_pass) {
        return held_pass.stage == pass.stage && held_pass.microbatch == pass.microbatch;
      });
    }
    backward_seen = backward_seen || !forward;
  }
  return peak;
}

int64_t JobMemory::State::alike_peak(int64_t pp_rank, const RoutedLoads& loads) const {
  const std::vector<int64_t> held_stages = stages_held(job, pp_rank);
  std::vector<StageBytes> of_stage;
  int64_t buffers = 0;
  for (const int64_t stage : held_stages) {
    of_stage.push_back(stage_bytes(stage, loads, 0));
    if (offloads_all) buffers = std::max(buffers, 2 * of_stage.back().moved);
  }
  const auto bytes_of = [&](int stage) -> const StageBytes& {
    const auto at = std::find(held_stages.begin(), held_stages.end(), stage);
    return of_stage[static_cast<size_t>(at - held_stages.begin())];
  };
  int64_t peak = 0;
  for (const RankMoment& moment : orders->moments(
           job.pipeline, static_cast<int>(job.layout.pp), static_cast<int>(job.stages_per_rank()),
           static_cast<int>(enough_microbatches(job)))[static_cast<size_t>(pp_rank)]) {
    const bool forward = moment.pass.kind == PassKind::kForward;
    int64_t saved = buffers;
    for (size_t s = 0; s < held_stages.size(); ++s) {
      const int64_t resident = moment.resident[static_cast<size_t>(held_stages[s])];
      saved += resident * (of_stage[s].saved - of_stage[s].moved + of_stage[s].slack);
    }
    if (moment.last_forward >= 0) {
      const StageBytes& last = bytes_of(moment.last_forward);
      saved += last.moved - last.slack;
    }
    const StageBytes& bytes = bytes_of(moment.pass.stage);
    peak = std::max(peak, held_bytes(moment.pass, moment.backward_seen) + bytes.cut + saved +
                              (forward ? bytes.forward : bytes.backward - bytes.saved));
  }
  return peak;
}

}  // namespace bagualu
