#pragma once

#include <string>
#include <string_view>

namespace bagualu {

/// What a Megatron argument is to a Job.
enum class MegatronFlagKind {
  kRead,        ///< becomes part of the Job
  kIgnored,     ///< cannot matter to memory or time, or only beside a flag that is listed itself
  kUnmodelled,  ///< matters, and no Job can say it
  kRemoved,     ///< Megatron refuses it and names another
  kLauncher,    ///< torchrun's, not Megatron's
  kUnknown,
};

struct KnownMegatronFlag {
  MegatronFlagKind kind = MegatronFlagKind::kUnknown;
  std::string_view harmless;     ///< kUnmodelled: does nothing with this value; empty: always does
  std::string_view replacement;  ///< kRemoved: what to write in its place
};

/// Of a name without its dashes.
KnownMegatronFlag known_megatron_flag(std::string_view name);

/// The Megatron argument that `name` is most likely a misspelling of.
std::string nearest_megatron_flag(std::string_view name);

}  // namespace bagualu
