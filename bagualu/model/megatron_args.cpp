#include "bagualu/model/megatron_args.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <iterator>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/megatron_args_parts.h"
#include "bagualu/model/megatron_flag_set.h"
#include "bagualu/model/megatron_known.h"
#include "bagualu/model/shell_script.h"
#include "bagualu/model/shell_words.h"

namespace bagualu {
namespace {

constexpr size_t kMaxFile = size_t{1} << 20;
using Words = std::vector<std::string>;

/// A launch command cut at its script.
struct Launch {
  Words launcher;   ///< torchrun and its arguments
  Words arguments;  ///< what follows the script
};

/// sh -c "torchrun pretrain_gpt.py ..." has its command in one word.
Words unfold_quoted(const Words& words, const std::string& where) {
  Words all;
  for (const std::string& word : words) {
    if (word.find(".py ") == std::string::npos) {
      all.push_back(word);
      continue;
    }
    ShellVariables none({});
    ShellExpander expander(&none, where);
    for (const ShellToken& token : shell_tokens(word, where)) {
      if (token.kind == ShellToken::Kind::kOperator && !all.empty() && token.text != "(") {
        // What stands before the first && starts nothing; what stands behind the script ends it.
        const bool started = std::any_of(all.begin(), all.end(), [](const std::string& piece) {
          return piece.ends_with(".py");
        });
        if (started) return all;
        all.clear();
      } else if (token.kind == ShellToken::Kind::kWord) {
        const Words pieces = expander.fields(token.text);
        all.insert(all.end(), pieces.begin(), pieces.end());
      }
    }
  }
  return all;
}

bool is_flag(const std::string& word) { return word.starts_with("--"); }

bool cut_at_script(const Words& words, Launch* launch) {
  const auto script = std::find_if(words.begin(), words.end(), [](const std::string& word) {
    return word.ends_with(".py") && !is_flag(word);
  });
  if (script == words.end()) return false;
  launch->launcher.assign(words.begin(), script);
  launch->arguments.assign(script + 1, words.end());
  return std::any_of(launch->arguments.begin(), launch->arguments.end(), is_flag);
}

void refuse_doubtful(const ShellCommand& command, const std::string& where) {
  if (command.doubtful.empty()) return;
  throw InvalidInput(where, fmt::format("line {}", command.line),
                     fmt::format("${{{}}}, set at line {} under a condition or in a loop that "
                                 "cannot be known here",
                                 command.doubtful, command.doubtful_line),
                     "variables set without one, or given beside the file");
}

/// The command that starts a script with --num-layers, else the last that starts one; else lines
/// that are arguments themselves; else every list of arguments that the file keeps in a variable.
Launch find_launch(const ShellResult& script, const std::string& where) {
  Launch chosen;
  const ShellCommand* of = nullptr;
  bool complete = false;
  Words plain;
  for (const ShellCommand& command : script.commands) {
    if (is_flag(command.words.front())) {
      refuse_doubtful(command, where);
      plain.insert(plain.end(), command.words.begin(), command.words.end());
    }
    Launch launch;
    if (complete || !cut_at_script(unfold_quoted(command.words, where), &launch)) continue;
    complete = std::find(launch.arguments.begin(), launch.arguments.end(), "--num-layers") !=
               launch.arguments.end();
    chosen = std::move(launch);
    of = &command;
  }
  if (of != nullptr) {
    refuse_doubtful(*of, where);
    return chosen;
  }
  chosen.arguments = std::move(plain);
  if (chosen.arguments.empty()) {
    for (const ShellList& list : script.variables) {
      if (list.words.empty() || !is_flag(list.words.front())) continue;
      chosen.arguments.insert(chosen.arguments.end(), list.words.begin(), list.words.end());
    }
  }
  if (chosen.arguments.empty()) {
    throw InvalidInput(where, "arguments", "none",
                       "a command that starts a .py file with Megatron's arguments, a list of "
                       "arguments, or variables that hold such lists");
  }
  return chosen;
}

/// nnodes times nproc_per_node; 0 if the command says neither.
int64_t launched_ranks(const std::vector<MegatronArgument>& arguments, const std::string& where) {
  int64_t nodes = 0;
  int64_t processes = 0;
  for (const MegatronArgument& argument : arguments) {
    std::string name = argument.name;
    std::replace(name.begin(), name.end(), '-', '_');
    int64_t* const target = name == "nnodes"           ? &nodes
                            : name == "nproc_per_node" ? &processes
                                                       : nullptr;
    if (target == nullptr || argument.values.empty()) continue;
    const std::string& word = argument.values.front();
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *target);
    if (error != std::errc{} || end != word.data() + word.size() || *target < 1 ||
        *target > 1 << 20) {
      throw InvalidInput(where, "--" + argument.name, word.substr(0, 40),
                         "an integer from 1 to 1048576, or the number of ranks given beside the "
                         "file");
    }
  }
  if (nodes == 0 && processes == 0) return 0;
  return std::max<int64_t>(nodes, 1) * std::max<int64_t>(processes, 1);
}

MegatronJob job_of(const std::vector<MegatronArgument>& arguments, int64_t world_size,
                   const std::string& where, const MegatronOptions& options) {
  MegatronFlags flags(arguments, where);
  MegatronJob result;
  read_megatron_model(options, &flags, &result.job);
  validate(result.job.model, where);
  read_megatron_layout(options, world_size, &flags, &result.job);
  read_megatron_settings(&flags, &result.job);
  validate(result.job, where);
  flags.finish(&result);
  return result;
}

/// "--num-layers" and "num_layers" to "num-layers".
std::string name_of_key(std::string key) {
  if (key.starts_with("--")) key.erase(0, 2);
  if (known_megatron_flag(key).kind == MegatronFlagKind::kUnknown) {
    std::replace(key.begin(), key.end(), '_', '-');
  }
  return key;
}

/// Settings that maps name as Megatron keeps them, where the flag switches them off.
struct Setting {
  std::string_view name;
  std::string_view flag;
};
constexpr std::array<Setting, 9> kSettings = {
    {{"overlap-p2p-comm", "no-overlap-p2p-communication"},
     {"add-bias-linear", "disable-bias-linear"},
     {"gradient-accumulation-fusion", "no-gradient-accumulation-fusion"},
     {"apply-rope-fusion", "no-rope-fusion"},
     {"masked-softmax-fusion", "no-masked-softmax-fusion"},
     {"bias-gelu-fusion", "no-bias-gelu-fusion"},
     {"bias-swiglu-fusion", "no-bias-swiglu-fusion"},
     {"bias-dropout-fusion", "no-bias-dropout-fusion"},
     {"add-position-embedding", "no-position-embedding"}}};

/// A flag of a map; "false" and nothing mean that it is not given.
void add_pair(std::string key, Words values, std::vector<MegatronArgument>* arguments) {
  std::string name = name_of_key(std::move(key));
  const bool one = values.size() == 1;
  bool on = one && (values.front() == "true" || values.front() == "True");
  bool off = one && (values.front() == "false" || values.front() == "False");
  const auto setting = std::find_if(kSettings.begin(), kSettings.end(),
                                    [&](const Setting& known) { return known.name == name; });
  if (setting != kSettings.end() && (on || off)) {
    name = setting->flag;
    std::swap(on, off);
  }
  if (off) return;
  if (on) values.clear();
  arguments->push_back({std::move(name), std::move(values)});
}

Words scalars(const YAML::Node& node, const std::string& where, const std::string& field) {
  Words words;
  if (node.IsScalar()) return {node.Scalar()};
  if (!node.IsSequence()) {
    throw InvalidInput(where, field, "a map", "a value or a list of values");
  }
  for (const YAML::Node& item : node) {
    if (!item.IsScalar()) throw InvalidInput(where, field, "a list in a list", "a list of values");
    words.push_back(item.Scalar());
  }
  return words;
}

/// What a map takes from others (<<) comes first, so that its own flags win.
/// `pairs_left`: aliases of aliases may make very many of a short text.
void add_map(const YAML::Node& map, const std::string& where, int64_t* pairs_left,
             std::vector<MegatronArgument>* arguments) {
  *pairs_left -= static_cast<int64_t>(map.size()) + 1;
  if (!map.IsMap() || *pairs_left < 0) {
    throw InvalidInput(where, "<<", "no map, or too many", "maps of flags, 65536 in all");
  }
  for (const auto& pair : map) {
    if (!pair.first.IsScalar() || pair.first.Scalar() != "<<") continue;
    if (!pair.second.IsSequence()) {
      add_map(pair.second, where, pairs_left, arguments);
      continue;
    }
    for (const YAML::Node& item : pair.second) add_map(item, where, pairs_left, arguments);
  }
  for (const auto& pair : map) {
    if (!pair.first.IsScalar()) {
      throw InvalidInput(where, "arguments", "a key that is no text", "flags as keys");
    }
    const std::string key = pair.first.Scalar();
    if (pair.second.IsNull() || key == "<<") continue;
    add_pair(key, scalars(pair.second, where, key), arguments);
  }
}

std::vector<MegatronArgument> arguments_of_yaml(std::string_view text, const std::string& where) {
  try {
    YAML::Node root = YAML::Load(std::string(text));
    for (const char* section : {"MODEL_ARGS", "ARGS"}) {
      if (root.IsMap() && root[section]) root.reset(YAML::Node(root[section]));
    }
    if (root.IsSequence()) {
      Words words;
      for (const std::string& item : scalars(root, where, "arguments")) {
        ShellVariables none({});
        ShellExpander expander(&none, where);
        for (const ShellToken& token : shell_tokens(item, where)) {
          if (token.kind != ShellToken::Kind::kWord) continue;
          const Words pieces = expander.fields(token.text);
          words.insert(words.end(), pieces.begin(), pieces.end());
        }
      }
      return arguments_of_words(words, where);
    }
    if (!root.IsMap()) {
      throw InvalidInput(where, "arguments", "neither", "a map of flags, or a list of arguments");
    }
    std::vector<MegatronArgument> arguments;
    int64_t pairs_left = 1 << 16;
    add_map(root, where, &pairs_left, &arguments);
    return arguments;
  } catch (const YAML::Exception& error) {
    throw InvalidInput(where, fmt::format("line {}", error.mark.line + 1), error.msg, "YAML");
  }
}

std::vector<MegatronArgument> arguments_of_json(const Json& object, const std::string& where) {
  const auto word_of = [&](const std::string& key, const Json& value) -> std::string {
    if (value.is_string()) return value.get<std::string>();
    if (value.is_boolean() || value.is_number()) return value.dump();
    throw InvalidInput(where, key, "an object", "a value or a list of values");
  };
  std::vector<MegatronArgument> arguments;
  for (const auto& [key, value] : object.items()) {
    if (value.is_null()) continue;
    Words words;
    if (value.is_array()) {
      for (const Json& item : value) words.push_back(word_of(key, item));
    } else {
      words.push_back(word_of(key, value));
    }
    add_pair(key, std::move(words), &arguments);
  }
  return arguments;
}

}  // namespace

