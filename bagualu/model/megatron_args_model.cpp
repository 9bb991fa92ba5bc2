// Flags of the model. Source: megatron/training/arguments.py (validate_args) and
// megatron/core/transformer/transformer_config.py of 0.13 to main.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "bagualu/model/megatron_args_parts.h"

namespace bagualu {
namespace {

constexpr size_t kMaxPattern = 4096;

/// expression: term + term ...; term: ( expression ) or [ numbers ], each times any numbers.
class PatternParser {
 public:
  PatternParser(const MegatronFlags& flags, std::string_view name)
      : flags_(flags), name_(name), text_(flags.text(name)) {
    std::erase(text_, ' ');
  }

  std::vector<int64_t> parse() {
    std::vector<int64_t> all = expression(0);
    if (at_ != text_.size()) fail();
    return all;
  }

 private:
  std::vector<int64_t> expression(int depth) {
    std::vector<int64_t> all = term(depth);
    while (take('+')) {
      const std::vector<int64_t> more = term(depth);
      all.insert(all.end(), more.begin(), more.end());
      if (all.size() > kMaxPattern) fail();
    }
    return all;
  }

  std::vector<int64_t> term(int depth) {
    std::vector<int64_t> item;
    if (take('(')) {
      if (depth > 16) fail();
      item = expression(depth + 1);
      if (!take(')')) fail();
    } else if (take('[')) {
      do {
        item.push_back(number());
      } while (take(',') && item.size() <= kMaxPattern);
      if (!take(']')) fail();
    } else {
      fail();
    }
    while (take('*')) {
      const auto times = static_cast<size_t>(number());
      if (times > kMaxPattern || times * item.size() > kMaxPattern) fail();
      const std::vector<int64_t> once = std::exchange(item, {});
      for (size_t i = 0; i < times; ++i) item.insert(item.end(), once.begin(), once.end());
    }
    return item;
  }

  int64_t number() {
    int64_t value = 0;
    const auto [end, error] =
        std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc{} || value < 0) fail();
    at_ = static_cast<size_t>(end - text_.data());
    return value;
  }

  bool take(char symbol) {
    if (at_ >= text_.size() || text_[at_] != symbol) return false;
    ++at_;
    return true;
  }

  [[noreturn]] void fail() const {
    flags_.fail(name_, flags_.as_given(name_),
                "a number or a list such as ([0]*3+[1]*58), at most 4096 entries");
  }

