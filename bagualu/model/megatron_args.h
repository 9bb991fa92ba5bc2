// Megatron-LM's arguments (Megatron-Core 0.13 to current) read into a Job.
//
// Glossary
//   argument  one flag with its values, as "--recompute-modules core_attn layernorm"
//   ignored   cannot matter to memory or time; unmodelled: matters, and a Job cannot say it
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/model/job.h"

namespace bagualu {

struct MegatronArgument {
  std::string name;                 ///< without the dashes
  std::vector<std::string> values;  ///< none: a switch that is on
  bool operator==(const MegatronArgument&) const = default;
};

struct MegatronOptions {
  /// Ranks of the job; 0: nodes times processes of a node, as the launch command states them.
  int64_t world_size = 0;
  /// Tokens of the tokenizer; 0: as --vocab-size or --padded-vocab-size says.
  int64_t vocab = 0;
  /// Shell variables that the caller would have set before starting the script.
  std::map<std::string, std::string> variables = {};
};

struct MegatronJob {
  Job job;
  std::vector<std::string> ignored;     ///< as given, "--lr 0.1"
  std::vector<std::string> unmodelled;  ///< as given, or in words
};

/// A launch script, a list of arguments as text (both: see Note [Shell scripts]), YAML (*.yaml,
/// *.yml: a map or a list of arguments, at the top or under MODEL_ARGS or ARGS), or JSON (*.json:
/// one object of flag and value, at the top or under "args").
/// Throws: InvalidInput(where = path, field = the flag) on an unknown flag, naming the nearest
///         known one; on a value out of range; on flags that contradict each other by Megatron's
///         rules; and on a Job that validate() refuses.
MegatronJob read_megatron_args(const std::filesystem::path& path,
                               const MegatronOptions& options = {});

/// The same from text in memory. Formats are named by their ending: "sh", "yaml", "json".
MegatronJob parse_megatron_args(std::string_view text, std::string_view format,
                                const std::string& where, const MegatronOptions& options = {});

/// The same from arguments that are words already, as {"--num-layers", "32", "--swiglu"}.
MegatronJob megatron_job_from_words(const std::vector<std::string>& words, const std::string& where,
                                    const MegatronOptions& options = {});

/// The same from an object of flag and value: {"--num-layers": 32, "--swiglu": true}.
MegatronJob megatron_job_from_json(const Json& object, const std::string& where,
                                   const MegatronOptions& options = {});

}  // namespace bagualu
