#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bagualu/model/model_spec.h"

namespace bagualu {

/// A model read for planning.
struct ReadModel {
  ModelSpec spec;
  /// Keys of the file that change neither bytes nor time here, in the file's order, as
  /// "text_config.floor_scale". Keys that are absent or null are not listed.
  std::vector<std::string> ignored;
};

/// Reads a Hugging Face config.json (transformers 4 or 5) of any family in hf_families(). What
/// changes bytes or time goes into the spec: tied embeddings, biases, windows, norms of queries and
/// keys, multi-token prediction layers. What cannot (scaled RoPE, dropout of attention, router
/// settings, token ids) is listed as ignored. The list of keys is in docs/formats.md.
/// Throws: InvalidInput(where) for an unknown key, a size that is missing or out of range, and keys
///         that contradict each other.
/// Source: configuration and modeling files of transformers 5.24.
ReadModel read_hf_config(const Json& object, const std::string& where);

/// A native file (nothing is ignored) or a config.json; "model_type" makes the difference.
ReadModel read_model_file(const std::filesystem::path& path);

/// Values of `model_type` that read_hf_config() knows.
const std::vector<std::string>& hf_families();

}  // namespace bagualu
