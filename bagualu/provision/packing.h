#pragma once

#include <cstdint>
#include <vector>

namespace bagualu {

/// A retained unit that may go over the link as a whole.
struct PackItem {
  int microbatch = 0;
  int unit = 0;
  int64_t bytes = 0;
};

/// Chooses the units that are offloaded: whole storages, at least `need_bytes` in all (a pool
/// counts bytes, a link carries tensors). Windows are filled first, each by the subset that fits
/// best; what is then missing goes past one of them, at as few bytes as possible. Subset sums over
/// 4096 buckets of the micro-batch's bytes.
class Packer {
 public:
  /// `items`: micro-batch by micro-batch; those that are reloaded last come first, and of equal
  /// sizes the earlier one is taken. `window_bytes`: by micro-batch. `chosen`: by item.
  /// Returns: false if all items together are too few.
  bool pack(const std::vector<PackItem>& items, const std::vector<int64_t>& window_bytes,
            int64_t need_bytes, std::vector<uint8_t>& chosen);

 private:
  static constexpr int kBuckets = 4096;
  static constexpr int kWords = kBuckets / 64 + 1;

  struct Span {     // of one micro-batch
    int begin = 0;  // in order_
    int end = 0;
    int64_t all = 0;
    int64_t bucket = 1;
    int first_row = -1;  // in rows_, one row of kWords per item and one before; -1: not made
    int64_t taken = 0;   // bytes chosen
  };

  void sort_items();
  void find_sums(Span& span);
  bool reachable(const Span& span, int item, int sum) const;
  /// Bytes of the subset of this bucket sum; marks it if `take`.
  int64_t subset(const Span& span, int sum, bool take);
  void fill_window(Span& span, int64_t window);
  int64_t add_what_fits(const Span& span, int64_t room);
  bool overflow(const std::vector<int64_t>& window_bytes);
  int64_t past(const std::vector<int64_t>& window_bytes) const;
  bool go_past_by_items();
  bool go_past(const std::vector<int64_t>& window_bytes);
  int64_t least_at_least(const Span& span, int64_t bytes, int& sum);
  void take_back();

  const std::vector<PackItem>* items_ = nullptr;
  std::vector<uint8_t>* chosen_ = nullptr;
  int64_t need_ = 0;  ///< bytes still missing
  std::vector<int> order_;
  std::vector<Span> spans_;
  std::vector<uint64_t> rows_;
};

}  // namespace bagualu
