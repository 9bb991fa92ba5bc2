#pragma once

#include <cstdint>
#include <functional>

namespace bagualu {

/// Calls task(worker, i) for every i in 0 .. count - 1, in rising order, each on one of `threads`
/// workers (numbered from 0; one: the caller's thread). Which worker gets which task is chance.
/// Throws: what the task with the lowest number of those that threw has thrown, when all workers
///         are through; tasks behind it may not have run.
void run_tasks(int threads, int64_t count, const std::function<void(int worker, int64_t i)>& task);

}  // namespace bagualu
