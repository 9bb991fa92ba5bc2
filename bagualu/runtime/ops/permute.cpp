#include "bagualu/runtime/ops/permute.h"

#include <ATen/ATen.h>

#include "bagualu/runtime/ops/dispatch.h"

namespace bagualu::ops {
namespace {

constexpr int64_t kProbBytes = 4;
constexpr int64_t kMaxTopK = 64;

void check_wire(const at::Tensor& wire, const WireLayout& layout) {
  BGL_CHECK(wire.scalar_type() == at::kByte && wire.is_contiguous() &&
                wire.numel() == layout.total_bytes(),
            wire.numel(), layout.total_bytes());
}

// Returns: top_k.
int64_t check_tokens(const at::Tensor& x, const at::Tensor& probs, const at::Tensor& row_map,
                     const WireLayout& layout) {
  BGL_CHECK(x.dim() == 2 && x.is_contiguous() && x.size(1) * x.element_size() == layout.row_bytes(),
            x.size(-1), layout.row_bytes());
  BGL_CHECK(row_map.scalar_type() == at::kInt && row_map.is_contiguous() &&
                row_map.numel() == layout.rows(),
            row_map.numel(), layout.rows());
  BGL_CHECK(probs.defined() == layout.with_probs(), layout.with_probs());
  BGL_CHECK(!probs.defined() || (probs.is_contiguous() && probs.scalar_type() == at::kFloat &&
                                 probs.numel() == row_map.numel()),
            row_map.numel());
  const int64_t top_k = x.size(0) == 0 ? 0 : row_map.numel() / x.size(0);
  BGL_CHECK(top_k <= kMaxTopK && top_k * x.size(0) == row_map.numel(), top_k, row_map.numel());
  return top_k;
}

struct WirePlace {
  int64_t row;  // byte offsets
  int64_t prob;
};

WirePlace place_of(const WireLayout& layout, int64_t row) {
  const int64_t peer = layout.peer_of_row(row);
  return {layout.row_begin(peer, row),
          layout.probs_begin(peer) + (row - layout.first_row(peer)) * kProbBytes};
}

template <class T>
BGL_KERNEL void sum_rows(const T* const* rows, int64_t count, int64_t width, bool accumulate,
                         T* out) {
  for (int64_t j = 0; j < width; j += simd::kLanes) {
    const int64_t n = width - j;
    simd::Lanes total = simd::load(rows[0] + j, n);
    for (int64_t slot = 1; slot < count; ++slot) total += simd::load(rows[slot] + j, n);
    if (accumulate) total += simd::load(out + j, n);
    simd::store(out + j, n, total);
  }
}

// A piece's part of one run, as row numbers on both sides.
template <class F>
void for_each_overlap(const WireLayout& layout, const ReceivedRows& received, int64_t expert,
                      int64_t row_begin, int64_t rows, F&& f) {
  BGL_CHECK(row_begin >= 0 && row_begin + rows <= received.expert_rows(expert), expert, row_begin,
            rows, received.expert_rows(expert));
  for (const RowRun& run : received.runs(expert)) {
    const int64_t begin = std::max(run.expert_row, row_begin);
    const int64_t end = std::min(run.expert_row + run.rows, row_begin + rows);
    if (begin >= end) continue;
    const int64_t in_segment = run.segment_row + begin - run.expert_row;
    f(layout.segment_begin(run.source) + in_segment * layout.row_bytes(),
      layout.probs_begin(run.source) + in_segment * kProbBytes, begin - row_begin, end - begin);
  }
}

void check_piece(const at::Tensor& rows, const at::Tensor& row_probs, const WireLayout& layout,
                 const ReceivedRows& received) {
  BGL_CHECK(rows.dim() == 2 && rows.is_contiguous() &&
                rows.size(1) * rows.element_size() == layout.row_bytes(),
            rows.size(-1), layout.row_bytes());
  BGL_CHECK(row_probs.defined() == layout.with_probs(), layout.with_probs());
  BGL_CHECK(
      !row_probs.defined() || (row_probs.numel() == rows.size(0) && row_probs.is_contiguous()),
      rows.size(0));
  BGL_CHECK(layout.rows() == received.rows(), layout.rows(), received.rows());
}

// The `rows` rows of `t` from `begin` on, as bytes.
at::Tensor bytes_of(const at::Tensor& t, int64_t begin, int64_t rows) {
  return t.narrow(0, begin, rows).view({-1}).view(at::kByte);
}

void copy_bytes(const at::Tensor& from, int64_t from_offset, const at::Tensor& to,
                int64_t to_offset, int64_t bytes) {
  if (uses_loops(from)) {
    std::memcpy(static_cast<char*>(to.data_ptr()) + to_offset,
                static_cast<const char*>(from.const_data_ptr()) + from_offset, bytes);
    return;
  }
  to.narrow(0, to_offset, bytes).copy_(from.narrow(0, from_offset, bytes));
}

// Rows of one segment as a matrix of the dtype of `like` (devices without loops).
at::Tensor segment_rows(const at::Tensor& wire, const WireLayout& layout, int64_t peer,
                        const at::Tensor& like) {
  return wire.narrow(0, layout.segment_begin(peer), layout.peer_rows(peer) * layout.row_bytes())
      .view(like.scalar_type())
      .view({layout.peer_rows(peer), like.size(1)});
}

at::Tensor segment_probs(const at::Tensor& wire, const WireLayout& layout, int64_t peer) {
  return wire.narrow(0, layout.probs_begin(peer), layout.peer_rows(peer) * kProbBytes)
      .view(at::kFloat);
}

}  // namespace

void pack_rows(const at::Tensor& x, const at::Tensor& probs, const at::Tensor& row_map,
               const WireLayout& layout, at::Tensor& wire) {
  check_wire(wire, layout);
  const int64_t top_k = check_tokens(x, probs, row_map, layout);
  if (!uses_loops(x)) return detail::pack_rows_aten(x, probs, row_map, layout, wire);
  const char* from = static_cast<const char*>(x.const_data_ptr());
  const int32_t* map = row_map.const_data_ptr<int32_t>();
  const float* weights = probs.defined() ? probs.const_data_ptr<float>() : nullptr;
  char* to = static_cast<char*>(wire.data_ptr());
  at::parallel_for(0, x.size(0), row_grain(top_k * x.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t a = begin * top_k; a < end * top_k; ++a) {
      const WirePlace place = place_of(layout, map[a]);
      std::memcpy(to + place.row, from + a / top_k * layout.row_bytes(), layout.row_bytes());
      if (weights != nullptr) std::memcpy(to + place.prob, weights + a, kProbBytes);
    }
  });
}

