#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

/// Eight fp32 lanes for the row loops of this folder, on GCC's vector types, without intrinsics.
///
/// Note [Bits of a row]: a row's result must not depend on where the row lies, on its neighbours or
/// on the thread that computes it, else a piece recomputed alone would differ from the whole. So
/// rows are cut into groups of eight from their own beginning, the last group is padded with zeros
/// and takes the very same instructions, lanes are summed in one order, and threads split rows (or
/// columns), never a sum.
/// All of this is internal to the .cpp files of the folder.
namespace bagualu::ops::simd {

// Vectors are passed between inlined functions only, so the ABI that GCC warns about is not used.
#pragma GCC diagnostic ignored "-Wpsabi"

// The attribute stands on every function, the inlined ones too: GCC cuts vectors to the machine's
// width before it inlines and before it makes the copies of target_clones, so those would get SSE.
#if defined(__x86_64__)
#define BGL_KERNEL __attribute__((target("avx2,fma")))
#define BGL_INLINE inline __attribute__((always_inline, target("avx2,fma")))
#else
#define BGL_KERNEL
#define BGL_INLINE inline __attribute__((always_inline))
#endif

/// Whether this machine can run the kernels.
inline bool kernels_run_here() {
#if defined(__x86_64__)
  static const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return runs;
#else
  return true;
#endif
}

inline constexpr int64_t kLanes = 8;

typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t IntLanes __attribute__((vector_size(32)));
typedef uint32_t BitLanes __attribute__((vector_size(32)));
typedef uint16_t HalfLanes __attribute__((vector_size(16)));

/// bf16 as it lies in memory.
struct Bf16 {
  uint16_t bits;
};

BGL_INLINE Lanes splat(float value) {
  return Lanes{value, value, value, value, value, value, value, value};
}

BGL_INLINE Lanes load_full(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

BGL_INLINE Lanes load_full(const Bf16* p) {
  HalfLanes half;
  std::memcpy(&half, p, sizeof(half));
  const BitLanes bits = __builtin_convertvector(half, BitLanes) << 16;
  return reinterpret_cast<Lanes>(bits);
}

BGL_INLINE void store_full(float* p, Lanes v) { std::memcpy(p, &v, sizeof(v)); }

// Round to nearest even, as c10 does.
BGL_INLINE void store_full(Bf16* p, Lanes v) {
  const BitLanes bits = reinterpret_cast<BitLanes>(v);
  const BitLanes rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const BitLanes nan = BitLanes{} + 0x7fc0u;
  const BitLanes picked = v == v ? rounded : nan;
  const HalfLanes half = __builtin_convertvector(picked, HalfLanes);
  std::memcpy(p, &half, sizeof(half));
}

/// The first `n` (up to eight) elements, zeros behind them.
template <class T>
BGL_INLINE Lanes load(const T* p, int64_t n) {
  if (n >= kLanes) return load_full(p);
  T padded[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) padded[i] = p[i];
  return load_full(padded);
}

template <class T>
BGL_INLINE void store(T* p, int64_t n, Lanes v) {
  if (n >= kLanes) {
    store_full(p, v);
    return;
  }
  T padded[kLanes];
  store_full(padded, v);
  for (int64_t i = 0; i < n; ++i) p[i] = padded[i];
}

BGL_INLINE float load_one(const float* p) { return *p; }
BGL_INLINE float load_one(const Bf16* p) {
  const uint32_t bits = static_cast<uint32_t>(p->bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

/// `v` as it would be read back after being stored as T.
BGL_INLINE Lanes round_to(const float*, Lanes v) { return v; }
BGL_INLINE Lanes round_to(const Bf16*, Lanes v) {
  Bf16 stored[kLanes];
  store_full(stored, v);
  return load_full(stored);
}

BGL_INLINE float sum(Lanes v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

BGL_INLINE Lanes max(Lanes a, Lanes b) { return a > b ? a : b; }

BGL_INLINE float max(Lanes v) {
  float largest = v[0];
  for (int64_t i = 1; i < kLanes; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

/// Lanes at and behind `n` become `filler` (for maxima and sums over a padded group).
BGL_INLINE Lanes keep(Lanes v, int64_t n, float filler) {
  if (n >= kLanes) return v;
  const IntLanes lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return lane < static_cast<int32_t>(n) ? v : splat(filler);
}

/// e^x to about one ulp; 0 below -87.3, NaN stays NaN.
/// Source: Cephes expf, 2^n by the exponent bits.
BGL_INLINE Lanes exp(Lanes x) {
  const Lanes highest = splat(88.3762626647949f);
  const Lanes lowest = splat(-87.3365447505531f);
  const Lanes underflow = splat(0.0f);
  Lanes y = x > highest ? highest : x;
  y = y < lowest ? lowest : y;
  // Adding 1.5 * 2^23 rounds to the nearest integer, left in the low mantissa bits.
  const Lanes magic = splat(12582912.0f);
  const Lanes shifted = y * 1.44269504088896341f + magic;
  const Lanes n = shifted - magic;
  const Lanes r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  Lanes p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const IntLanes exponent = (reinterpret_cast<IntLanes>(shifted) << 23) + (127 << 23);
  const Lanes result = p * reinterpret_cast<Lanes>(exponent);
  return x < lowest ? underflow : result;
}

}  // namespace bagualu::ops::simd
