#pragma once

#include <cstdint>
#include <string_view>

namespace bagualu {

/// One step of a counter-based generator: a seed for (seed, value), so that random numbers are a
/// function of where they are used and no generator state has to be saved or replayed.
/// Source: the finalizer of SplitMix64.
inline uint64_t mix_seed(uint64_t seed, uint64_t value) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ULL * (value + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

inline uint64_t mix_seed(uint64_t seed, std::string_view text) {
  for (const char c : text) seed = mix_seed(seed, static_cast<unsigned char>(c));
  return seed;
}

}  // namespace bagualu
