#pragma once

#include <string>
#include <vector>

#include "bagualu/schedule/dual_batch.h"

namespace bagualu {

/// What each rank of a group hands to one communicator, by rank, in its order; names that mean the
/// same operation on every rank ("0F3 layer2.dispatch"). A collective that meets another one hangs
/// or mixes up data, so all ranks need one sequence.
/// Returns: "" if they have, else the first place where a rank departs from rank 0, both sides
/// named.
std::string communicator_order_fault(const std::vector<std::vector<std::string>>& by_rank);

/// The communication of an order, as names for communicator_order_fault().
std::vector<std::string> communications(const DualBatchInstance& instance,
                                        const std::vector<ScheduleItem>& order);

}  // namespace bagualu
