#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "bagualu/sim/engine_test_programs.h"

namespace bagualu {

/// Random numbers that are the same everywhere (SplitMix64).
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed) {}
  /// 0 .. sides - 1
  int64_t roll(int64_t sides) {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<int64_t>((z ^ (z >> 31)) % static_cast<uint64_t>(sides));
  }
  bool chance(int64_t percent) { return roll(100) < percent; }

 private:
  uint64_t state_;
};

/// A replica that cannot stall: messages are awaited by receivers behind where all of them have
/// been sent in some common order of events.
struct RandomReplica {
  std::deque<StepProgram> programs;
  std::deque<std::vector<int32_t>> rows, piece_rows;
  std::vector<SimGroup> groups;
  SimLinks links;
};

RandomReplica random_replica(uint64_t seed);

}  // namespace bagualu
