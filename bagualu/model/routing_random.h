// Random numbers of routing sources: functions of a key and a place, the same with every compiler
// and standard library. Integers as far as possible; std:: distributions differ between libraries.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace bagualu {

/// Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom
///         number generators").
constexpr uint64_t mix_bits(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// One number for what a draw belongs to: seed, purpose, iteration, replica, layer.
constexpr uint64_t random_key(std::initializer_list<uint64_t> parts) {
  uint64_t key = 0;
  for (const uint64_t part : parts) key = mix_bits(key + 0x9e3779b97f4a7c15ULL + part);
  return key;
}

/// SplitMix64 that begins at a key.
class RandomBits {
 public:
  explicit constexpr RandomBits(uint64_t key) : state_(key) {}

  constexpr uint64_t next() { return mix_bits(state_ += 0x9e3779b97f4a7c15ULL); }

  /// Strictly between 0 and 1: (top 52 bits + 1/2) / 2^52, exact in a double.
  constexpr double uniform() {
    return (static_cast<double>(next() >> 12) + 0.5) * (1.0 / 4503599627370496.0);
  }

  /// 0 to count - 1: the top 32 bits times count, over 2^32. Requires: 1 <= count < 2^32.
  constexpr int64_t below(int64_t count) {
    return static_cast<int64_t>(((next() >> 32) * static_cast<uint64_t>(count)) >> 32);
  }

  /// Nearly normal with standard deviation kRoughSigma: the sum of the four 16-bit parts less its
  /// mean, within 3.46 deviations. For spreads whose tails nobody measures.
  constexpr int32_t rough_normal() {
    const uint64_t bits = next();
    const auto sum = static_cast<int32_t>((bits & 0xffff) + ((bits >> 16) & 0xffff) +
                                          ((bits >> 32) & 0xffff) + (bits >> 48));
    return sum - 131070;
  }
  /// sqrt(4 * (2^32 - 1) / 12)
  static constexpr double kRoughSigma = 37837.22746;

 private:
  uint64_t state_;
};

}  // namespace bagualu
