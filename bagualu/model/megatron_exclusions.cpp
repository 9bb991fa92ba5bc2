// Megatron's rules about its flags, from the words alone. Source: megatron/training/arguments.py
// (validate_args), megatron/core/transformer/transformer_config.py (__post_init__) and
// pipeline_parallel_layer_layout.py, 0.13 to main; the sentences are ours.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <span>
#include <string_view>

#include "bagualu/model/megatron_flags.h"

namespace bagualu {
namespace {

using Values = std::vector<std::string>;

/// The words as flags and values. Not the reader's class: the rules have to stand on their own.
class Given {
 public:
  explicit Given(const std::vector<std::string>& words) {
    std::string last;
    for (const std::string& word : words) {
      if (word.starts_with("--")) {
        last = word.substr(2);
        flags_[last].clear();
      } else if (!last.empty()) {
        flags_[last].push_back(word);
      }
    }
  }

  bool has(std::string_view flag) const { return flags_.find(flag) != flags_.end(); }
  std::string text(std::string_view flag, std::string fallback = "") const {
    const auto found = flags_.find(flag);
    return found == flags_.end() || found->second.empty() ? fallback : found->second.front();
  }
  int64_t number(std::string_view flag, int64_t fallback) const {
    const std::string word = text(flag);
    int64_t value = fallback;
    std::from_chars(word.data(), word.data() + word.size(), value);
    return value;
  }
  double real(std::string_view flag, double fallback) const {
    const std::string word = text(flag);
    double value = fallback;
    std::from_chars(word.data(), word.data() + word.size(), value);
    return value;
  }
  bool lists(std::string_view flag, std::string_view module) const {
    const auto found = flags_.find(flag);
    return found != flags_.end() &&
           std::find(found->second.begin(), found->second.end(), module) != found->second.end();
  }
  bool any_starts(std::string_view prefix) const {
    return std::any_of(flags_.begin(), flags_.end(), [&](const auto& flag) {
      return std::string_view(flag.first).starts_with(prefix);
    });
  }

  bool recomputes(std::string_view module) const { return lists("recompute-modules", module); }
  bool offloads(std::string_view module) const { return lists("offload-modules", module); }
  /// Of a group or a count that divides: at least 1.
  int64_t size(std::string_view flag) const { return std::max<int64_t>(number(flag, 1), 1); }
  int64_t tp() const { return size("tensor-model-parallel-size"); }
  int64_t pp() const { return size("pipeline-model-parallel-size"); }
  bool full() const { return text("recompute-granularity") == "full"; }
  bool selective() const { return text("recompute-granularity") == "selective"; }
  std::string dispatcher() const { return text("moe-token-dispatcher-type", "allgather"); }
  bool interleaved() const {
    return has("num-layers-per-virtual-pipeline-stage") ||
           number("num-virtual-stages-per-pipeline-rank", 1) > 1 || layout_stages() > pp();
  }

  /// The written layout with its x*n and (...)*n written out, as Megatron's two patterns do.
  std::string layout() const {
    std::string open = text("pipeline-model-parallel-layout");
    std::erase(open, ',');
    std::string flat;
    for (size_t at = 0; at < open.size();) {
      const size_t close = open[at] == '(' ? open.find(')', at) : std::string::npos;
      std::string piece =
          close == std::string::npos ? open.substr(at, 1) : open.substr(at + 1, close - at - 1);
      at = close == std::string::npos ? at + 1 : close + 1;
      int64_t times = 1;
      if (at < open.size() && open[at] == '*') {
        const char* begin = open.data() + at + 1;
        const auto parsed = std::from_chars(begin, open.data() + open.size(), times);
        at = static_cast<size_t>(parsed.ptr - open.data());
      }
      if (piece.find('*') != std::string::npos) piece = spelled(piece);
      for (int64_t i = 0; i < std::min<int64_t>(times, 4096); ++i) flat += piece;
    }
    return flat;
  }
  int64_t layout_stages() const {
    if (!has("pipeline-model-parallel-layout")) return 0;
    const std::string flat = layout();
    return 1 + std::count(flat.begin(), flat.end(), '|');
  }

 private:
  static std::string spelled(const std::string& piece) {
    std::string flat;
    for (size_t at = 0; at < piece.size(); ++at) {
      int64_t times = 1;
      const char symbol = piece[at];
      if (at + 1 < piece.size() && piece[at + 1] == '*') {
        const char* begin = piece.data() + at + 2;
        const auto parsed = std::from_chars(begin, piece.data() + piece.size(), times);
        at = static_cast<size_t>(parsed.ptr - piece.data()) - 1;
      }
      flat.append(static_cast<size_t>(std::clamp<int64_t>(times, 0, 4096)), symbol);
    }
    return flat;
  }

