#include "bagualu/schedule/pipeline_figures.h"

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

// Of a rank `depth` ranks from where its phase 0 enters, with `half` ranks to the turning point and
// so many micro-batches of each phase: the larger of the warm-up and of the first pass behind it.
int dual_pipe_in_flight(int depth, int half, int zero, int one) {
  const int warmup = std::min(zero, 2 * half - 1 - depth) + std::min(one, depth + 1);
  const int steady =
      std::min(zero, 2 * half - depth) + std::min(one, half) - std::min(one, half - 1 - depth);
  return std::max(warmup, steady);
}

bool fills_pipeline(PipelineKind kind, int pp, int virtual_per_rank, int microbatches) {
  switch (kind) {
    case PipelineKind::k1F1B:
      return true;
    case PipelineKind::kInterleaved:
      return virtual_per_rank == 1 || microbatches % pp == 0;
    case PipelineKind::kZbH1:
      return microbatches >= pp;
    case PipelineKind::kZbH2:
    case PipelineKind::kZbV:
      return microbatches >= 2 * pp - 1;
    case PipelineKind::kDualPipe:
      return microbatches >= 2 * pp && microbatches % 2 == 0;
    case PipelineKind::kDualPipeV:
      return microbatches >= 2 * pp;
    case PipelineKind::kVHalf:
      break;
  }
  return false;
}

bool times_allow(PipelineKind kind, const PassTimes& t) {
  if (t.send_ns != 0) return false;
  if (kind == PipelineKind::kZbV) {
    return t.forward_ns == t.input_grad_ns && t.input_grad_ns == t.weight_grad_ns;
  }
  if (kind == PipelineKind::kZbH2) {
    return t.weight_grad_ns <= t.forward_ns || t.input_grad_ns <= t.forward_ns;
  }
  if (kind == PipelineKind::kDualPipe || kind == PipelineKind::kDualPipeV) {
    return t.weight_grad_ns <= t.input_grad_ns &&
           t.forward_ns <= t.input_grad_ns + t.weight_grad_ns;
  }
  return true;
}

int64_t work_ns(PipelineKind kind, int virtual_per_rank, int microbatches, const PassTimes& t) {
  // DualPipe's ranks hold two stages, each for half of the micro-batches.
  const int64_t stages = kind == PipelineKind::kInterleaved ? virtual_per_rank
                         : is_v_shaped(kind)                ? 2
                                                            : 1;
  return stages * microbatches * (t.forward_ns + t.input_grad_ns + t.weight_grad_ns);
}

int64_t dual_pipe_bubble_ns(int64_t pairs, const PassTimes& t) {
  return std::max(pairs * (t.forward_ns + t.input_grad_ns - t.weight_grad_ns),
                  pairs * (2 * t.input_grad_ns - t.weight_grad_ns) - t.forward_ns);
}

}  // namespace

std::optional<int> closed_in_flight(PipelineKind kind, int pp, int virtual_per_rank,
                                    int microbatches, int rank) {
  BGL_CHECK(rank >= 0 && rank < pp, rank, pp);
  const int beyond = pp - 1 - rank;
  switch (kind) {
    case PipelineKind::k1F1B:
      return std::min(microbatches, beyond + 1);
    case PipelineKind::kInterleaved: {
      if (virtual_per_rank == 1) return std::min(microbatches, beyond + 1);
      const int ahead = 2 * beyond + (virtual_per_rank - 1) * pp;
      return std::min(virtual_per_rank * microbatches, ahead + 1);
    }
    case PipelineKind::kZbH1:
      return std::min(microbatches, pp);
    case PipelineKind::kZbH2:
      return std::min(microbatches, 2 * pp - 1);
    case PipelineKind::kZbV:
      return std::min(microbatches, pp + beyond) + std::min(microbatches, rank + 1);
    case PipelineKind::kDualPipe: {
      int zero = (microbatches + 1) / 2;
      int one = microbatches - zero;
      if (rank >= pp / 2) std::swap(zero, one);
      return dual_pipe_in_flight(std::min(rank, beyond), pp / 2, zero, one);
    }
    case PipelineKind::kDualPipeV:
      return dual_pipe_in_flight(rank, pp, microbatches, microbatches);
    case PipelineKind::kVHalf:
      break;
  }
  return std::nullopt;
}

