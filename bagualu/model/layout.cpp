#include "bagualu/model/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

void at_least_one(const char* field, int64_t value, int64_t max, const std::string& where) {
  if (value >= 1 && value <= max) return;
  throw InvalidInput(where, field, fmt::format("{}", value),
                     fmt::format("an integer from 1 to {}", max));
}

void check_groups(const ModelSpec& spec, const ParallelLayout& layout, const std::string& where) {
  if (layout.world_size % layout.pp_size != 0) {
    throw InvalidInput(where, "pp", fmt::format("{}", layout.pp_size),
                       fmt::format("a divisor of world_size = {}", layout.world_size));
  }
  if (spec.experts % layout.ep_size != 0) {
    throw InvalidInput(where, "ep", fmt::format("{}", layout.ep_size),
                       fmt::format("a divisor of experts = {}", spec.experts));
  }
  if (layout.dp_size() % layout.ep_size != 0) {
    const std::string of_stage =
        layout.pp_size == 1
            ? fmt::format("world_size = {}", layout.world_size)
            : fmt::format("world_size / pp = {} ranks of a stage", layout.dp_size());
    throw InvalidInput(where, "ep", fmt::format("{}", layout.ep_size), "a divisor of " + of_stage);
  }
}

void check_order(const ParallelLayout& layout, const std::string& where) {
  const std::string name(pipeline_kind_name(layout.pipeline));
  if (layout.pipeline == PipelineKind::kDualPipe) {
    throw InvalidInput(where, "pipeline", name,
                       "an order with one copy of the model: dualpipe holds two");
  }
  if (is_v_shaped(layout.pipeline)) {
    if (layout.virtual_per_rank <= 2) return;
    throw InvalidInput(where, "vpp", fmt::format("{}", layout.virtual_per_rank),
                       "1 or 2, since the order " + name + " has two stages per rank");
  }
  if (layout.pipeline != PipelineKind::kInterleaved && layout.virtual_per_rank != 1) {
    throw InvalidInput(where, "vpp", fmt::format("{}", layout.virtual_per_rank),
                       "1, since the order " + name + " has one stage per rank");
  }
}

void check_stages(const ModelSpec& spec, const ParallelLayout& layout, const std::string& where) {
  const int64_t stages = layout.stage_count();
  const std::string found = fmt::format("{}", fmt::join(layout.stage_layers, ","));
  if (!layout.stage_layers.empty()) {
    if (static_cast<int64_t>(layout.stage_layers.size()) != stages) {
      throw InvalidInput(where, "stages", found,
                         fmt::format("{} numbers of layers: pp = {} with {} virtual stages each",
                                     stages, layout.pp_size, layout.stages_per_rank()));
    }
    int64_t sum = 0;
    for (const int64_t layers : layout.stage_layers) {
      if (layers < 0 || layers > spec.layers) {
        throw InvalidInput(where, "stages", found,
                           fmt::format("numbers from 0 to {}", spec.layers));
      }
      sum += layers;
    }
    if (sum != spec.layers) {
      throw InvalidInput(where, "stages", fmt::format("{}, together {} layers", found, sum),
                         fmt::format("{} layers together", spec.layers));
    }
  }
  const std::vector<StageSlice> slices = stage_slices(spec, layout);
  for (size_t s = 0; s < slices.size(); ++s) {
    if (slices[s].layers > 0 || slices[s].embedding || slices[s].head) continue;
    throw InvalidInput(where, layout.stage_layers.empty() ? "pp" : "stages",
                       fmt::format("nothing in virtual stage {}", s),
                       fmt::format("a layer in each: {} stages of {} layers", stages, spec.layers));
  }
}

}  // namespace

std::vector<int64_t> ParallelLayout::stages_of_rank(int64_t pp_rank) const {
  std::vector<int64_t> held;
  for (int64_t stage = 0; stage < stage_count(); ++stage) {
    if (rank_of_stage(stage) == pp_rank) held.push_back(stage);
  }
  return held;
}