  std::map<std::string, Values, std::less<>> flags_;
};

struct Rule {
  const char* sentence;
  bool (*broken)(const Given&);
};

bool layout_counts_wrong(const Given& given) {
  if (!given.has("pipeline-model-parallel-layout")) return false;
  const std::string flat = given.layout();
  const auto count = [&](char symbol) { return std::count(flat.begin(), flat.end(), symbol); };
  return flat.empty() || count('E') != 1 || flat.front() != 'E' || count('L') != 1 ||
         flat.back() != 'L' || count('t') != given.number("num-layers", -1) ||
         count('m') != given.number("mtp-num-layers", 0) ||
         static_cast<size_t>(count('E') + count('L') + count('t') + count('m') + count('|')) !=
             flat.size();
}

bool layout_mtp_wrong(const Given& given) {
  if (!given.has("pipeline-model-parallel-layout")) return false;
  const std::string flat = given.layout();
  const size_t first = flat.find('m');
  if (first == std::string::npos) return false;
  const size_t last = flat.rfind('m');
  const auto behind = std::count(flat.begin() + static_cast<int64_t>(first), flat.end(), '|');
  return flat.find('t', first) != std::string::npos ||
         flat.substr(first, last - first).find('|') != std::string::npos || behind >= given.pp();
}

/// Layers that count when they are spread over pipeline ranks without a written layout.
bool layers_do_not_divide(const Given& given) {
  if (given.has("pipeline-model-parallel-layout") ||
      given.has("decoder-first-pipeline-num-layers") ||
      given.has("decoder-last-pipeline-num-layers")) {
    return false;
  }
  const int64_t layers = given.number("num-layers", 0) +
                         (given.has("account-for-embedding-in-pipeline-split") ? 1 : 0) +
                         (given.has("account-for-loss-in-pipeline-split") ? 1 : 0);
  if (layers % given.pp() != 0) return true;
  const int64_t of_rank = layers / given.pp();
  return of_rank % given.size("num-virtual-stages-per-pipeline-rank") != 0 ||
         of_rank % given.size("num-layers-per-virtual-pipeline-stage") != 0;
}

bool expert_overlap_wrong(const Given& given) {
  if (!given.has("overlap-moe-expert-parallel-comm")) return false;
  return given.number("expert-model-parallel-size", 1) <= 1 || given.dispatcher() == "allgather" ||
         (given.pp() > 1 && !given.interleaved()) || given.full() || given.recomputes("moe") ||
         given.has("moe-shared-expert-overlap") || !(given.has("bf16") || given.has("fp16")) ||
         given.number("mtp-num-layers", 0) > 1;
}

bool dtypes_need_aware(const Given& given) {
  const std::array<const char*, 4> dtypes = {"main-grads-dtype", "main-params-dtype",
                                             "exp-avg-dtype", "exp-avg-sq-dtype"};
  return !given.has("use-precision-aware-optimizer") &&
         std::any_of(dtypes.begin(), dtypes.end(),
                     [&](const char* dtype) { return given.text(dtype, "fp32") != "fp32"; });
}

bool unknown_offload(const Given& given) {
  if (!given.has("fine-grained-activation-offloading")) return false;
  const std::array<const char*, 8> known = {"core_attn",  "attn_proj",      "expert_fc1",
                                            "moe_act",    "attn_norm",      "mlp_norm",
                                            "qkv_linear", "fused_group_mlp"};
  return std::none_of(known.begin(), known.end(),
                      [&](const char* module) { return given.offloads(module); });
}

constexpr Rule kMemoryRules[] = {
    {"offloading attn_proj needs core_attn offloaded too",
     [](const Given& g) { return g.offloads("attn_proj") && !g.offloads("core_attn"); }},
    {"recomputing moe excludes offloading expert_fc1 and moe_act",
     [](const Given& g) {
       return g.recomputes("moe") && (g.offloads("expert_fc1") || g.offloads("moe_act"));
     }},
    {"FP8 with delayed scaling excludes recomputing moe_act and layernorm",
     [](const Given& g) {
       return g.has("fp8-format") && g.text("fp8-recipe", "delayed") == "delayed" &&
              (g.recomputes("moe_act") || g.recomputes("layernorm"));
     }},
    {"--cpu-offloading-num-layers needs one pipeline rank, no recomputation and no "
     "fine-grained offloading",
     [](const Given& g) {
       return g.number("cpu-offloading-num-layers", 0) > 0 &&
              (g.pp() > 1 || g.has("recompute-granularity") ||
               g.has("fine-grained-activation-offloading"));
     }},
    {"--activation-offload-fraction lies between 0 and 1",
     [](const Given& g) {
       const double fraction = g.real("activation-offload-fraction", 1);
       return fraction < 0 || fraction > 1;
     }},
    {"--offload-modules goes with --fine-grained-activation-offloading, which needs a module",
     [](const Given& g) {
       return (g.has("offload-modules") && !g.has("fine-grained-activation-offloading")) ||
              unknown_offload(g);
     }},
    {"full recomputation needs a method and a number of layers and excludes modules",
     [](const Given& g) {
       return g.full() && (!g.has("recompute-method") || !g.has("recompute-num-layers") ||
                           g.has("recompute-modules"));
     }},
    {"--recompute-method and --recompute-num-layers need full recomputation",
     [](const Given& g) {
       return !g.full() && (g.has("recompute-method") || g.has("recompute-num-layers"));
     }},
    {"--recompute-modules needs selective recomputation",
     [](const Given& g) { return g.has("recompute-modules") && !g.selective() && !g.full(); }},
    {"recomputing mla_up_proj needs --multi-latent-attention",
     [](const Given& g) {
       return g.recomputes("mla_up_proj") && !g.has("multi-latent-attention");
     }},
    {"recomputing moe_act needs --moe-grouped-gemm",
     [](const Given& g) { return g.recomputes("moe_act") && !g.has("moe-grouped-gemm"); }},
    {"--distribute-saved-activations needs full recomputation and tensor parallelism without "
     "--sequence-parallel",
     [](const Given& g) {
       return g.has("distribute-saved-activations") &&
              (!g.full() || g.tp() == 1 || g.has("sequence-parallel"));
     }},
    {"recomputing shared_experts excludes --moe-shared-expert-overlap", [](const Given& g) {
       return g.recomputes("shared_experts") && g.has("moe-shared-expert-overlap");
     }}};

constexpr Rule kParallelRules[] = {
    {"virtual stages need more than one pipeline rank",
     [](const Given& g) { return g.interleaved() && g.pp() == 1; }},
    {"at most one of --num-layers-per-virtual-pipeline-stage, "
     "--num-virtual-stages-per-pipeline-rank and --pipeline-model-parallel-layout",
     [](const Given& g) {
       return g.has("num-layers-per-virtual-pipeline-stage") +
                  g.has("num-virtual-stages-per-pipeline-rank") +
                  g.has("pipeline-model-parallel-layout") >
              1;
     }},
    {"a written layout excludes --decoder-first/last-pipeline-num-layers and "
     "--account-for-embedding/loss-in-pipeline-split",
     [](const Given& g) {
       return g.has("pipeline-model-parallel-layout") &&
              (g.any_starts("decoder-first-pipeline") || g.any_starts("decoder-last-pipeline") ||
               g.any_starts("account-for-"));
     }},
    {"a written layout begins with E, ends with L, has each once, and a t and m per layer",
     layout_counts_wrong},
    {"m in a written layout lies behind every t, in one of the last stages of the ranks",
     layout_mtp_wrong},
    {"stages of a written layout are a multiple of the pipeline ranks",
     [](const Given& g) { return g.layout_stages() % g.pp() != 0; }},
    {"layers divide over pipeline ranks and their virtual stages", layers_do_not_divide},
    {"--sequence-parallel needs tensor parallelism",
     [](const Given& g) { return g.has("sequence-parallel") && g.tp() == 1; }},
    {"experts with tensor parallelism need --sequence-parallel",
     [](const Given& g) {
       return g.has("num-experts") && g.tp() > 1 && !g.has("sequence-parallel");
     }},
    {"experts divide over --expert-model-parallel-size, which needs --num-experts",
     [](const Given& g) {
       const int64_t ep = g.size("expert-model-parallel-size");
       return ep > 1 && (!g.has("num-experts") || g.number("num-experts", 0) % ep != 0);
     }},
    {"experts with biases exclude expert tensor parallelism and a shared expert",
     [](const Given& g) {
       return g.has("num-experts") && !g.has("disable-bias-linear") &&
              (g.number("expert-tensor-parallel-size", g.tp()) > 1 ||
               g.has("moe-shared-expert-intermediate-size"));
     }},
    {"with context parallelism the sequence is a multiple of twice its size",
     [](const Given& g) {
       const int64_t cp = g.size("context-parallel-size");
       return cp > 1 && g.number("seq-length", 0) % (2 * cp) != 0;
     }},
    {"--overlap-param-gather needs a distributed optimizer and --overlap-grad-reduce",
     [](const Given& g) {
       return g.has("overlap-param-gather") &&
              (!g.has("use-distributed-optimizer") || !g.has("overlap-grad-reduce"));
     }},
    {"--tp-comm-overlap needs --sequence-parallel",
     [](const Given& g) { return g.has("tp-comm-overlap") && !g.has("sequence-parallel"); }},
    {"--no-overlap-p2p-communication with interleaving needs more than two pipeline ranks",
     [](const Given& g) {
       return g.has("no-overlap-p2p-communication") && g.interleaved() && g.pp() == 2;
     }},
    {"--overlap-moe-expert-parallel-comm needs expert parallelism, dispatcher alltoall or flex, "
     "virtual stages in a pipeline and 16 bits; excludes full and moe recomputation, "
     "--moe-shared-expert-overlap and more than one multi-token prediction layer",
     expert_overlap_wrong}};

constexpr Rule kOtherRules[] = {
    {"--moe-... flags need --num-experts",
     [](const Given& g) { return !g.has("num-experts") && g.any_starts("moe-"); }},
    {"--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor and excludes the "
     "DeepEP backend",
     [](const Given& g) {
       const bool deepep = g.has("moe-enable-deepep") ||
                           g.text("moe-flex-dispatcher-backend", "deepep") == "deepep";
       return g.has("moe-pad-expert-input-to-capacity") &&
              (!g.has("moe-expert-capacity-factor") || (g.dispatcher() == "flex" && deepep));
     }},
    {"--moe-enable-deepep needs dispatcher flex",
     [](const Given& g) { return g.has("moe-enable-deepep") && g.dispatcher() != "flex"; }},
    {"--moe-shared-expert-overlap needs dispatcher alltoall or flex",
     [](const Given& g) {
       return g.has("moe-shared-expert-overlap") && g.dispatcher() == "allgather";
     }},
    {"padding of the router needs --fp8-format and a dispatcher other than allgather",
     [](const Given& g) {
       return g.any_starts("moe-router-padding-for-") &&
              (!g.has("fp8-format") || g.dispatcher() == "allgather");
     }},
    {"--moe-router-enable-expert-bias needs sigmoid scores",
     [](const Given& g) {
       return g.has("moe-router-enable-expert-bias") &&
              g.text("moe-router-score-function", "softmax") == "softmax";
     }},
    {"one expert per token needs --moe-router-pre-softmax or sigmoid scores",
     [](const Given& g) {
       return g.has("num-experts") && g.number("moe-router-topk", 2) == 1 &&
              !g.has("moe-router-pre-softmax") &&
              g.text("moe-router-score-function", "softmax") == "softmax" &&
              g.text("moe-router-load-balancing-type") != "sinkhorn";
     }},
    {"--use-precision-aware-optimizer needs adam and a distributed optimizer",
     [](const Given& g) {
       return g.has("use-precision-aware-optimizer") &&
              (!g.has("use-distributed-optimizer") || g.text("optimizer", "adam") != "adam");
     }},
    {"dtypes of gradients, masters and moments other than fp32 need "
     "--use-precision-aware-optimizer",
     dtypes_need_aware},
    {"--fp8-param-gather needs --fp8-format and a distributed optimizer",
     [](const Given& g) {
       return g.has("fp8-param-gather") &&
              (!g.has("fp8-format") || !g.has("use-distributed-optimizer"));
     }},
    {"--bf16 excludes --fp16", [](const Given& g) { return g.has("bf16") && g.has("fp16"); }},
    {"--multi-latent-attention excludes --group-query-attention",
     [](const Given& g) {
       return g.has("multi-latent-attention") && g.has("group-query-attention");
     }},
    {"one of --swiglu, --quick-geglu and --squared-relu",
     [](const Given& g) {
       return g.has("swiglu") + g.has("quick-geglu") + g.has("squared-relu") > 1;
     }},
    {"positions are at least as many as the sequence is long",
     [](const Given& g) {
       return g.number("max-position-embeddings", 0) < g.number("seq-length", 0);
     }},
    {"multi-token prediction needs --position-embedding-type rope or none", [](const Given& g) {
       const std::string type = g.text("position-embedding-type", "learned_absolute");
       return g.number("mtp-num-layers", 0) > 0 && type != "rope" && type != "none";
     }}};

}  // namespace

std::vector<std::string> check_exclusions(const std::vector<std::string>& flags) {
  const Given given(flags);
  std::vector<std::string> broken;
  for (const std::span<const Rule> rules :
       {std::span<const Rule>(kMemoryRules), std::span<const Rule>(kParallelRules),
        std::span<const Rule>(kOtherRules)}) {
    for (const Rule& rule : rules) {
      if (rule.broken(given)) broken.emplace_back(rule.sentence);
    }
  }
  return broken;
}

}  // namespace bagualu
