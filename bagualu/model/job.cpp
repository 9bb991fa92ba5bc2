#include "bagualu/model/job.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 20;

struct KindName {
  PipelineKind kind;
  std::string_view name;
};
constexpr std::array<KindName, 8> kKinds = {{{PipelineKind::k1F1B, "1f1b"},
                                             {PipelineKind::kInterleaved, "interleaved"},
                                             {PipelineKind::kZbH1, "zb-h1"},
                                             {PipelineKind::kZbH2, "zb-h2"},
                                             {PipelineKind::kZbV, "zb-v"},
                                             {PipelineKind::kVHalf, "v-half"},
                                             {PipelineKind::kDualPipe, "dualpipe"},
                                             {PipelineKind::kDualPipeV, "dualpipe-v"}}};

int64_t parse_count(std::string_view text, const std::string& where, const std::string& field,
                    int64_t max = kMaxSize) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 1 || value > max) {
    throw InvalidInput(where, field, text.empty() ? "nothing" : std::string(text),
                       fmt::format("an integer from 1 to {}", max));
  }
  return value;
}

}  // namespace

std::string_view pipeline_kind_name(PipelineKind kind) {
  for (const KindName& entry : kKinds) {
    if (entry.kind == kind) return entry.name;
  }
  BGL_CHECK(false, static_cast<int>(kind));
  return {};
}

PipelineKind parse_pipeline_kind(std::string_view text, const std::string& where,
                                 const std::string& field) {
  std::string names;
  for (const KindName& entry : kKinds) {
    if (entry.name == text) return entry.kind;
    names += (names.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw InvalidInput(where, field, std::string(text), names);
}

bool is_v_shaped(PipelineKind kind) {
  return kind == PipelineKind::kZbV || kind == PipelineKind::kVHalf ||
         kind == PipelineKind::kDualPipeV;
}

int64_t virtual_stages_per_rank(PipelineKind kind, int64_t vpp) {
  return is_v_shaped(kind) ? 2 : vpp;
}

int64_t rank_of_stage(PipelineKind kind, int64_t pp, int64_t stage) {
  if (is_v_shaped(kind)) return stage < pp ? stage : 2 * pp - 1 - stage;
  return stage % pp;
}

int64_t Job::padded_vocab() const {
  const int64_t multiple = vocab_multiple * layout.tp;
  return (model.vocab + multiple - 1) / multiple * multiple;
}

std::vector<int64_t> Job::stages_of_rank(int64_t pp_rank) const {
  const auto count = static_cast<int64_t>(stages.size());
  if (is_v_shaped(pipeline)) return {pp_rank, 2 * layout.pp - 1 - pp_rank};
  std::vector<int64_t> held;
  held.reserve(static_cast<size_t>(count / layout.pp));
  for (int64_t stage = pp_rank; stage < count; stage += layout.pp) held.push_back(stage);
  return held;
}

JobLayout parse_layout(std::string_view text, const std::string& where, const std::string& field) {
  JobLayout layout;
  int64_t dp = 1;
  int64_t sp = -1;
  std::map<std::string, int64_t*, std::less<>> keys = {
      {"tp", &layout.tp}, {"cp", &layout.cp},   {"pp", &layout.pp}, {"vpp", &layout.vpp},
      {"ep", &layout.ep}, {"etp", &layout.etp}, {"dp", &dp},        {"sp", &sp}};
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, end - begin);
    const size_t equals = part.find('=');
    const std::string_view key = part.substr(0, equals);
    const auto found = keys.find(key);
    if (found == keys.end() || equals == std::string_view::npos) {
      throw InvalidInput(where, field, part.empty() ? "an empty part" : std::string(part),
                         "tp, cp, pp, vpp, ep, etp, dp or sp, each at most once, as tp=2,pp=4");
    }
    const std::string_view value = part.substr(equals + 1);
    const std::string named = fmt::format("{}, {}", field, key);
    if (key == "sp" && value != "0" && value != "1") {
      throw InvalidInput(where, named, value.empty() ? "nothing" : std::string(value), "0 or 1");
    }
    *found->second = value == "0" && key == "sp" ? 0 : parse_count(value, where, named);
    keys.erase(found);
    begin = end + 1;
  }
  layout.sequence_parallel = sp < 0 ? layout.tp > 1 : sp > 0;
  layout.world_size = layout.tp * layout.cp * layout.pp * dp;
  return layout;
}