void combine_rows(const at::Tensor& wire, const at::Tensor& row_map, const WireLayout& layout,
                  bool accumulate, at::Tensor& out, at::Tensor& d_probs) {
  check_wire(wire, layout);
  const int64_t top_k = check_tokens(out, d_probs, row_map, layout);
  if (!uses_loops(out)) {
    return detail::combine_rows_aten(wire, row_map, layout, accumulate, out, d_probs);
  }
  const char* from = static_cast<const char*>(wire.const_data_ptr());
  const int32_t* map = row_map.const_data_ptr<int32_t>();
  float* weights = d_probs.defined() ? data<float>(d_probs) : nullptr;
  with_element(out, [&]<class T>(T*) {
    const int64_t width = out.size(1);
    at::parallel_for(0, out.size(0), row_grain(top_k * width), [&](int64_t begin, int64_t end) {
      const T* rows[kMaxTopK];
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t slot = 0; slot < top_k; ++slot) {
          const WirePlace place = place_of(layout, map[t * top_k + slot]);
          rows[slot] = reinterpret_cast<const T*>(from + place.row);
          if (weights != nullptr) {
            std::memcpy(weights + t * top_k + slot, from + place.prob, kProbBytes);
          }
        }
        sum_rows<T>(rows, top_k, width, accumulate, data<T>(out) + t * width);
      }
    });
  });
}

