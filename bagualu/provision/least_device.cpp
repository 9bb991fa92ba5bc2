#include "bagualu/provision/least_device.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace bagualu {
namespace {

constexpr int64_t kMaxNodes = 200'000;

class Search {
 public:
  Search(const std::vector<StubbornItem>& items, std::vector<int64_t> link_bytes,
         int64_t host_bytes)
      : items_(items), link_(std::move(link_bytes)), host_(host_bytes) {
    order_.resize(items.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) {
      if (items_[a].microbatch != items_[b].microbatch) {
        return items_[a].microbatch < items_[b].microbatch;
      }
      return items_[a].bytes > items_[b].bytes;
    });
    rest_.assign(items.size() + 1, 0);
    for (size_t i = items.size(); i-- > 0;) rest_[i] = rest_[i + 1] + items_[order_[i]].kept_bytes;
    taken_.assign(items.size(), 0);
    best_.bytes = rest_[0];
    best_.offloaded = taken_;
  }

  LeastDevice run() {
    descend(0, 0);
    best_.proven = nodes_left_ > 0;
    return best_;
  }

 private:
  void descend(size_t depth, int64_t kept) {
    if (--nodes_left_ <= 0) return;
    int64_t capacity = 0;
    for (int64_t left : link_) capacity += std::max<int64_t>(0, left);
    capacity = std::min(capacity, host_);
    if (kept + std::max<int64_t>(0, rest_[depth] - capacity) >= best_.bytes) return;
    if (depth == order_.size()) {
      best_.bytes = kept;
      best_.offloaded = taken_;
      return;
    }
    const int i = order_[depth];
    const StubbornItem& item = items_[i];
    // Of equal items the first ones are offloaded.
    const bool allowed = depth == 0 || taken_[order_[depth - 1]] || !same(order_[depth - 1], i);
    if (allowed && item.bytes <= link_[item.microbatch] && item.bytes <= host_) {
      link_[item.microbatch] -= item.bytes;
      host_ -= item.bytes;
      taken_[i] = 1;
      descend(depth + 1, kept);
      taken_[i] = 0;
      host_ += item.bytes;
      link_[item.microbatch] += item.bytes;
    }
    descend(depth + 1, kept + item.kept_bytes);
  }

  bool same(int a, int b) const {
    return items_[a].microbatch == items_[b].microbatch && items_[a].bytes == items_[b].bytes &&
           items_[a].kept_bytes == items_[b].kept_bytes;
  }

  const std::vector<StubbornItem>& items_;
  std::vector<int64_t> link_;
  int64_t host_;
  std::vector<int> order_;
  std::vector<int64_t> rest_;  // kept bytes of the items from here on
  std::vector<uint8_t> taken_;
  LeastDevice best_;
  int64_t nodes_left_ = kMaxNodes;
};

}  // namespace

LeastDevice least_device(const std::vector<StubbornItem>& items, std::vector<int64_t> link_bytes,
                         int64_t host_bytes) {
  return Search(items, std::move(link_bytes), host_bytes).run();
}

}  // namespace bagualu
