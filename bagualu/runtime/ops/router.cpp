#include "bagualu/runtime/ops/router.h"

#include <ATen/ATen.h>

#include <vector>

#include "bagualu/runtime/ops/dispatch.h"
#include "bagualu/runtime/ops/linear.h"
#include "bagualu/runtime/ops/softmax.h"
#include "bagualu/runtime/ops/workspace.h"

namespace bagualu::ops {
namespace {

using simd::kLanes;
using simd::Lanes;

// Row scratch lives on the stack: two arrays of this many floats.
constexpr int64_t kMaxExperts = 4096;

struct RouterShape {
  int64_t experts;
  int64_t top_k;
  bool norm_topk_prob;
};

BGL_INLINE void softmax_row(const float* logits, int64_t experts, float lse, float* probs) {
  for (int64_t j = 0; j < experts; j += kLanes) {
    simd::store(probs + j, experts - j, simd::exp(simd::load(logits + j, experts - j) - lse));
  }
}

// k rounds of the maximum, the first of equals wins; taken scores become -inf.
template <class Id>
BGL_INLINE void pick_largest(float* scores, const RouterShape& shape, Id* ids) {
  for (int64_t slot = 0; slot < shape.top_k; ++slot) {
    int64_t best = -1;
    for (int64_t e = 0; e < shape.experts; ++e) {
      const bool better = best < 0 ? scores[e] != -INFINITY : scores[e] > scores[best];
      if (better) best = e;
    }
    ids[slot] = static_cast<Id>(best);
    scores[best] = -INFINITY;
  }
}

template <class Id>
BGL_INLINE float topk_sum(const float* probs, const RouterShape& shape, const Id* ids) {
  if (!shape.norm_topk_prob) return 1.0f;
  float total = 0;
  for (int64_t slot = 0; slot < shape.top_k; ++slot) total += probs[ids[slot]];
  return total;
}

// One block of rows; partial = [sum of probs per expert, sum of lse^2].
template <class Id>
BGL_KERNEL void select_rows(const float* logits, const float* bias, const RouterShape& shape,
                            bool ids_given, Id* ids, float* topk_probs, float* partial,
                            int64_t begin, int64_t end) {
  float probs[kMaxExperts];
  float scores[kMaxExperts];
  for (int64_t e = 0; e <= shape.experts; ++e) partial[e] = 0;
  for (int64_t t = begin; t < end; ++t) {
    const float* row = logits + t * shape.experts;
    const float lse = simd::log_sum_exp(row, shape.experts);
    softmax_row(row, shape.experts, lse, probs);
    Id* chosen = ids + t * shape.top_k;
    for (int64_t e = 0; e < shape.experts; ++e) {
      partial[e] += probs[e];
      scores[e] = bias == nullptr ? probs[e] : probs[e] + bias[e];
    }
    partial[shape.experts] += lse * lse;
    if (!ids_given) pick_largest(scores, shape, chosen);
    const float total = topk_sum(probs, shape, chosen);
    for (int64_t slot = 0; slot < shape.top_k; ++slot) {
      topk_probs[t * shape.top_k + slot] = probs[chosen[slot]] / total;
    }
  }
}

struct LossSlopes {
  const float* aux;  // [E] d loss / d prob, the same for every token
  float z;           // times lse * prob
};

template <class Id>
BGL_KERNEL void gradient_rows(const float* d_topk_probs, const Id* ids, const RouterShape& shape,
                              const LossSlopes& slopes, float* logits, int64_t begin, int64_t end) {
  float probs[kMaxExperts];
  float slope[kMaxExperts];
  for (int64_t t = begin; t < end; ++t) {
    float* row = logits + t * shape.experts;
    const float lse = simd::log_sum_exp(row, shape.experts);
    softmax_row(row, shape.experts, lse, probs);
    for (int64_t e = 0; e < shape.experts; ++e) slope[e] = slopes.aux[e];
    const Id* chosen = ids + t * shape.top_k;
    const float* incoming = d_topk_probs + t * shape.top_k;
    const float total = topk_sum(probs, shape, chosen);
    float pull = 0;  // through the division by the sum
    if (shape.norm_topk_prob) {
      for (int64_t slot = 0; slot < shape.top_k; ++slot) {
        pull += incoming[slot] * probs[chosen[slot]] / total;
      }
    }
    for (int64_t slot = 0; slot < shape.top_k; ++slot) {
      slope[chosen[slot]] += (incoming[slot] - pull) / total;
    }
    float mean = 0;
    for (int64_t e = 0; e < shape.experts; ++e) mean += probs[e] * slope[e];
    const float z = slopes.z * lse;
    for (int64_t e = 0; e < shape.experts; ++e) row[e] = probs[e] * (slope[e] - mean + z);
  }
}

RouterShape checked_shape(const at::Tensor& logits, const RouterOptions& options,
                          const at::Tensor& ids, const at::Tensor& topk) {
  const int64_t tokens = logits.size(0);
  const int64_t experts = logits.size(1);
  check_rows(logits, tokens, experts);
  check_rows(ids, tokens, options.top_k);
  check_rows(topk, tokens, options.top_k);
  BGL_CHECK(options.top_k >= 1 && options.top_k <= experts && experts <= kMaxExperts, options.top_k,
            experts, kMaxExperts);
  return {experts, options.top_k, options.norm_topk_prob};
}

template <class F>
void with_id(const at::Tensor& ids, F&& f) {
  if (ids.scalar_type() == at::kShort) {
    f(static_cast<int16_t*>(nullptr));
  } else {
    BGL_CHECK(ids.scalar_type() == at::kInt, c10::toString(ids.scalar_type()));
    f(static_cast<int32_t*>(nullptr));
  }
}

// Assignments per expert.
std::vector<int64_t> count_ids(const at::Tensor& ids, int64_t experts) {
  std::vector<int64_t> counts(experts, 0);
  const at::Tensor host = ids.device().is_cpu() ? ids : ids.cpu();
  with_id(host, [&]<class Id>(Id*) {
    const Id* id = host.const_data_ptr<Id>();
    for (int64_t i = 0; i < host.numel(); ++i) {
      BGL_CHECK(id[i] >= 0 && id[i] < experts, i, id[i], experts);
      ++counts[id[i]];
    }
  });
  return counts;
}

// `mean_probs` [E] and `mean_squares` are over tokens.
template <class T>
RouterLosses losses_of(const std::vector<int64_t>& counts, const T* mean_probs, double mean_squares,
                       const RouterOptions& options) {
  const auto experts = static_cast<int64_t>(counts.size());
  double assignments = 0;
  double dot = 0;
  for (int64_t e = 0; e < experts; ++e) {
    assignments += static_cast<double>(counts[e]);
    dot += static_cast<double>(counts[e]) * mean_probs[e];
  }
  if (assignments == 0) return {};
  return {options.aux_loss_coef * static_cast<double>(experts) * dot / assignments,
          options.z_loss_coef * mean_squares};
}

std::vector<float> aux_slopes(const at::Tensor& ids, int64_t experts, int64_t tokens,
                              double scaled_coef) {
  std::vector<float> slopes(experts, 0.0f);
  if (scaled_coef == 0 || tokens == 0) return slopes;
  const std::vector<int64_t> counts = count_ids(ids, experts);
  const double unit = scaled_coef * static_cast<double>(experts) /
                      (static_cast<double>(ids.numel()) * static_cast<double>(tokens));
  for (int64_t e = 0; e < experts; ++e) {
    slopes[e] = static_cast<float>(unit * static_cast<double>(counts[e]));
  }
  return slopes;
}

}  // namespace

void router_logits(const at::Tensor& x, const at::Tensor& w, const at::Tensor& logits_bias,
                   at::Tensor& logits) {
  if (x.scalar_type() == at::kFloat) {
    at::mm_out(logits, x, w.t());
  } else {
    at::Tensor product = at::empty(logits.sizes(), x.options());
    at::mm_out(product, x, w.t());
    logits.copy_(product);
  }
  if (logits_bias.defined()) logits.add_(logits_bias);
}

RouterLosses router_select(const at::Tensor& logits, const at::Tensor& selection_bias,
                           const RouterOptions& options, bool ids_given, at::Tensor& topk_ids,
                           at::Tensor& topk_probs) {
  const RouterShape shape = checked_shape(logits, options, topk_ids, topk_probs);
  const int64_t tokens = logits.size(0);
  if (tokens == 0) return {};
  if (!uses_loops(logits)) {
    return detail::router_select_aten(logits, selection_bias, options, ids_given, topk_ids,
                                      topk_probs);
  }
  if (ids_given) count_ids(topk_ids, shape.experts);  // refuses ids out of range
  const int64_t blocks = (tokens + kRouterBlockRows - 1) / kRouterBlockRows;
  const int64_t width = shape.experts + 1;
  const at::Tensor partials = at::empty({blocks, width}, logits.options());
  float* partial = data<float>(partials);
  const float* bias = selection_bias.defined() ? data<float>(selection_bias) : nullptr;
  with_id(topk_ids, [&]<class Id>(Id*) {
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        select_rows<Id>(data<float>(logits), bias, shape, ids_given, data<Id>(topk_ids),
                        data<float>(topk_probs), partial + b * width, b * kRouterBlockRows,
                        std::min(tokens, (b + 1) * kRouterBlockRows));
      }
    });
  });
  std::vector<double> means(width, 0.0);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t e = 0; e < width; ++e) means[e] += partial[b * width + e];
  }
  for (double& mean : means) mean /= static_cast<double>(tokens);
  return losses_of(count_ids(topk_ids, shape.experts), means.data(), means[shape.experts], options);
}

