// Parallel sizes, stages and batches. Source: megatron/training/arguments.py (validate_args),
// megatron/core/transformer/transformer_block.py (get_num_layers_to_build).

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "bagualu/model/megatron_args_parts.h"

namespace bagualu {
namespace {

/// Layers of the first and last pipeline rank where they differ from the others.
struct Uneven {
  int64_t first = -1;  ///< -1: as the others
  int64_t last = -1;
  bool embedding_counts = false;  ///< the embedding takes the place of a layer
  bool loss_counts = false;
};

Uneven read_uneven(const MegatronFlags& flags) {
  Uneven uneven;
  uneven.first = flags.count_or("decoder-first-pipeline-num-layers", -1);
  uneven.last = flags.count_or("decoder-last-pipeline-num-layers", -1);
  uneven.embedding_counts = flags.on("account-for-embedding-in-pipeline-split");
  uneven.loss_counts = flags.on("account-for-loss-in-pipeline-split");
  if ((uneven.first >= 0 || uneven.last >= 0) && (uneven.embedding_counts || uneven.loss_counts)) {
    flags.contradiction(uneven.embedding_counts ? "account-for-embedding-in-pipeline-split"
                                                : "account-for-loss-in-pipeline-split",
                        "not beside --decoder-first-pipeline-num-layers or "
                        "--decoder-last-pipeline-num-layers");
  }
  return uneven;
}

/// Layers of a pipeline rank, those that stand for embedding and loss counted.
std::vector<int64_t> layers_of_ranks(const MegatronFlags& flags, const Uneven& uneven,
                                     int64_t layers, int64_t pp) {
  int64_t left = layers + (uneven.embedding_counts ? 1 : 0) + (uneven.loss_counts ? 1 : 0);
  int64_t ranks = pp;
  if (pp == 1) return {left};
  for (const int64_t given : {uneven.first, uneven.last}) {
    if (given < 0) continue;
    left -= given;
    --ranks;
  }
  if (left < 0 || (ranks == 0) != (left == 0) || (ranks > 0 && left % ranks != 0)) {
    flags.fail("num-layers", fmt::format("{}", layers),
               fmt::format("layers that divide over --pipeline-model-parallel-size {} ({} over {} "
                           "ranks here), or --pipeline-model-parallel-layout beside it",
                           pp, left, ranks));
  }
  std::vector<int64_t> of_rank(static_cast<size_t>(pp), ranks > 0 ? left / ranks : 0);
  if (uneven.first >= 0) of_rank.front() = uneven.first;
  if (uneven.last >= 0) of_rank.back() = uneven.last;
  return of_rank;
}

/// Virtual stages of a rank; at most one of the flags that say it.
int64_t read_vpp(const MegatronFlags& flags, const Uneven& uneven,
                 const std::vector<int64_t>& of_rank) {
  if (flags.has("num-virtual-stages-per-pipeline-rank")) {
    if (flags.has("num-layers-per-virtual-pipeline-stage")) {
      flags.contradiction("num-layers-per-virtual-pipeline-stage",
                          "not beside --num-virtual-stages-per-pipeline-rank");
    }
    return flags.count("num-virtual-stages-per-pipeline-rank", 1, 4096);
  }
  if (!flags.has("num-layers-per-virtual-pipeline-stage")) return 1;
  if (uneven.first >= 0 || uneven.last >= 0) {
    flags.contradiction(
        "num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank in its place beside "
        "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers");
  }
  const int64_t each = flags.count("num-layers-per-virtual-pipeline-stage", 1, 4096);
  if (of_rank.front() % each != 0) {
    flags.fail("num-layers-per-virtual-pipeline-stage", fmt::format("{}", each),
               fmt::format("a divisor of the {} layers of a pipeline rank", of_rank.front()));
  }
  return of_rank.front() / each;
}

std::vector<StageContent> spread(const MegatronFlags& flags, const Uneven& uneven,
                                 const std::vector<int64_t>& of_rank, int64_t vpp,
                                 const ModelSpec& model) {
  std::vector<StageContent> stages;
  const size_t count = of_rank.size() * static_cast<size_t>(vpp);
  for (size_t s = 0; s < count; ++s) {
    const int64_t held = of_rank[s % of_rank.size()];
    if (held % vpp != 0) {
      flags.fail("num-virtual-stages-per-pipeline-rank", fmt::format("{}", vpp),
                 fmt::format("a divisor of the {} layers of a pipeline rank", held));
    }
    StageContent stage;
    stage.layer_count = held / vpp;
    if (s == 0 && uneven.embedding_counts) --stage.layer_count;
    if (s + 1 == count && uneven.loss_counts) --stage.layer_count;
    if (stage.layer_count < 0) {
      flags.fail("num-layers", fmt::format("{}", model.layers), "a layer for each stage at least");
    }
    stages.push_back(stage);
  }
  int64_t first = 0;
  for (StageContent& stage : stages) {
    stage.first_layer = first;
    first += stage.layer_count;
  }
  stages.front().embedding = true;
  stages.back().head = true;
  stages.back().mtp_layers = model.mtp_layers;
  return stages;
}

void read_stages(const MegatronFlags& flags, Job* job) {
  JobLayout& layout = job->layout;
  const Uneven uneven = read_uneven(flags);
  const char* written = "pipeline-model-parallel-layout";
  if (flags.has(written)) {
    for (const char* other :
         {"num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
          "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
          "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"}) {
      if (flags.has(other)) {
        flags.contradiction(other, "not beside --pipeline-model-parallel-layout");
      }
    }
    std::string text = flags.text(written);
    std::erase_if(text, [](char symbol) { return symbol == '"' || symbol == '\''; });
    if (text.find('t', std::min(text.find('m'), text.size())) != std::string::npos) {
      flags.fail(written, flags.text(written), "every m behind the last t");
    }
    const int64_t stages = count_stages(text, flags.where(), "--pipeline-model-parallel-layout");
    if (stages % layout.pp != 0) {
      flags.fail(written, fmt::format("{} stages", stages),
                 fmt::format("a multiple of --pipeline-model-parallel-size {}", layout.pp));
    }
    layout.vpp = stages / layout.pp;
    job->stages =
        parse_stages(text, job->model, stages, flags.where(), "--pipeline-model-parallel-layout");
  } else {
    const std::vector<int64_t> of_rank =
        layers_of_ranks(flags, uneven, job->model.layers, layout.pp);
    layout.vpp = read_vpp(flags, uneven, of_rank);
    job->stages = spread(flags, uneven, of_rank, layout.vpp, job->model);
  }
  if (layout.vpp > 1 && layout.pp == 1) {
    flags.fail("pipeline-model-parallel-size", "1",
               fmt::format("2 or more, since a rank has {} virtual stages", layout.vpp));
  }
  job->pipeline = layout.vpp > 1 ? PipelineKind::kInterleaved : PipelineKind::k1F1B;
}

void read_sizes(const MegatronOptions& options, int64_t world_size, MegatronFlags* flags,
                Job* job) {
  JobLayout& layout = job->layout;
  layout.tp = flags->count_or("tensor-model-parallel-size", 1, 1, 1 << 20);
  layout.pp = flags->count_or("pipeline-model-parallel-size", 1, 1, 4096);
  layout.cp = flags->count_or("context-parallel-size", 1, 1, 1 << 20);
  layout.ep = flags->count_or("expert-model-parallel-size", 1, 1, 1 << 20);
  layout.etp = flags->count_or("expert-tensor-parallel-size", layout.tp, 1, 1 << 20);
  if (!job->model.has_moe()) {
    if (layout.ep > 1) flags->contradiction("expert-model-parallel-size", "beside --num-experts");
    layout.etp = 1;  // says nothing without experts
  }
  layout.world_size = options.world_size > 0 ? options.world_size : world_size;
  if (layout.world_size == 0) {
    flags->fail("world_size", "nothing",
                "the number of ranks: --nnodes and --nproc_per_node of a launch command in the "
                "file, or given beside it");
  }
  const int64_t of_model = layout.tp * layout.pp * layout.cp;
  if (layout.world_size % of_model != 0) {
    flags->fail(
        "world_size", fmt::format("{}", layout.world_size),
        fmt::format("a multiple of tensor, pipeline and context parallel sizes, {}", of_model));
  }
  if (layout.cp > 1 && job->seq % (2 * layout.cp) != 0) {
    flags->fail("seq-length", fmt::format("{}", job->seq),
                fmt::format("a multiple of twice --context-parallel-size {}", layout.cp));
  }
  layout.sequence_parallel = flags->on("sequence-parallel") && layout.tp > 1;
  if (flags->on("sequence-parallel") && layout.tp == 1) {
    flags->ignored("--sequence-parallel (off, as tensor-model-parallel-size is 1)");
  }
  if (job->model.has_moe() && layout.tp > 1 && !layout.sequence_parallel) {
    flags->fail("sequence-parallel", "nothing",
                "the flag: Megatron trains experts with tensor parallelism only beside it");
  }
  if (job->model.has_moe() && job->model.mlp_bias && layout.etp > 1) {
    flags->fail("expert-tensor-parallel-size", fmt::format("{}", layout.etp),
                "1, or --disable-bias-linear beside it");
  }
}

void read_batches(const MegatronFlags& flags, Job* job) {
  job->micro_batch_size = flags.count("micro-batch-size", 1, 1 << 20);
  const int64_t of_step = job->micro_batch_size * job->layout.dp();
  const int64_t global = flags.count_or("global-batch-size", of_step);
  if (global % of_step != 0) {
    flags.fail("global-batch-size", fmt::format("{}", global),
               fmt::format("a multiple of micro-batch size times data parallel size, {}", of_step));
  }
  job->microbatches = global / of_step;
}

}  // namespace

std::vector<StageContent> even_megatron_stages(const ModelSpec& model, int64_t pp, int64_t vpp) {
  if (model.layers % (pp * vpp) != 0) return {};
  const std::vector<int64_t> of_rank(static_cast<size_t>(pp), model.layers / pp);
  const MegatronFlags none({}, "");
  return spread(none, {}, of_rank, vpp, model);
}

void read_megatron_layout(const MegatronOptions& options, int64_t world_size, MegatronFlags* flags,
                          Job* job) {
  read_sizes(options, world_size, flags, job);
  read_stages(*flags, job);
  read_batches(*flags, job);
  const char* group = "microbatch-group-size-per-virtual-pipeline-stage";
  flags->unmodelled_if(
      group, flags->has(group) && job->layout.vpp > 1 && flags->count(group) != job->layout.pp);
}

}  // namespace bagualu
