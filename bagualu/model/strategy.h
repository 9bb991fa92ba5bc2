#pragma once

#include <filesystem>
#include <string>

#include "bagualu/base/json.h"
#include "bagualu/model/job.h"

namespace bagualu {

/// What a Job has besides its model, as a file: parallel sizes, stages, batch, precision,
/// optimizer, what is kept for backward (docs/formats.md, Strategy). Everything is written; reading
/// takes the defaults of Job for what is absent.
Json strategy_to_json(const Job& job);

/// Settings with a key of their own, from micro_batch_size to moe, into `job`; what the object does
/// not say stays. Sizes, order, stages and the number of micro-batches are the caller's.
/// Throws: InvalidInput on unknown keys inside a section and on values out of range.
void read_job_settings(JsonReader* reader, Job* job);

/// A job of this model by that strategy. Without "stages", layers are spread as default_stages()
/// does; without "sequence_parallel", it is on with tensor parallelism. Either "microbatches" or
/// "global_batch_size". Throws: InvalidInput(where, field) on unknown keys, values out of range and
/// what validate() refuses.
Job job_from_strategy(const Json& object, const ModelSpec& model, const std::string& where);

/// The same from a file.
Job job_from_strategy_file(const std::filesystem::path& path, const ModelSpec& model);

}  // namespace bagualu