void gather_piece(const at::Tensor& wire, const WireLayout& layout, const ReceivedRows& received,
                  int64_t expert, int64_t row_begin, at::Tensor& rows, at::Tensor& row_probs) {
  check_wire(wire, layout);
  check_piece(rows, row_probs, layout, received);
  for_each_overlap(
      layout, received, expert, row_begin, rows.size(0),
      [&](int64_t row_at, int64_t prob_at, int64_t first, int64_t count) {
        copy_bytes(wire, row_at, bytes_of(rows, first, count), 0, count * layout.row_bytes());
        if (!row_probs.defined()) return;
        copy_bytes(wire, prob_at, bytes_of(row_probs, first, count), 0, count * kProbBytes);
      });
}

void scatter_piece(const at::Tensor& rows, const at::Tensor& row_probs, const WireLayout& layout,
                   const ReceivedRows& received, int64_t expert, int64_t row_begin,
                   at::Tensor& wire) {
  check_wire(wire, layout);
  check_piece(rows, row_probs, layout, received);
  for_each_overlap(
      layout, received, expert, row_begin, rows.size(0),
      [&](int64_t row_at, int64_t prob_at, int64_t first, int64_t count) {
        copy_bytes(bytes_of(rows, first, count), 0, wire, row_at, count * layout.row_bytes());
        if (!row_probs.defined()) return;
        copy_bytes(bytes_of(row_probs, first, count), 0, wire, prob_at, count * kProbBytes);
      });
}

void unpack_rows(const at::Tensor& wire, const WireLayout& layout, const ReceivedRows& received,
                 at::Tensor& rows, at::Tensor& row_probs) {
  for (int64_t expert = 0; expert < received.experts_local(); ++expert) {
    const int64_t begin = received.expert_begin(expert);
    const int64_t count = received.expert_rows(expert);
    at::Tensor expert_rows = rows.narrow(0, begin, count);
    at::Tensor expert_probs =
        row_probs.defined() ? row_probs.narrow(0, begin, count) : at::Tensor();
    gather_piece(wire, layout, received, expert, 0, expert_rows, expert_probs);
  }
}

namespace detail {

void pack_rows_aten(const at::Tensor& x, const at::Tensor& probs, const at::Tensor& row_map,
                    const WireLayout& layout, at::Tensor& wire) {
  if (layout.rows() == 0) return;
  const int64_t top_k = row_map.numel() / x.size(0);
  const at::Tensor map = row_map.to(at::kLong);
  const at::Tensor assignment = at::empty_like(map);
  assignment.scatter_(0, map, at::arange(map.numel(), map.options()));
  for (int64_t peer = 0; peer < layout.peers(); ++peer) {
    if (layout.peer_rows(peer) == 0) continue;
    const at::Tensor sent = assignment.narrow(0, layout.first_row(peer), layout.peer_rows(peer));
    at::Tensor rows = segment_rows(wire, layout, peer, x);
    at::index_select_out(rows, x, 0, sent.div(top_k, "floor"));
    if (!probs.defined()) continue;
    at::Tensor weights = segment_probs(wire, layout, peer);
    at::index_select_out(weights, probs.view({-1}), 0, sent);
  }
}

void combine_rows_aten(const at::Tensor& wire, const at::Tensor& row_map, const WireLayout& layout,
                       bool accumulate, at::Tensor& out, at::Tensor& d_probs) {
  if (layout.rows() == 0) return;
  const int64_t top_k = row_map.numel() / out.size(0);
  std::vector<at::Tensor> rows;
  std::vector<at::Tensor> weights;
  for (int64_t peer = 0; peer < layout.peers(); ++peer) {
    rows.push_back(segment_rows(wire, layout, peer, out));
    if (d_probs.defined()) weights.push_back(segment_probs(wire, layout, peer));
  }
  const at::Tensor sent = at::cat(rows);
  const at::Tensor map = row_map.to(at::kLong).view({-1, top_k});
  at::Tensor total = sent.index_select(0, map.select(1, 0)).to(at::kFloat);
  for (int64_t slot = 1; slot < top_k; ++slot) {
    total.add_(sent.index_select(0, map.select(1, slot)));
  }
  if (accumulate) total.add_(out);
  out.copy_(total);
  if (d_probs.defined()) {
    d_probs.view({-1}).copy_(at::cat(weights).index_select(0, map.view({-1})));
  }
}

}  // namespace detail
}  // namespace bagualu::ops