  const MegatronFlags& flags_;
  std::string_view name_;
  std::string text_;
  size_t at_ = 0;
};

/// "4": every fourth layer, where a list would say it of each.
bool is_frequency(const MegatronFlags& flags, std::string_view name) {
  return flags.text(name).find('[') == std::string::npos;
}

void read_sizes(const MegatronFlags& flags, ModelSpec* model) {
  model->family = "megatron";
  for (const char* pattern : {"hybrid-layer-pattern", "hybrid-override-pattern"}) {
    if (flags.has(pattern) && !flags.has("num-layers")) {
      flags.contradiction(pattern, "--num-layers of a transformer: hybrids are not modelled");
    }
  }
  model->layers = flags.count("num-layers", 1, kMaxPattern);
  model->hidden = flags.count("hidden-size");
  model->heads = flags.count("num-attention-heads");
  model->gated_mlp = flags.on("swiglu") || flags.on("quick-geglu");
  if (model->gated_mlp && flags.on("squared-relu")) {
    flags.contradiction("squared-relu", "one of --swiglu, --quick-geglu and --squared-relu");
  }
  if (flags.on("swiglu") && flags.on("quick-geglu")) {
    flags.contradiction("quick-geglu", "one of --swiglu, --quick-geglu and --squared-relu");
  }
  const bool rms =
      flags.choice_or("normalization", "LayerNorm", {"LayerNorm", "RMSNorm"}) == "RMSNorm";
  model->layer_norm = !rms;
  model->rms_eps = flags.number_or("norm-epsilon", 1e-5, 0, 1);
  model->rope_theta = flags.number_or("rotary-base", 10000, 0, 1e12);
  model->dropout = flags.number_or("hidden-dropout", 0.1, 0, 1);
  model->tied_embeddings = !flags.on("untie-embeddings-and-output-weights");
  const bool bias = !flags.on("disable-bias-linear");
  model->attn_out_bias = bias;
  model->mlp_bias = bias;
  model->qkv_bias = bias || flags.on("add-qkv-bias");
  model->mtp_layers = flags.count_or("mtp-num-layers", 0, 0, 16);
}

void read_grouped_attention(const MegatronFlags& flags, ModelSpec* model) {
  const bool grouped = flags.on("group-query-attention");
  if (!grouped && flags.has("num-query-groups") &&
      flags.count("num-query-groups") != model->heads) {
    flags.contradiction("num-query-groups", "only beside --group-query-attention");
  }
  model->kv_heads = grouped ? flags.count("num-query-groups") : model->heads;
  if (!flags.has("kv-channels") && model->hidden % model->heads != 0) {
    flags.fail("hidden-size", fmt::format("{}", model->hidden),
               fmt::format("a multiple of --num-attention-heads {}, or --kv-channels beside it",
                           model->heads));
  }
  model->head_dim = flags.count_or("kv-channels", model->hidden / model->heads);
  model->qk_norm_weightless = flags.on("qk-l2-norm");
  model->qk_norm = flags.on("qk-layernorm") || model->qk_norm_weightless;
}

void read_latent_attention(MegatronFlags* flags, ModelSpec* model) {
  if (flags->on("group-query-attention")) {
    flags->contradiction("group-query-attention", "not beside --multi-latent-attention");
  }
  model->kv_heads = model->heads;
  model->q_lora_rank = flags->count_or("q-lora-rank", 0);
  model->kv_lora_rank = flags->count_or("kv-lora-rank", 32);
  model->qk_nope_head_dim = flags->count_or("qk-head-dim", 128);
  model->qk_rope_head_dim = flags->count_or("qk-pos-emb-head-dim", 64);
  model->v_head_dim = flags->count_or("v-head-dim", 128);
  model->head_dim = model->qk_nope_head_dim + model->qk_rope_head_dim;
  // Biases of the projections to and from the latents do not exist.
  model->qkv_bias = false;
  if (!flags->on("qk-layernorm")) {
    flags->unmodelled("--multi-latent-attention without --qk-layernorm (latents without a norm)");
  }
  flags->unmodelled_if("qk-l2-norm", true);
}

void read_attention(MegatronFlags* flags, ModelSpec* model) {
  if (flags->on("multi-latent-attention")) {
    read_latent_attention(flags, model);
  } else {
    for (const char* name :
         {"q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"}) {
      if (flags->has(name)) flags->contradiction(name, "only beside --multi-latent-attention");
    }
    read_grouped_attention(*flags, model);
  }
  const std::string softmax =
      flags->choice_or("softmax-type", "vanilla", {"vanilla", "off-by-one", "learnable"});
  model->attn_sinks = softmax == "learnable";
  if (!flags->has("window-size")) return;
  const std::vector<std::string> window = flags->list("window-size");
  std::string left = window.size() == 2 ? window.front() : "";
  std::erase(left, '(');
  int64_t tokens = 0;
  const auto [end, error] = std::from_chars(left.data(), left.data() + left.size(), tokens);
  if (left.empty() || error != std::errc{} || end != left.data() + left.size() || tokens < 0 ||
      tokens >= INT32_MAX) {
    flags->fail("window-size", flags->as_given("window-size"), "two numbers, as 127,0");
  }
  model->attention_window = tokens + 1;  // a token also attends to itself
  model->windowed_layer.assign(static_cast<size_t>(model->layers), 1);
  if (!flags->has("window-attn-skip-freq")) return;
  const std::vector<int64_t> pattern = megatron_pattern(*flags, "window-attn-skip-freq");
  const bool every = is_frequency(*flags, "window-attn-skip-freq");
  if (!every && static_cast<int64_t>(pattern.size()) != model->layers) {
    flags->fail("window-attn-skip-freq", fmt::format("{} entries", pattern.size()),
                fmt::format("{}, one per layer", model->layers));
  }
  for (size_t i = 0; i < model->windowed_layer.size(); ++i) {
    const int64_t windowed = every ? (static_cast<int64_t>(i) + 1) % pattern.front() : pattern[i];
    model->windowed_layer[i] = windowed != 0 ? 1 : 0;
  }
}

void read_positions(MegatronFlags* flags, ModelSpec* model) {
  std::string type =
      flags->choice_or("position-embedding-type", "learned_absolute",
                       {"learned_absolute", "rope", "yarn", "mrope", "relative", "none"});
  if (flags->on("use-rotary-position-embeddings")) type = "rope";
  if (flags->on("no-position-embedding") && type != "rope") {
    flags->contradiction("no-position-embedding", "--position-embedding-type none in its place");
  }
  const int64_t positions = flags->count("max-position-embeddings");
  if (type == "learned_absolute") model->learned_positions = positions;
  flags->unmodelled_if("position-embedding-type", type == "relative");
  if (model->mtp_layers > 0 && type != "rope" && type != "none") {
    flags->fail("mtp-num-layers", fmt::format("{}", model->mtp_layers),
                "0, or --position-embedding-type rope or none beside it");
  }
  const bool seq_named = flags->has("seq-length");
  const int64_t seq = flags->count(seq_named ? "seq-length" : "encoder-seq-length");
  if (positions < seq) {
    flags->fail("max-position-embeddings", fmt::format("{}", positions),
                fmt::format("at least --seq-length {}", seq));
  }
}

void read_experts(MegatronFlags* flags, ModelSpec* model) {
  model->experts = flags->count_or("num-experts", 0, 0);
  const int64_t wide = 4 * model->hidden;
  const int64_t fallback = flags->on("swiglu") ? wide * 2 / 3 / 64 * 64 : wide;
  const int64_t ffn = flags->count_or("ffn-hidden-size", fallback);
  model->moe_layer.assign(static_cast<size_t>(model->layers), model->has_moe() ? 1 : 0);
  if (!model->has_moe()) {
    for (const std::string& name : flags->names()) {
      if (name.starts_with("moe-")) flags->contradiction(name, "only beside --num-experts");
    }
    model->dense_ffn = ffn;
    return;
  }
  if (flags->has("moe-layer-freq")) {
    const std::vector<int64_t> pattern = megatron_pattern(*flags, "moe-layer-freq");
    const bool every = is_frequency(*flags, "moe-layer-freq");
    if (!every && static_cast<int64_t>(pattern.size()) != model->layers) {
      flags->fail("moe-layer-freq", fmt::format("{} entries", pattern.size()),
                  fmt::format("{}, one per layer", model->layers));
    }
    for (size_t i = 0; i < model->moe_layer.size(); ++i) {
      const bool moe = every ? static_cast<int64_t>(i) % pattern.front() == 0 : pattern[i] != 0;
      model->moe_layer[i] = moe ? 1 : 0;
    }
  }
  if (model->moe_layers() < model->layers) model->dense_ffn = ffn;
  model->top_k = flags->count_or("moe-router-topk", 2);
  model->expert_ffn = flags->count_or("moe-ffn-hidden-size", ffn);
  model->shared_ffn = flags->count_or("moe-shared-expert-intermediate-size", 0);
  model->shared_gate = flags->on("moe-shared-expert-gate");
  if (model->shared_ffn > 0 && model->mlp_bias) {
    flags->contradiction("moe-shared-expert-intermediate-size", "only with --disable-bias-linear");
  }
}

/// What the router computes with; bytes do not depend on it.
void read_router(MegatronFlags* flags, ModelSpec* model) {
  if (!model->has_moe()) return;
  const std::string score = flags->choice_or("moe-router-score-function", "softmax",
                                             {"softmax", "sigmoid", "sqrtsoftplus"});
  const bool pre_softmax = flags->on("moe-router-pre-softmax");
  model->norm_topk_prob = score != "softmax" || !pre_softmax;
  const std::vector<std::string> kinds = flags->list("moe-router-load-balancing-type");
  const std::vector<std::string> coefficients = flags->list("moe-aux-loss-coeff");
  const bool sinkhorn = kinds.size() == 1 && kinds.front() == "sinkhorn";
  if (model->top_k == 1 && score == "softmax" && !pre_softmax && !sinkhorn) {
    flags->fail("moe-router-topk", "1", "2 or more, or --moe-router-pre-softmax beside it");
  }
  for (const std::string& kind : kinds) {
    const std::vector<std::string> known = {"aux_loss", "seq_aux_loss", "global_aux_loss",
                                            "sinkhorn", "none",         "quantile_balancing"};
    if (std::find(known.begin(), known.end(), kind) == known.end()) {
      flags->fail("moe-router-load-balancing-type", kind,
                  "aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, quantile_balancing, none");
    }
  }
  if (kinds.size() > 1 && kinds.size() != coefficients.size()) {
    flags->contradiction("moe-aux-loss-coeff", "one per --moe-router-load-balancing-type");
  }
  if (coefficients.size() == 1) {
    const bool loss = kinds.empty() || kinds.front().ends_with("aux_loss");
    const double coefficient = flags->number_or("moe-aux-loss-coeff", 0, 0, 1e6);
    model->aux_loss_coef = loss ? coefficient : 0;
  }
  model->z_loss_coef = flags->number_or("moe-z-loss-coeff", 0, 0, 1e6);
  const bool bias = flags->on("moe-router-enable-expert-bias");
  if (bias && score == "softmax") {
    flags->contradiction("moe-router-enable-expert-bias",
                         "only with --moe-router-score-function sigmoid or sqrtsoftplus");
  }
  const double rate = flags->number_or("moe-router-bias-update-rate", 1e-3, 0, 1e6);
  model->router_bias_rate = bias ? rate : 0;
}

void read_vocabulary(const MegatronOptions& options, MegatronFlags* flags, Job* job) {
  const int64_t multiple = flags->count_or("make-vocab-size-divisible-by", 128, 1, 1 << 24);
  const bool unpadded = flags->on("no-pad-vocab-size") || flags->on("disable-pad-vocab-size");
  job->vocab_multiple = unpadded || flags->has("padded-vocab-size") ? 1 : multiple;
  if (flags->has("padded-vocab-size")) {
    job->model.vocab = flags->count("padded-vocab-size", 2);
  } else if (options.vocab > 0) {
    job->model.vocab = options.vocab;
  } else if (flags->has("vocab-size")) {
    job->model.vocab = flags->count("vocab-size", 2);
  } else {
    flags->fail("vocab-size", "nothing",
                "the number of tokens of the tokenizer, here or given beside the file");
  }
}

}  // namespace

std::vector<int64_t> megatron_pattern(const MegatronFlags& flags, std::string_view name) {
  if (is_frequency(flags, name)) return {flags.count(name, 1, kMaxPattern)};
  return PatternParser(flags, name).parse();
}

void read_megatron_model(const MegatronOptions& options, MegatronFlags* flags, Job* job) {
  ModelSpec& model = job->model;
  read_sizes(*flags, &model);
  read_attention(flags, &model);
  read_positions(flags, &model);
  read_experts(flags, &model);
  read_router(flags, &model);
  read_vocabulary(options, flags, job);
  job->seq =
      flags->count(flags->has("seq-length") ? "seq-length" : "encoder-seq-length", 1, INT32_MAX);
}

}  // namespace bagualu