std::vector<StageSlice> stage_slices(const ModelSpec& spec, const ParallelLayout& layout) {
  std::vector<StageSlice> slices;
  if (layout.stage_layers.empty()) {
    for (const StageContent& stage :
         default_stages(spec, layout.pp_size, layout.stages_per_rank())) {
      slices.push_back({stage.first_layer, stage.layer_count, stage.embedding, stage.head});
    }
    return slices;
  }
  int64_t first = 0;
  for (const int64_t layers : layout.stage_layers) {
    slices.push_back({first, layers, false, false});
    first += layers;
  }
  slices.front().embedding = true;
  slices.back().head = true;
  return slices;
}

std::vector<StageSlice> rank_slices(const ModelSpec& spec, const ParallelLayout& layout,
                                    int64_t pp_rank) {
  const std::vector<StageSlice> all = stage_slices(spec, layout);
  std::vector<StageSlice> held;
  for (const int64_t stage : layout.stages_of_rank(pp_rank)) {
    held.push_back(all[static_cast<size_t>(stage)]);
  }
  return held;
}

bool shares_embedding(const ModelSpec& spec, const ParallelLayout& layout, int64_t pp_rank) {
  const int64_t first = layout.rank_of_stage(0);
  const int64_t last = layout.rank_of_stage(layout.stage_count() - 1);
  return spec.tied_embeddings && first != last && (pp_rank == first || pp_rank == last);
}

StageSlice whole_model(const ModelSpec& spec) { return {0, spec.layers, true, true}; }

int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

std::string_view dtype_name(Dtype dtype) { return dtype == Dtype::kFp32 ? "fp32" : "bf16"; }

Dtype parse_dtype(std::string_view text, const std::string& where, const std::string& field) {
  if (text == "fp32") return Dtype::kFp32;
  if (text == "bf16") return Dtype::kBf16;
  throw InvalidInput(where, field, fmt::format("\"{}\"", text), "fp32 or bf16");
}

int64_t max_rows(const ModelSpec& spec, const TrainShape& shape, const ParallelLayout& layout) {
  return layout.ep_size * shape.tokens() * std::min(spec.top_k, layout.experts_local(spec));
}

void validate(const ModelSpec& spec, const TrainShape& shape, const ParallelLayout& layout,
              const std::string& where) {
  constexpr int64_t kMaxSize = int64_t{1} << 24, kMaxStages = 4096;
  at_least_one("micro_batch_size", shape.micro_batch_size, kMaxSize, where);
  at_least_one("seq", shape.seq, kMaxSize, where);
  at_least_one("microbatches", shape.microbatches, kMaxSize, where);
  at_least_one("world_size", layout.world_size, kMaxSize, where);
  at_least_one("ep", layout.ep_size, kMaxSize, where);
  at_least_one("pp", layout.pp_size, kMaxStages, where);
  at_least_one("vpp", layout.virtual_per_rank, kMaxStages, where);
  check_groups(spec, layout, where);
  check_order(layout, where);
  check_stages(spec, layout, where);
  const double rows = static_cast<double>(layout.ep_size) * static_cast<double>(shape.tokens()) *
                      static_cast<double>(spec.top_k);
  if (rows > static_cast<double>(std::numeric_limits<int32_t>::max())) {
    throw InvalidInput(where, "micro_batch_size * seq", fmt::format("{}", shape.tokens()),
                       "at most 2^31 routed rows per expert-parallel group (tokens * ep * top_k)");
  }
}

void check_world_size(const ParallelLayout& layout, int64_t launched, const std::string& where) {
  if (layout.world_size == launched) return;
  throw InvalidInput(where, "world_size", fmt::format("{} launched ranks", launched),
                     fmt::format("{}, as the layout says", layout.world_size));
}

}  // namespace bagualu