std::optional<int64_t> closed_makespan_ns(PipelineKind kind, int pp, int virtual_per_rank,
                                          int microbatches, const PassTimes& times) {
  const bool known =
      fills_pipeline(kind, pp, virtual_per_rank, microbatches) && times_allow(kind, times);
  if (!known) return std::nullopt;
  const auto [forward, input, weight, send] = times;
  const int64_t work = work_ns(kind, virtual_per_rank, microbatches, times);
  const int64_t q = pp - 1;
  switch (kind) {
    case PipelineKind::k1F1B:
    case PipelineKind::kInterleaved:
      return work + q * (forward + input + weight);
    case PipelineKind::kZbH1:
      return work + q * std::max({forward, input, forward + input - weight});
    case PipelineKind::kZbH2:
      return work + q * std::max(forward, forward + input - 2 * weight);
    case PipelineKind::kZbV:
      return work + q * forward;
    case PipelineKind::kDualPipe:
      return work + dual_pipe_bubble_ns(pp / 2 - 1, times);
    case PipelineKind::kDualPipeV:
      return work + dual_pipe_bubble_ns(q, times);
    case PipelineKind::kVHalf:
      break;
  }
  return std::nullopt;
}

std::optional<int64_t> closed_span_ns(PipelineKind kind, int pp, int virtual_per_rank,
                                      int microbatches, const PassTimes& times) {
  const auto makespan = closed_makespan_ns(kind, pp, virtual_per_rank, microbatches, times);
  if (!makespan) return makespan;
  const auto [forward, input, weight, send] = times;
  const int64_t work = work_ns(kind, virtual_per_rank, microbatches, times);
  const int64_t q = pp - 1;
  if (kind == PipelineKind::kZbH1) {
    return work + q * std::max(input, forward + input - weight);
  }
  if (kind == PipelineKind::kZbH2) {
    return work + q * std::max(int64_t{0}, forward + input - 2 * weight);
  }
  return kind == PipelineKind::kZbV ? work : makespan;
}

const OrderFigures& OrderFiguresCache::of(PipelineKind kind, int pp, int virtual_per_rank,
                                          int microbatches, const PassTimes& times) {
  const auto [entry, added] =
      figures_.try_emplace({kind, pp, virtual_per_rank, microbatches, times});
  OrderFigures& figures = entry->second;
  if (!added) return figures;
  try {
    const auto makespan = closed_makespan_ns(kind, pp, virtual_per_rank, microbatches, times);
    if (makespan) {
      check_order_shape(kind, pp, virtual_per_rank, microbatches, "pipeline");
      for (int r = 0; r < pp; ++r) {
        figures.in_flight.push_back(*closed_in_flight(kind, pp, virtual_per_rank, microbatches, r));
      }
      figures.makespan_ns = *makespan;
      figures.span_ns = *closed_span_ns(kind, pp, virtual_per_rank, microbatches, times);
    } else {
      const PipelineOrder order = make_order(kind, pp, virtual_per_rank, microbatches);
      const PipelineRun run = simulate(order, equal_times(order, times));
      figures.in_flight = in_flight(order);
      figures.makespan_ns = run.makespan_ns;
      figures.span_ns = *std::max_element(run.span_ns.begin(), run.span_ns.end());
    }
  } catch (...) {
    figures_.erase(entry);
    throw;
  }
  const int64_t work = work_ns(kind, virtual_per_rank, microbatches, times);
  if (figures.makespan_ns > 0) {
    figures.bubble_fraction =
        static_cast<double>(figures.makespan_ns - work) / static_cast<double>(figures.makespan_ns);
  }
  return figures;
}

}  // namespace bagualu
