#include "bagualu/sim/lane_math.h"

#include <bit>
#include <cstring>

// Vectors of GCC and clang: two halves on processors without AVX2, whose functions are compiled for
// it by attribute. Neither has fused multiply-add, so that all round alike.
#define BGL_INLINE inline __attribute__((always_inline))

namespace bagualu {
namespace {

using Ints = int64_t __attribute__((vector_size(32)));
using Floats = double __attribute__((vector_size(32)));
using Shorts = int32_t __attribute__((vector_size(16)));

template <class Vector, class Number>
BGL_INLINE void load(Vector& to, const Number* from) {
  std::memcpy(&to, from, sizeof(to));
}

BGL_INLINE void store(int64_t* to, const Ints& from) { std::memcpy(to, &from, sizeof(from)); }

BGL_INLINE void load_rows(Ints& to, const int32_t* from) {
  Shorts rows;
  load(rows, from);
  to = __builtin_convertvector(rows, Ints);
}

// max(0, int64_t(ns + 0.5)) for ns below 2^51: adding 2^52 rounds to the nearest whole number,
// which is then in the lowest bits; one less where that was upwards.
BGL_INLINE void round_ns(Ints& to, const Floats& ns) {
  constexpr double kWhole = 4503599627370496.0;  // 2^52
  Floats up = ns + 0.5;
  const Floats zero = up - up;
  up = up > zero ? up : zero;
  const Floats whole = up + kWhole;
  std::memcpy(&to, &whole, sizeof(to));
  to -= std::bit_cast<int64_t>(kWhole);
  to += (whole - kWhole) > up;  // true is -1
}

BGL_INLINE void add_rows(int64_t* clock, const int32_t* rows, int lanes, int64_t before_ns,
                         const RowTime* times, int count, const RowPiece* pieces) {
  for (int lane = 0; lane < lanes; lane += kLaneBlock) {
    Ints sum, rounded;
    Shorts load_of;
    load(sum, clock + lane);
    load(load_of, rows + lane);
    const Floats x = __builtin_convertvector(load_of, Floats);
    sum += before_ns;
    for (int i = 0; i < count; ++i) {
      const RowPiece* piece = pieces + times[i].begin;
      const RowPiece* const end = pieces + times[i].end;
      Floats ns = piece->y0 + piece->slope * (x - piece->x0);
      while (++piece != end) {
        const Floats other = piece->y0 + piece->slope * (x - piece->x0);
        ns = x > piece->above ? other : ns;
      }
      round_ns(rounded, ns);
      sum += rounded;
    }
    store(clock + lane, sum);
  }
}

BGL_INLINE void wait_until(int64_t* clock, int64_t* wait, int64_t before_ns, const Ints& end) {
  Ints now, waited;
  load(now, clock);
  load(waited, wait);
  now += before_ns;
  const Ints late = now > end;
  const Ints longer = (end - now) & ~late;
  store(wait, waited + longer);
  store(clock, now + longer);
}

BGL_INLINE void await_one(int64_t* clock, int64_t* wait, int lanes, int64_t before_ns,
                          int64_t end_ns) {
  const Ints end = {end_ns, end_ns, end_ns, end_ns};
  for (int lane = 0; lane < lanes; lane += kLaneBlock) {
    wait_until(clock + lane, wait + lane, before_ns, end);
  }
}

BGL_INLINE void await_each(int64_t* clock, int64_t* wait, int lanes, int64_t before_ns,
                           const int64_t* end_ns) {
  for (int lane = 0; lane < lanes; lane += kLaneBlock) {
    Ints end;
    load(end, end_ns + lane);
    wait_until(clock + lane, wait + lane, before_ns, end);
  }
}

BGL_INLINE int64_t latest(const int64_t* clock, int lanes) {
  Ints most, other;
  load(most, clock);
  for (int lane = kLaneBlock; lane < lanes; lane += kLaneBlock) {
    load(other, clock + lane);
    most = other > most ? other : most;
  }
  const int64_t left = most[0] > most[1] ? most[0] : most[1];
  const int64_t right = most[2] > most[3] ? most[2] : most[3];
  return left > right ? left : right;
}

BGL_INLINE void copy(const int64_t* clock, int64_t before_ns, int64_t* free, int64_t* busy,
                     int64_t* end, const int32_t* rows, int lanes, const SimTransfer& transfer,
                     double bytes_per_s) {
  for (int lane = 0; lane < lanes; lane += kLaneBlock) {
    Ints at, idle, so_far, ns;
    Shorts load_of;
    load(at, clock + lane);
    load(idle, free + lane);
    load(so_far, busy + lane);
    load(load_of, rows + lane);
    const Floats bytes =
        static_cast<double>(transfer.bytes) +
        static_cast<double>(transfer.bytes_per_row) * __builtin_convertvector(load_of, Floats);
    round_ns(ns, bytes * 1e9 / bytes_per_s);
    at += before_ns;
    at = (idle > at ? idle : at) + ns;
    store(free + lane, at);
    store(busy + lane, so_far + ns);
    if (end != nullptr) store(end + lane, at);
  }
}

BGL_INLINE void memory(int64_t* own, int64_t* peak, const int32_t* rows, const int32_t* piece_rows,
                       int lanes, const MemoryOp& op, const RoundedBytes* rounded) {
  for (int lane = 0; lane < lanes; lane += kLaneBlock) {
    Ints bytes, x, p;
    load(bytes, own + lane);
    load_rows(x, rows + lane);
    if (op.high_bytes != MemoryOp::kNone) {
      Ints most;
      load(most, peak + lane);
      const Ints high = bytes + op.high_bytes;
      store(peak + lane, high > most ? high : most);
    }
    bytes += op.per_row * x;
    load_rows(p, piece_rows + lane);
    if (op.per_piece_row != 0) bytes += op.per_piece_row * p;
    for (int32_t i = op.begin; i < op.end; ++i) {
      const RoundedBytes& one = rounded[i];
      Ints exact = one.fixed + one.per_row * x;
      if (one.per_piece_row != 0) exact += one.per_piece_row * p;
      exact = (exact + (kAllocationGranularity - 1)) & -kAllocationGranularity;
      bytes += one.sign * exact;
    }
    store(own + lane, bytes);
  }
}

// A lambda would not take the attribute along: one wrapper a function and processor.
#define BGL_LANE_MATH(suffix, attribute)                                                           \
  attribute void add_rows_##suffix(int64_t* clock, const int32_t* rows, int lanes,                 \
                                   int64_t before_ns, const RowTime* times, int count,             \
                                   const RowPiece* pieces) {                                       \
    add_rows(clock, rows, lanes, before_ns, times, count, pieces);                                 \
  }                                                                                                \
  attribute void await_one_##suffix(int64_t* clock, int64_t* wait, int lanes, int64_t before_ns,   \
                                    int64_t end_ns) {                                              \
    await_one(clock, wait, lanes, before_ns, end_ns);                                              \
  }                                                                                                \
  attribute void await_each_##suffix(int64_t* clock, int64_t* wait, int lanes, int64_t before_ns,  \
                                     const int64_t* end_ns) {                                      \
    await_each(clock, wait, lanes, before_ns, end_ns);                                             \
  }                                                                                                \
  attribute int64_t latest_##suffix(const int64_t* clock, int lanes) {                             \
    return latest(clock, lanes);                                                                   \
  }                                                                                                \
  attribute void copy_##suffix(const int64_t* clock, int64_t before_ns, int64_t* free,             \
                               int64_t* busy, int64_t* end, const int32_t* rows, int lanes,        \
                               const SimTransfer& transfer, double bytes_per_s) {                  \
    copy(clock, before_ns, free, busy, end, rows, lanes, transfer, bytes_per_s);                   \
  }                                                                                                \
  attribute void memory_##suffix(int64_t* own, int64_t* peak, const int32_t* rows,                 \
                                 const int32_t* piece_rows, int lanes, const MemoryOp& op,         \
                                 const RoundedBytes* rounded) {                                    \
    memory(own, peak, rows, piece_rows, lanes, op, rounded);                                       \
  }                                                                                                \
  constexpr LaneMath kMath_##suffix = {add_rows_##suffix, await_one_##suffix, await_each_##suffix, \
                                       latest_##suffix,   copy_##suffix,      memory_##suffix};

BGL_LANE_MATH(any, )
#if defined(__x86_64__)
BGL_LANE_MATH(avx2, __attribute__((target("avx2"))))
#endif

}  // namespace

const LaneMath& lane_math() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return kMath_avx2;
#endif
  return kMath_any;
}

}  // namespace bagualu
