#pragma once

#include <string>

#include "bagualu/base/json.h"
#include "bagualu/provision/policy.h"

namespace bagualu {

/// {"plan","static_fit_imbalance","threshold","recompute_modules","adapipe_fit_imbalance",
/// "adapipe_in_flight","kwai_offload_ratio","kwai_fit_imbalance","retry_factor"}, all optional.
/// What is read is marked as known; the caller calls finish().
/// Throws: InvalidInput(where, field).
PolicyOptions read_policy_options(JsonReader* reader);

/// Of an object that has nothing else.
PolicyOptions policy_options_from_json(const Json& json, const std::string& where);

}  // namespace bagualu
