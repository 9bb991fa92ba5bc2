// Votes of the ranks of an expert group, for tests: ranks are threads.
#pragma once

#include <barrier>
#include <cstddef>
#include <vector>

namespace bagualu {

/// One vote after the other; every rank takes part in each.
class Votes {
 public:
  explicit Votes(int ranks) : flags_(static_cast<size_t>(ranks)), barrier_(ranks) {}

  bool agree(int rank, bool mine) {
    flags_[static_cast<size_t>(rank)] = mine;
    barrier_.arrive_and_wait();
    bool all = true;
    for (const char flag : flags_) all = all && flag != 0;
    barrier_.arrive_and_wait();
    return all;
  }

 private:
  std::vector<char> flags_;
  std::barrier<> barrier_;
};

}  // namespace bagualu