std::string layout_text(const JobLayout& layout) {
  std::string text =
      fmt::format("tp={},cp={},pp={},vpp={},ep={},etp={},dp={}", layout.tp, layout.cp, layout.pp,
                  layout.vpp, layout.ep, layout.etp, layout.dp());
  if (layout.tp > 1 && !layout.sequence_parallel) text += ",sp=0";
  return text;
}

std::vector<StageContent> default_stages(const ModelSpec& model, int64_t pp, int64_t per_rank) {
  const int64_t count = pp * per_rank;
  const int64_t each = (model.layers + count - 1) / count;
  // The rest is missing from the last stage, then from the first, then from those behind it.
  int64_t missing = each * count - model.layers;
  std::vector<int64_t> layers(static_cast<size_t>(count), each);
  for (int64_t turn = 0; missing > 0; ++turn) {
    const int64_t place = turn % count;
    const int64_t at = place == 0 ? count - 1 : place - 1;
    if (layers[static_cast<size_t>(at)] == 0) continue;
    --layers[static_cast<size_t>(at)];
    --missing;
  }
  std::vector<StageContent> stages(static_cast<size_t>(count));
  int64_t first = 0;
  for (size_t s = 0; s < stages.size(); ++s) {
    stages[s].first_layer = first;
    stages[s].layer_count = layers[s];
    first += layers[s];
  }
  stages.front().embedding = true;
  stages.back().head = true;
  stages.back().mtp_layers = model.mtp_layers;
  return stages;
}

namespace {

/// Unfolds repeats: "Et*2|(tt|)*2L" to "Ett|tt|tt|L".
class LayoutUnfolder {
 public:
  LayoutUnfolder(std::string_view text, const std::string& where, const std::string& field)
      : text_(text), where_(where), field_(field) {}

  std::string unfold() {
    std::string all = sequence(0);
    if (at_ != text_.size()) fail("a layout with matching parentheses");
    return all;
  }

 private:
  static constexpr size_t kMaxSymbols = 1 << 16;

  std::string sequence(int depth) {
    std::string out;
    while (at_ < text_.size() && text_[at_] != ')') {
      std::string item;
      const char symbol = text_[at_++];
      if (symbol == '(') {
        if (depth > 8) fail("at most 8 levels of parentheses");
        item = sequence(depth + 1);
        if (at_ >= text_.size()) fail("a layout with matching parentheses");
        ++at_;
      } else if (symbol == 'E' || symbol == 't' || symbol == 'm' || symbol == 'L' ||
                 symbol == '|') {
        item = symbol;
      } else if (symbol == ',' || symbol == ' ') {
        continue;
      } else {
        fail("E, t, m, L, |, ( ), *n");
      }
      const int64_t times = repeats();
      if (item.size() * static_cast<size_t>(times) + out.size() > kMaxSymbols) {
        fail("at most 65536 symbols");
      }
      for (int64_t i = 0; i < times; ++i) out += item;
    }
    return out;
  }

  int64_t repeats() {
    if (at_ >= text_.size() || text_[at_] != '*') return 1;
    const size_t begin = ++at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    return parse_count(text_.substr(begin, at_ - begin), where_, field_, 4096);
  }

  [[noreturn]] void fail(const char* allowed) const {
    throw InvalidInput(where_, field_, std::string(text_), allowed);
  }

  std::string_view text_;
  const std::string& where_;
  const std::string& field_;
  size_t at_ = 0;
};

}  // namespace

