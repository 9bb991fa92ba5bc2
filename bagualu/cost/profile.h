// A profile: operator times and hidden workspaces measured on one machine for one model and shape.
//
// {"version":1,
//  "machine":{"cpu","threads","torch","isa"},
//  "model_key":"<hex>",                                   // profile_key()
//  "ops":{"core_attn":{"forward":[[x,ns],...],"backward":[[x,ns],...],
//                      "forward_workspace_bytes":n,"backward_workspace_bytes":n},...},
//  "rebuild":{"expert_fc1":[[x,ns],...],"moe_act":[[x,ns],...]},
//  "d2h_bytes_per_s","h2d_bytes_per_s","copy_hidden_fraction","encode_bytes_per_s",
//  "exchange_post_ns"}                                    // may be absent: 0
//
// ops is by operator kind: layers of one kind are alike. x is tokens, or rows for the operators of
// scales_with_rows(). A workspace is the peak of all temporaries beside the created storages.
#pragma once

#include <string>

#include "bagualu/base/json.h"
#include "bagualu/cost/op_cost.h"
#include "bagualu/graph/native_moe.h"

namespace bagualu {

/// What a measured byte or nanosecond depends on besides the model.
struct MachineKey {
  std::string cpu;
  int64_t threads = 1;
  std::string torch;  ///< version
  std::string isa;    ///< instruction set that ATen's kernels use, "AVX2"
  bool operator==(const MachineKey&) const = default;
};

MachineKey machine_from_json(const Json& object, const std::string& where);
Json to_json(const MachineKey& machine);

/// Hash of model, shape, dtype and expert-parallel size: hex, stable across runs and machines.
/// The model's name and the run's threads (part of the machine) do not count.
std::string profile_key(const ModelSpec& spec, const NativeGraphOptions& options);

/// Throws: InvalidInput naming both sides if the profile was taken on another machine or for
///         another model or shape.
void check_profile(const Json& profile, const MachineKey& machine, const std::string& key,
                   const std::string& where);

/// Throws: InvalidInput for an operator of the graph that the profile lacks, unknown keys, points
///         whose x does not rise. Requires: check_profile() has accepted the profile.
CostTable costs_from_profile(const Graph& graph, const Json& profile, const std::string& where);

/// Replaces the hidden workspace of token operators by the measured one (what exceeds the analytic
/// phases). Row operators have none: their workspace follows the load, so it stays analytic.
/// Throws: InvalidInput if a row operator has a measured workspace.
void apply_profile_workspaces(const Json& profile, const std::string& where, Graph& graph);

}  // namespace bagualu
