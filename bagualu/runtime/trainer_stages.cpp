#include "bagualu/runtime/trainer_stages.h"

#include "bagualu/runtime/attention_scratch.h"

namespace bagualu {

std::vector<std::unique_ptr<TrainerStage>> make_stages(const ModelSpec& spec,
                                                       const TrainerOptions& options) {
  validate(spec, "model");
  validate(spec, options.shape, options.layout, "layout");
  return make_stages(spec, options, measure_attention_scratch(spec, options.shape));
}

MemoryForecast memory_forecast(const ModelSpec& spec, const TrainerOptions& options) {
  const auto stages = make_stages(spec, options);
  return forecast_of(stages, make_program(options, options.shape.microbatches), spec, options);
}

}  // namespace bagualu