RouterLosses router_forward(const at::Tensor& x, const at::Tensor& w,
                            const at::Tensor& selection_bias, const at::Tensor& logits_bias,
                            const RouterOptions& options, bool ids_given, at::Tensor& logits,
                            at::Tensor& topk_ids, at::Tensor& topk_probs) {
  router_logits(x, w, logits_bias, logits);
  return router_select(logits, selection_bias, options, ids_given, topk_ids, topk_probs);
}

namespace {

// Overwrites the logits with their gradient.
void logits_gradient(const at::Tensor& d_topk_probs, const at::Tensor& topk_ids,
                     const RouterOptions& options, double loss_scale, at::Tensor& logits) {
  const RouterShape shape = checked_shape(logits, options, topk_ids, d_topk_probs);
  const int64_t tokens = logits.size(0);
  const std::vector<float> aux =
      aux_slopes(topk_ids, shape.experts, tokens, options.aux_loss_coef * loss_scale);
  const LossSlopes slopes{aux.data(), static_cast<float>(2 * options.z_loss_coef * loss_scale /
                                                         static_cast<double>(tokens))};
  if (uses_loops(logits)) {
    with_id(topk_ids, [&]<class Id>(Id*) {
      at::parallel_for(0, tokens, row_grain(8 * shape.experts), [&](int64_t begin, int64_t end) {
        gradient_rows<Id>(data<float>(d_topk_probs), data<Id>(topk_ids), shape, slopes,
                          data<float>(logits), begin, end);
      });
    });
  } else {
    const at::Tensor aux_row = at::tensor(aux, at::kFloat).to(logits.device());
    detail::router_gradient_aten(d_topk_probs, topk_ids, aux_row, slopes.z, options, logits);
  }
}

// The logits' gradient at the precision of `like`: itself, or a rounded copy.
at::Tensor rounded_as(const at::Tensor& d_logits, const at::Tensor& like) {
  if (like.scalar_type() == at::kFloat) return d_logits;
  at::Tensor rounded = at::empty(d_logits.sizes(), like.options());
  rounded.copy_(d_logits);
  return rounded;
}

}  // namespace

