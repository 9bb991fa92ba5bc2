#include "bagualu/provision/packing.h"

#include <algorithm>

namespace bagualu {

bool Packer::pack(const std::vector<PackItem>& items, const std::vector<int64_t>& window_bytes,
                  int64_t need_bytes, std::vector<uint8_t>& chosen) {
  chosen.assign(items.size(), 0);
  if (need_bytes <= 0) return true;
  items_ = &items;
  chosen_ = &chosen;
  need_ = need_bytes;
  spans_.assign(window_bytes.size(), {});
  sort_items();
  rows_.clear();
  for (size_t m = 0; m < spans_.size(); ++m) {
    if (need_ > 0) fill_window(spans_[m], window_bytes[m]);
  }
  if (need_ > 0 && !overflow(window_bytes)) return false;
  take_back();
  return true;
}

// Past the windows in two ways; the one that goes less far stays.
bool Packer::overflow(const std::vector<int64_t>& window_bytes) {
  const std::vector<uint8_t> filled = *chosen_;
  const std::vector<Span> spans = spans_;
  const int64_t need = need_;
  const bool one_by_one = go_past_by_items();
  const int64_t past_items = one_by_one ? past(window_bytes) : INT64_MAX;
  const std::vector<uint8_t> by_items = *chosen_;
  const int64_t need_by_items = need_;
  *chosen_ = filled;
  spans_ = spans;
  need_ = need;
  const bool by_sum = go_past(window_bytes);
  if (!one_by_one || (by_sum && past(window_bytes) <= past_items)) return by_sum;
  *chosen_ = by_items;
  need_ = need_by_items;
  return true;
}

int64_t Packer::past(const std::vector<int64_t>& window_bytes) const {
  std::vector<int64_t> bytes(window_bytes.size());
  for (int i : order_) {
    if ((*chosen_)[i]) bytes[(*items_)[i].microbatch] += (*items_)[i].bytes;
  }
  int64_t sum = 0;
  for (size_t m = 0; m < bytes.size(); ++m) sum += std::max<int64_t>(0, bytes[m] - window_bytes[m]);
  return sum;
}

// Of all micro-batches: largest first as long as it fits under the need, then the smallest item
// that closes it; or one single item, if that is less.
bool Packer::go_past_by_items() {
  std::vector<int> left;
  for (int i : order_) {
    if (!(*chosen_)[i]) left.push_back(i);
  }
  std::stable_sort(left.begin(), left.end(),
                   [this](int a, int b) { return (*items_)[a].bytes > (*items_)[b].bytes; });
  int single = -1, closing = -1;
  int64_t need = need_, sum = 0;
  std::vector<int> taken, rest;
  for (int i : left) {
    if ((*items_)[i].bytes >= need_) single = i;
    if ((*items_)[i].bytes > need) {
      rest.push_back(i);
      continue;
    }
    taken.push_back(i);
    need -= (*items_)[i].bytes;
    sum += (*items_)[i].bytes;
  }
  if (need > 0) {
    for (int i : rest) {
      if ((*items_)[i].bytes >= need) closing = i;
    }
    if (closing < 0 && single < 0) return false;
    if (closing >= 0) {
      taken.push_back(closing);
      sum += (*items_)[closing].bytes;
    }
    if (closing < 0 || (single >= 0 && (*items_)[single].bytes <= sum)) taken.assign(1, single);
  }
  for (int i : taken) {
    (*chosen_)[i] = 1;
    need_ -= (*items_)[i].bytes;
  }
  return true;
}

// By micro-batch, largest first.
void Packer::sort_items() {
  order_.clear();
  for (int i = 0; i < static_cast<int>(items_->size()); ++i) {
    if ((*items_)[i].bytes > 0) order_.push_back(i);
  }
  std::stable_sort(order_.begin(), order_.end(), [this](int a, int b) {
    const PackItem &x = (*items_)[a], &y = (*items_)[b];
    return x.microbatch != y.microbatch ? x.microbatch < y.microbatch : x.bytes > y.bytes;
  });
  for (int at = 0; at < static_cast<int>(order_.size()); ++at) {
    Span& span = spans_[(*items_)[order_[at]].microbatch];
    if (span.end == 0) span.begin = at;
    span.end = at + 1;
    span.all += (*items_)[order_[at]].bytes;
  }
}

// Row i + 1: the bucket sums that the first i + 1 items of the span can make.
void Packer::find_sums(Span& span) {
  if (span.first_row >= 0) return;
  span.bucket = span.all / (kBuckets - (span.end - span.begin) - 1) + 1;
  span.first_row = static_cast<int>(rows_.size());
  rows_.resize(rows_.size() + static_cast<size_t>(kWords) * (span.end - span.begin + 1), 0);
  uint64_t* row = rows_.data() + span.first_row;
  row[0] = 1;
  for (int at = span.begin; at < span.end; ++at) {
    const int64_t size = (*items_)[order_[at]].bytes / span.bucket;
    const int words = static_cast<int>(size / 64), bits = static_cast<int>(size % 64);
    uint64_t* next = row + kWords;
    for (int w = 0; w < kWords; ++w) {
      uint64_t shifted = w >= words ? row[w - words] << bits : 0;
      if (bits > 0 && w > words) shifted |= row[w - words - 1] >> (64 - bits);
      next[w] = row[w] | shifted;
    }
    row = next;
  }
}

bool Packer::reachable(const Span& span, int item, int sum) const {
  if (sum < 0) return false;
  const uint64_t* row = rows_.data() + span.first_row + static_cast<int64_t>(item) * kWords;
  return row[sum / 64] >> (sum % 64) & 1;
}

int64_t Packer::subset(const Span& span, int sum, bool take) {
  int64_t bytes = 0;
  for (int item = span.end - span.begin; item-- > 0;) {
    // Later items, the small ones, are left out where they are not needed.
    if (reachable(span, item, sum)) continue;
    const int i = order_[span.begin + item];
    sum -= static_cast<int>((*items_)[i].bytes / span.bucket);
    bytes += (*items_)[i].bytes;
    if (take) (*chosen_)[i] = 1;
  }
  return bytes;
}

// Largest first; where that leaves a hole that matters, the best bucket sum. Sizes are rounded down
// to buckets, so the true sum may be above the window: then the next lower one is tried. What is
// left of the window is filled item by item.
void Packer::fill_window(Span& span, int64_t window) {
  const int items = span.end - span.begin;
  if (items == 0 || window <= 0) return;
  span.taken = add_what_fits(span, window);
  if (span.taken < std::min(need_, span.all) && span.taken < window - window / 512) {
    for (int at = span.begin; at < span.end; ++at) (*chosen_)[order_[at]] = 0;
    find_sums(span);
    for (int64_t sum = std::min<int64_t>(window / span.bucket, kBuckets - 1); sum > 0; --sum) {
      if (!reachable(span, items, static_cast<int>(sum))) continue;
      if (subset(span, static_cast<int>(sum), false) > window) continue;
      span.taken = subset(span, static_cast<int>(sum), true);
      break;
    }
    span.taken += add_what_fits(span, window - span.taken);
  }
  need_ -= span.taken;
}

int64_t Packer::add_what_fits(const Span& span, int64_t room) {
  int64_t added = 0;
  for (int at = span.begin; at < span.end && added < need_; ++at) {
    const int i = order_[at];
    if ((*chosen_)[i] || added + (*items_)[i].bytes > room) continue;
    (*chosen_)[i] = 1;
    added += (*items_)[i].bytes;
  }
  return added;
}

int64_t Packer::least_at_least(const Span& span, int64_t bytes, int& sum) {
  constexpr int kTries = 24;
  int tries = 0;
  const int items = span.end - span.begin;
  const int64_t first = std::max<int64_t>(0, bytes / span.bucket - items);
  int64_t best = -1;
  for (int64_t s = first; s < kBuckets && tries < kTries; ++s) {
    if (!reachable(span, items, static_cast<int>(s))) continue;
    const int64_t made = subset(span, static_cast<int>(s), false);
    if (made < bytes) continue;
    ++tries;
    if (best >= 0 && made >= best) continue;
    best = made;
    sum = static_cast<int>(s);
  }
  return best;
}

// The micro-batch that can make up what is missing at the fewest bytes past its window; if none can
// alone, the one with most bytes left goes whole.
bool Packer::go_past(const std::vector<int64_t>& window_bytes) {
  while (need_ > 0) {
    int best = -1, best_sum = 0, largest = -1;
    int64_t least_past = INT64_MAX;
    for (int m = 0; m < static_cast<int>(spans_.size()); ++m) {
      const Span& span = spans_[m];
      if (span.all <= span.taken) continue;
      find_sums(spans_[m]);
      if (largest < 0 || span.all - span.taken > spans_[largest].all - spans_[largest].taken) {
        largest = m;
      }
      int sum = 0;
      const int64_t bytes = least_at_least(span, span.taken + need_, sum);
      const int64_t past = bytes - std::max(window_bytes[m], span.taken);
      if (bytes < 0 || past >= least_past) continue;
      least_past = past;
      best = m;
      best_sum = sum;
    }
    if (largest < 0) return false;
    Span& span = spans_[best >= 0 ? best : largest];
    for (int at = span.begin; at < span.end; ++at) (*chosen_)[order_[at]] = best < 0 ? 1 : 0;
    const int64_t bytes = best >= 0 ? subset(span, best_sum, true) : span.all;
    need_ -= bytes - span.taken;
    span.taken = bytes;
  }
  return true;
}

// What the last ones made superfluous stays on the device.
void Packer::take_back() {
  for (int i : order_) {
    if (!(*chosen_)[i] || (*items_)[i].bytes > -need_) continue;
    (*chosen_)[i] = 0;
    need_ += (*items_)[i].bytes;
  }
}

}  // namespace bagualu
