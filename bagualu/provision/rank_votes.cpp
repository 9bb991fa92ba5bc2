#include "bagualu/provision/rank_votes.h"

#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {

bool RankVotes::agree(bool mine) {
  std::unique_lock lock(mutex_);
  all_ = all_ && mine;
  ++arrived_;
  const int64_t round = round_;
  if (arrived_ == ranks_) conclude();
  changed_.wait(lock, [&] { return round_ != round || failed_; });
  if (round_ == round) throw InternalError("another rank of the group failed");
  return result_;  // of this round: the next one needs this rank
}

void RankVotes::leave() {
  const std::lock_guard lock(mutex_);
  --ranks_;
  if (arrived_ > 0 && arrived_ == ranks_) conclude();
}

void RankVotes::fail() {
  const std::lock_guard lock(mutex_);
  failed_ = true;
  changed_.notify_all();
}

void RankVotes::conclude() {
  result_ = std::exchange(all_, true);
  arrived_ = 0;
  ++round_;
  changed_.notify_all();
}

void drive_ranks(size_t ranks, RankVotes& votes, const std::function<void(size_t)>& rank) {
  std::mutex mutex;
  std::exception_ptr failure;
  const auto fail = [&] {
    const std::lock_guard lock(mutex);
    if (!failure) failure = std::current_exception();
    votes.fail();
  };
  const auto drive = [&](size_t r) {
    try {
      rank(r);
      votes.leave();
    } catch (...) {
      fail();
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (size_t r = 1; r < ranks; ++r) threads.emplace_back(drive, r);
      drive(0);
    } catch (...) {  // no more threads: those that run wait for ranks that never come
      fail();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace bagualu