void router_backward(const at::Tensor& d_topk_probs, const at::Tensor& topk_ids,
                     const at::Tensor& x, const at::Tensor& w, const RouterOptions& options,
                     double loss_scale, at::Tensor& logits, at::Tensor& dx, at::Tensor& dw) {
  if (logits.size(0) == 0) return;
  logits_gradient(d_topk_probs, topk_ids, options, loss_scale, logits);
  const at::Tensor gradient = rounded_as(logits, x);
  linear_backward_input(gradient, w, dx, /*accumulate=*/true);
  linear_backward_weight(gradient, x, dw);
}

void router_input_grad(const at::Tensor& d_topk_probs, const at::Tensor& topk_ids,
                       const at::Tensor& w, const RouterOptions& options, double loss_scale,
                       at::Tensor& logits, at::Tensor& dx) {
  if (logits.size(0) == 0) return;
  logits_gradient(d_topk_probs, topk_ids, options, loss_scale, logits);
  linear_backward_input(rounded_as(logits, dx), w, dx, /*accumulate=*/true);
}

void router_weight_grad(const at::Tensor& d_logits, const at::Tensor& x, at::Tensor& dw) {
  if (d_logits.size(0) == 0) return;
  linear_backward_weight(rounded_as(d_logits, x), x, dw);
}