std::vector<StageContent> parse_stages(std::string_view text, const ModelSpec& model,
                                       int64_t stages, const std::string& where,
                                       const std::string& field) {
  const std::string unfolded = LayoutUnfolder(text, where, field).unfold();
  std::vector<StageContent> made(1);
  int64_t layers = 0;
  int64_t mtp = 0;
  int64_t embeddings = 0;
  int64_t heads = 0;
  for (const char symbol : unfolded) {
    StageContent& stage = made.back();
    if (symbol == '|') {
      made.push_back({.first_layer = layers});
    } else if (symbol == 't') {
      ++stage.layer_count;
      ++layers;
    } else if (symbol == 'm') {
      ++stage.mtp_layers;
      ++mtp;
    } else if (symbol == 'E') {
      stage.embedding = ++embeddings > 0;
    } else {
      stage.head = ++heads > 0;
    }
  }
  const auto check = [&](bool ok, std::string found, std::string allowed) {
    if (!ok) throw InvalidInput(where, field, std::move(found), std::move(allowed));
  };
  check(static_cast<int64_t>(made.size()) == stages, fmt::format("{} stages", made.size()),
        fmt::format("{} stages (pp times the virtual stages of a rank)", stages));
  check(layers == model.layers, fmt::format("{} t", layers),
        fmt::format("{}, one per layer", model.layers));
  check(mtp == model.mtp_layers, fmt::format("{} m", mtp),
        fmt::format("{}, one per multi-token prediction layer", model.mtp_layers));
  check(embeddings == 1 && made.front().embedding, fmt::format("{} E", embeddings),
        "one E, in the first stage");
  check(heads == 1 && made.back().head, fmt::format("{} L", heads), "one L, in the last stage");
  return made;
}

int64_t count_stages(std::string_view text, const std::string& where, const std::string& field) {
  const std::string unfolded = LayoutUnfolder(text, where, field).unfold();
  return 1 + std::count(unfolded.begin(), unfolded.end(), '|');
}

std::string stages_text(const std::vector<StageContent>& stages) {
  const auto run = [](char symbol, int64_t count) {
    if (count == 0) return std::string();
    return count == 1 ? std::string(1, symbol) : fmt::format("{}*{}", symbol, count);
  };
  std::string text;
  for (const StageContent& stage : stages) {
    if (!text.empty()) text += '|';
    text += (stage.embedding ? "E" : "") + run('t', stage.layer_count) +
            run('m', stage.mtp_layers) + (stage.head ? "L" : "");
  }
  return text;
}

const std::vector<std::string>& recompute_module_names() {
  static const std::vector<std::string> names = {"core_attn", "layernorm",     "mla_up_proj",
                                                 "mlp",       "mlp_act",       "moe",
                                                 "moe_act",   "shared_experts"};
  return names;
}

const std::vector<std::string>& offload_module_names() {
  static const std::vector<std::string> names = {"attn_norm", "qkv_linear", "core_attn",
                                                 "attn_proj", "expert_fc1", "mlp_norm",
                                                 "moe_act",   "all"};
  return names;
}

std::vector<std::string> recompute_modules_of(const ModelSpec& model) {
  std::vector<std::string> names = {"core_attn", "layernorm"};
  if (model.has_mla()) names.emplace_back("mla_up_proj");
  if (model.moe_layers() < model.layers) names.insert(names.end(), {"mlp", "mlp_act"});
  if (model.has_moe()) names.insert(names.end(), {"moe", "moe_act"});
  if (model.shared_ffn > 0) names.emplace_back("shared_experts");
  return names;
}

std::vector<std::string> offload_modules_of(const ModelSpec& model) {
  std::vector<std::string> names = {"attn_norm", "qkv_linear", "core_attn", "attn_proj",
                                    "mlp_norm"};
  if (model.has_moe()) names.insert(names.end(), {"expert_fc1", "moe_act"});
  if (!model.has_moe()) names.emplace_back("all");
  return names;
}

