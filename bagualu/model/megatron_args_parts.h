#pragma once

// Parts of the reader, each for some of the flags.

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/model/job.h"
#include "bagualu/model/megatron_args.h"
#include "bagualu/model/megatron_flag_set.h"

namespace bagualu {

/// "([0]*3+[1]*58)", "[1,1,0]*4": Python's lists of numbers with + and *, up to 4,096 long.
/// Throws: InvalidInput through `flags`.
std::vector<int64_t> megatron_pattern(const MegatronFlags& flags, std::string_view name);

/// Everything of the model, and the multiple that the vocabulary is padded to.
void read_megatron_model(const MegatronOptions& options, MegatronFlags* flags, Job* job);
/// Parallel sizes, stages and batches. Requires: the model was read. `world_size` as the launch
/// command says, 0: it does not.
void read_megatron_layout(const MegatronOptions& options, int64_t world_size, MegatronFlags* flags,
                          Job* job);
/// Precision, optimizer, what is kept for backward, dispatch, overlap.
/// Requires: model and layout were read.
void read_megatron_settings(MegatronFlags* flags, Job* job);

/// What Megatron makes of sizes alone, the same number of layers in each virtual stage; empty if
/// they do not divide.
std::vector<StageContent> even_megatron_stages(const ModelSpec& model, int64_t pp, int64_t vpp);

}  // namespace bagualu