namespace detail {

RouterLosses router_select_aten(const at::Tensor& logits, const at::Tensor& selection_bias,
                                const RouterOptions& options, bool ids_given, at::Tensor& topk_ids,
                                at::Tensor& topk_probs) {
  const at::Tensor probs = at::softmax(logits, 1);
  if (!ids_given) {
    at::Tensor scores = selection_bias.defined() ? probs + selection_bias : probs.clone();
    for (int64_t slot = 0; slot < options.top_k; ++slot) {
      const at::Tensor best = scores.argmax(1, /*keepdim=*/true);
      topk_ids.narrow(1, slot, 1).copy_(best);
      scores.scatter_(1, best, -INFINITY);
    }
  }
  at::gather_out(topk_probs, probs, 1, topk_ids.to(at::kLong));
  if (options.norm_topk_prob) topk_probs.div_(topk_probs.sum(1, /*keepdim=*/true));
  const at::Tensor means = probs.mean(0).cpu();
  const double squares = at::logsumexp(logits, {1}).square_().mean().item<double>();
  return losses_of(count_ids(topk_ids, logits.size(1)), means.const_data_ptr<float>(), squares,
                   options);
}

void router_gradient_aten(const at::Tensor& d_topk_probs, const at::Tensor& topk_ids,
                          const at::Tensor& aux_slopes, double z_slope,
                          const RouterOptions& options, at::Tensor& logits) {
  const at::Tensor ids = topk_ids.to(at::kLong);
  const at::Tensor lse = at::logsumexp(logits, {1}, /*keepdim=*/true);
  const at::Tensor probs = (logits - lse).exp_();
  at::Tensor incoming = d_topk_probs;
  if (options.norm_topk_prob) {
    const at::Tensor chosen = probs.gather(1, ids);
    const at::Tensor total = chosen.sum(1, /*keepdim=*/true);
    const at::Tensor pull = (d_topk_probs * chosen / total).sum(1, /*keepdim=*/true);
    incoming = (d_topk_probs - pull) / total;
  }
  at::Tensor slope = aux_slopes.expand_as(logits).clone();
  slope.scatter_add_(1, ids, incoming);
  const at::Tensor mean = (probs * slope).sum(1, /*keepdim=*/true);
  logits.copy_(probs * (slope - mean + lse * z_slope));
}

}  // namespace detail
}  // namespace bagualu::ops