MegatronJob megatron_job_from_words(const std::vector<std::string>& words, const std::string& where,
                                    const MegatronOptions& options) {
  const std::vector<MegatronArgument> arguments = arguments_of_words(words, where);
  return job_of(arguments, launched_ranks(arguments, where), where, options);
}

MegatronJob megatron_job_from_json(const Json& object, const std::string& where,
                                   const MegatronOptions& options) {
  return job_of(arguments_of_json(object, where), 0, where, options);
}

MegatronJob parse_megatron_args(std::string_view text, std::string_view format,
                                const std::string& where, const MegatronOptions& options) {
  if (text.size() > kMaxFile) {
    throw InvalidInput(where, "size", fmt::format("{} bytes", text.size()), "at most 1 MiB");
  }
  if (format == "json") {
    const Json object = parse_json_object(text, where);
    const bool nested = object.contains("args") && object["args"].is_object();
    return megatron_job_from_json(nested ? object["args"] : object, where, options);
  }
  if (format == "yaml" || format == "yml") {
    return job_of(arguments_of_yaml(text, where), 0, where, options);
  }
  const ShellResult script = follow_shell_script(text, where, options.variables);
  const Launch launch = find_launch(script, where);
  std::vector<MegatronArgument> launcher = arguments_of_words(launch.launcher, where);
  const std::vector<MegatronArgument> arguments = arguments_of_words(launch.arguments, where);
  launcher.insert(launcher.end(), arguments.begin(), arguments.end());
  return job_of(arguments, launched_ranks(launcher, where), where, options);
}

MegatronJob read_megatron_args(const std::filesystem::path& path, const MegatronOptions& options) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {  // opens, and then throws when it is read
    throw InvalidInput(path.string(), "file", "a folder", "a file of arguments");
  }
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) {
    throw InvalidInput(path.string(), "file", "missing or unreadable", "a file of arguments");
  }
  std::string ending = path.extension().string();
  if (!ending.empty()) ending.erase(0, 1);
  return parse_megatron_args(text, ending, path.string(), options);
}

}  // namespace bagualu
