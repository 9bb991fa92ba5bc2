#include "bagualu/provision/packing.h"

#include <algorithm>
#include <bitset>

namespace bagualu {
namespace {

constexpr int kBuckets = 2048;

class Packer {
 public:
  Packer(const std::vector<PackItem>& items, const std::vector<int64_t>& window_bytes,
         int64_t need_bytes, std::vector<uint8_t>& chosen)
      : items_(items), window_(window_bytes), need_(need_bytes), chosen_(chosen) {
    chosen_.assign(items.size(), 0);
    for (size_t i = 0; i < items.size(); ++i) by_size_.push_back(static_cast<int>(i));
    std::stable_sort(by_size_.begin(), by_size_.end(),
                     [&](int a, int b) { return items_[a].bytes > items_[b].bytes; });
  }

  bool run() {
    for (int m = 0; m < static_cast<int>(window_.size()) && need_ > 0; ++m) fill_window(m);
    if (need_ > 0 && !overflow()) return false;
    take_back();
    return true;
  }

 private:
  void take(int item) {
    chosen_[item] = 1;
    need_ -= items_[item].bytes;
  }

  // Largest first, but the last one is the smallest that is enough.
  void fill_window(int m) {
    std::vector<int> taken;
    int64_t left = window_[m], need = need_;
    for (int i : by_size_) {
      const PackItem& item = items_[i];
      if (item.microbatch != m || item.bytes <= 0 || item.bytes > left || need <= 0) continue;
      taken.push_back(i);
      left -= item.bytes;
      need -= item.bytes;
    }
    if (need > 0 && left > window_[m] / 256) best_subset(m, window_[m] - left, taken);
    for (int i : taken) take(i);
  }

  // Subset sum over buckets, sizes rounded up: replaces `taken` if it fills more than `filled`.
  void best_subset(int m, int64_t filled, std::vector<int>& taken) const {
    const int64_t bucket = window_[m] / kBuckets + 1;
    std::vector<int> candidates;
    for (int i : by_size_) {
      if (items_[i].microbatch == m && items_[i].bytes > 0 && items_[i].bytes <= window_[m]) {
        candidates.push_back(i);
      }
    }
    using Row = std::bitset<kBuckets + 1>;
    std::vector<Row> reachable(candidates.size() + 1);
    reachable[0].set(0);
    const auto size = [&](size_t c) {
      return static_cast<size_t>((items_[candidates[c]].bytes + bucket - 1) / bucket);
    };
    for (size_t c = 0; c < candidates.size(); ++c) {
      reachable[c + 1] = reachable[c] | (reachable[c] << size(c));
    }
    size_t at = kBuckets;
    while (!reachable.back()[at]) --at;
    std::vector<int> subset;
    int64_t bytes = 0;
    for (size_t c = candidates.size(); c-- > 0;) {
      if (reachable[c][at]) continue;
      at -= size(c);
      subset.push_back(candidates[c]);
      bytes += items_[candidates[c]].bytes;
    }
    if (bytes > filled && bytes <= window_[m]) taken = subset;
  }

  // The items left, smallest sum that is enough: largest first as long as it fits under the need,
  // then the smallest one that closes it; or one single item, if that is less.
  bool overflow() {
    int single = -1;
    std::vector<int> taken;
    int64_t need = need_, sum = 0;
    for (int i : by_size_) {
      if (chosen_[i] || items_[i].bytes <= 0) continue;
      if (items_[i].bytes >= need_) single = i;
      if (items_[i].bytes > need) continue;
      taken.push_back(i);
      need -= items_[i].bytes;
      sum += items_[i].bytes;
    }
    if (need > 0) {
      int closing = -1;
      for (int i : by_size_) {
        const bool used = chosen_[i] || std::find(taken.begin(), taken.end(), i) != taken.end();
        if (!used && items_[i].bytes >= need) closing = i;
      }
      if (closing < 0 && single < 0) return false;
      if (closing >= 0) {
        taken.push_back(closing);
        sum += items_[closing].bytes;
      }
      if (closing < 0 || (single >= 0 && items_[single].bytes <= sum)) taken.assign(1, single);
    }
    for (int i : taken) take(i);
    return true;
  }

  // What the last ones made superfluous stays on the device.
  void take_back() {
    for (int i : by_size_) {
      if (!chosen_[i] || items_[i].bytes > -need_) continue;
      chosen_[i] = 0;
      need_ += items_[i].bytes;
    }
  }

  const std::vector<PackItem>& items_;
  const std::vector<int64_t>& window_;
  int64_t need_;
  std::vector<uint8_t>& chosen_;
  std::vector<int> by_size_;
};

}  // namespace

bool pack_offloads(const std::vector<PackItem>& items, const std::vector<int64_t>& window_bytes,
                   int64_t need_bytes, std::vector<uint8_t>& chosen) {
  if (need_bytes <= 0) {
    chosen.assign(items.size(), 0);
    return true;
  }
  return Packer(items, window_bytes, need_bytes, chosen).run();
}

}  // namespace bagualu
