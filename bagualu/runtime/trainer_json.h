#pragma once

#include <string>

#include "bagualu/base/json.h"
#include "bagualu/runtime/trainer.h"

namespace bagualu {

/// A step's extras from the caller: {"spikes":[{"layers":[..],"factor":2.6}], "routing":[[[counts
/// per expert] per layer] per micro-batch] | null, "want_memory":bool, "trace_path":text,
/// "stop_requested":bool}. Throws: InvalidInput
void read_step_extras(const Json& extras, const ModelSpec& spec, const TrainerOptions& options,
                      int64_t microbatches, StepInput& input);

/// A step as the run log has it (docs/formats.md, "step").
Json step_to_json(const Trainer& trainer, const StepReport& report);

/// What a replay of the rank needs beside its options: {"attention_scratch_bytes":[forward,
/// backward],"profile":{...}}.
Json start_to_json(const Trainer& trainer);

Json to_json(const MemoryForecast& forecast);

/// What a plan may say: [{"name":"layer0.qkv","layer":0,"allowed":["save","recompute",...]}].
Json units_to_json(const Trainer& trainer);

}  // namespace bagualu