namespace {

bool among(const std::vector<std::string>& list, const std::string& name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

std::string number(int64_t value) { return fmt::format("{}", value); }

// Note [Rules of a job]
// Each function returns the first rule that is broken, as a value: validate() throws it, a search
// passes on to the next job. Texts are made only where a rule is broken, since a search asks
// thousands of times a second.
using Fault = std::optional<JobFault>;

/// A name that is no module, or one that this model has not, would silently do nothing.
Fault modules_fault(const char* field, const std::vector<std::string>& modules,
                    const std::vector<std::string>& names,
                    const std::vector<std::string>& of_model) {
  for (size_t i = 0; i < modules.size(); ++i) {
    if (!among(names, modules[i])) {
      return {{field, modules[i], fmt::format("{}", fmt::join(names, ", "))}};
    }
    if (!among(of_model, modules[i])) {
      return {
          {field, modules[i], fmt::format("what this model has: {}", fmt::join(of_model, ", "))}};
    }
    const auto next = modules.begin() + static_cast<int64_t>(i) + 1;
    if (std::find(next, modules.end(), modules[i]) != modules.end()) {
      return {{field, modules[i] + " twice", "each module once"}};
    }
  }
  return {};
}

Fault model_split_fault(const ModelSpec& m, const JobLayout& l) {
  const auto tp = [&](std::string allowed) { return JobFault{"tp", number(l.tp), allowed}; };
  if (m.heads % l.tp != 0) return tp(fmt::format("a divisor of heads = {}", m.heads));
  if (!m.has_mla() && m.kv_heads % l.tp != 0 && l.tp % m.kv_heads != 0) {
    return tp(fmt::format("a divisor or a multiple of kv_heads = {}", m.kv_heads));
  }
  if (m.dense_ffn % l.tp != 0 || m.shared_ffn % l.tp != 0) {
    return tp("a divisor of dense_ffn and shared_ffn");
  }
  if (!m.has_moe()) {
    if (l.ep == 1 && l.etp == 1) return {};
    return {
        {"ep", fmt::format("ep * etp = {}", l.ep * l.etp), "1, since the model has no experts"}};
  }
  if (m.experts % l.ep != 0) {
    return {{"ep", number(l.ep), fmt::format("a divisor of experts = {}", m.experts)}};
  }
  if (m.expert_ffn % l.etp != 0) {
    return {{"etp", number(l.etp), fmt::format("a divisor of expert_ffn = {}", m.expert_ffn)}};
  }
  return {};
}

Fault layout_fault(const Job& job) {
  const JobLayout& l = job.layout;
  for (const auto& [field, value] :
       std::initializer_list<std::pair<const char*, int64_t>>{{"world_size", l.world_size},
                                                              {"tp", l.tp},
                                                              {"cp", l.cp},
                                                              {"pp", l.pp},
                                                              {"vpp", l.vpp},
                                                              {"ep", l.ep},
                                                              {"etp", l.etp}}) {
    if (value < 1 || value > kMaxSize) {
      return {{field, number(value), fmt::format("an integer from 1 to {}", kMaxSize)}};
    }
  }
  const int64_t model_ranks = l.tp * l.cp * l.pp;
  if (l.world_size % model_ranks != 0) {
    return {{"world_size", number(l.world_size),
             fmt::format("a multiple of tp * cp * pp = {}", model_ranks)}};
  }
  const int64_t of_stage = l.world_size / l.pp;
  if (of_stage % (l.ep * l.etp) != 0) {
    return {{"ep", fmt::format("ep * etp = {}", l.ep * l.etp),
             fmt::format("a divisor of the ranks of a stage, world_size / pp = {}", of_stage)}};
  }
  return model_split_fault(job.model, l);
}

Fault stages_fault(const Job& job) {
  const int64_t vpp = job.layout.vpp;
  const int64_t count = job.layout.pp * virtual_stages_per_rank(job.pipeline, vpp);
  if (static_cast<int64_t>(job.stages.size()) != count) {
    return {{"stages", fmt::format("{}", job.stages.size()),
             fmt::format("pp * {} = {}", count / job.layout.pp, count)}};
  }
  if (is_v_shaped(job.pipeline)) {
    if (vpp > 2) {
      return {{"vpp", number(vpp), "1 or 2, since the pipeline's order is V-shaped"}};
    }
  } else if (job.pipeline != PipelineKind::kInterleaved && vpp != 1) {
    return {{"vpp", number(vpp),
             fmt::format("1, since the pipeline's order is {}", pipeline_kind_name(job.pipeline))}};
  }
  int64_t layers = 0;
  for (const StageContent& stage : job.stages) {
    if (stage.first_layer != layers || stage.layer_count < 0) {
      return {{"stages", fmt::format("layer {}", stage.first_layer),
               fmt::format("layer {} next", layers)}};
    }
    layers += stage.layer_count;
    if (stage.layer_count + stage.mtp_layers == 0 && !stage.embedding && !stage.head) {
      return {{"stages", "an empty one",
               fmt::format("something in each: {} virtual stages of {} layers are too many",
                           job.stages.size(), job.model.layers)}};
    }
  }
  if (layers == job.model.layers) return {};
  return {{"stages", fmt::format("{} layers", layers), number(job.model.layers)}};
}

Fault batch_fault(const Job& job) {
  const JobLayout& l = job.layout;
  const auto outside = [](const char* field, int64_t value, int64_t max) {
    return JobFault{field, number(value), fmt::format("1 to {}", max)};
  };
  if (job.micro_batch_size < 1 || job.micro_batch_size > kMaxSize) {
    return outside("micro_batch_size", job.micro_batch_size, kMaxSize);
  }
  if (job.seq < 1 || job.seq > INT32_MAX) return outside("seq", job.seq, INT32_MAX);
  if (job.micro_batch_size * job.seq > INT32_MAX) {
    return {{"micro_batch_size", fmt::format("{} tokens", job.micro_batch_size * job.seq),
             "fewer than 2^31 tokens"}};
  }
  if (job.seq % (l.cp * (l.sequence_parallel ? l.tp : 1)) != 0) {
    return {{"seq", number(job.seq), "a multiple of cp, and of cp * tp with sequence parallelism"}};
  }
  if (job.microbatches < 1 || job.microbatches > kMaxSize) {
    return outside("microbatches", job.microbatches, kMaxSize);
  }
  if (job.pipeline == PipelineKind::kInterleaved && l.pp > 1 && job.microbatches % l.pp != 0) {
    return {{"microbatches", number(job.microbatches),
             fmt::format("a multiple of pp = {}, as interleaving needs", l.pp)}};
  }
  return {};
}

Fault settings_fault(const Job& job) {
  if (auto fault = modules_fault("recompute.modules", job.recompute.modules,
                                 recompute_module_names(), recompute_modules_of(job.model))) {
    return fault;
  }
  if (auto fault = modules_fault("offload.modules", job.offload.modules, offload_module_names(),
                                 offload_modules_of(job.model))) {
    return fault;
  }
  const double factor = job.moe.capacity_factor;
  const double least = job.model.has_moe() ? 1.0 / static_cast<double>(job.model.top_k) : 0;
  if (factor != 0 && !(factor >= least && factor <= 4096)) {
    return {{"moe.capacity_factor", fmt::format("{}", factor),
             fmt::format("0 (dropless), or {:.4g} (1 / top_k) to 4096", least)}};
  }
  if (job.moe.pad_to_capacity && factor == 0) {
    return {{"moe.pad_to_capacity", "true", "false, since moe.capacity_factor is 0"}};
  }
  if (!(job.offload.fraction >= 0 && job.offload.fraction <= 1)) {
    return {{"offload.fraction", fmt::format("{}", job.offload.fraction), "from 0 to 1"}};
  }
  return {};
}

}  // namespace

std::optional<JobFault> job_fault(const Job& job) {
  for (const auto& rules : {layout_fault, stages_fault, batch_fault, settings_fault}) {
    if (auto fault = rules(job)) return fault;
  }
  return {};
}

void validate(const Job& job, const std::string& where) {
  validate(job.model, where);
  if (const auto fault = job_fault(job)) {
    throw InvalidInput(where, fault->field, fault->found, fault->allowed);
  }
}

}  // namespace bagualu
