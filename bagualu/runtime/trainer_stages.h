#pragma once

#include <memory>
#include <vector>

#include "bagualu/provision/training_rank.h"
#include "bagualu/runtime/trainer_options.h"

namespace bagualu {

/// The stages of rank `options.rank`, without costs and policies. Measures attention's scratch,
/// which is in their graphs then.
std::vector<std::unique_ptr<TrainerStage>> make_stages(const ModelSpec& spec,
                                                       const TrainerOptions& options);

/// The forecast of a rank, from its options alone (measures ATen's attention scratch).
/// Throws: InvalidInput
MemoryForecast memory_forecast(const ModelSpec& spec, const TrainerOptions& options);

}  // namespace bagualu
