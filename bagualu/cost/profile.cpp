#include "bagualu/cost/profile.h"

#include <fmt/core.h>

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/cost/op_flops.h"

namespace bagualu {
namespace {

constexpr int64_t kProfileVersion = 1;

// Reads the top level once; every part is checked where it is used.
struct ProfileParts {
  const Json* machine = nullptr;
  const Json* ops = nullptr;
  const Json* rebuild = nullptr;
  std::string key;
  double d2h_bytes_per_s = 0;
  double h2d_bytes_per_s = 0;
  double copy_hidden_fraction = 0;
  double encode_bytes_per_s = 0;
  int64_t exchange_post_ns = 0;
};

ProfileParts read_parts(const Json& profile, const std::string& where) {
  JsonReader reader(profile, where);
  reader.int64("version", kProfileVersion, kProfileVersion);
  ProfileParts parts;
  parts.machine = &reader.object("machine");
  parts.key = reader.string("model_key");
  parts.ops = &reader.object("ops");
  parts.rebuild = &reader.object("rebuild");
  parts.d2h_bytes_per_s = reader.number("d2h_bytes_per_s", 1.0);
  parts.h2d_bytes_per_s = reader.number("h2d_bytes_per_s", 1.0);
  parts.copy_hidden_fraction = reader.number("copy_hidden_fraction", 0.0, 1.0);
  parts.encode_bytes_per_s = reader.number("encode_bytes_per_s", 1.0);
  parts.exchange_post_ns = reader.int64_or("exchange_post_ns", 0, 0);
  reader.finish();
  return parts;
}

OpTime read_points(const Json& list, const std::string& where, const std::string& field) {
  static const char* const kAllowed = "a non-empty list of [x, ns], both integers >= 0, x rising";
  const auto fail = [&](const Json& found) {
    throw InvalidInput(where, field, found.dump(), kAllowed);
  };
  if (!list.is_array() || list.empty()) fail(list);
  OpTime time;
  time.measured = true;
  for (const Json& point : list) {
    if (!point.is_array() || point.size() != 2 || !point[0].is_number_integer() ||
        !point[1].is_number_integer()) {
      fail(point);
    }
    const auto x = point[0].get<int64_t>();
    const auto ns = point[1].get<int64_t>();
    if (x < 0 || ns < 0 || (!time.points.empty() && x <= time.points.back().first)) fail(point);
    time.points.emplace_back(x, ns);
  }
  return time;
}

struct OpEntry {
  OpTime forward;
  OpTime backward;
  int64_t forward_workspace_bytes = 0;
  int64_t backward_workspace_bytes = 0;
};

OpEntry read_entry(const Json& ops, const OpSpec& op, const std::string& where) {
  const std::string kind(op_kind_name(op.kind));
  const bool boundary = op.kind == OpKind::kStageRecv || op.kind == OpKind::kStageSend;
  if (boundary && !ops.contains(kind)) {  // a profile of the whole model, used for one stage of it
    const OpTime nothing{{{0, 0}}, true};
    return {.forward = nothing, .backward = nothing};
  }
  JsonReader all(ops, where + ".ops");
  JsonReader reader(all.object(kind), where + ".ops." + kind);
  OpEntry entry;
  entry.forward = read_points(reader.raw("forward"), reader.where(), "forward");
  if (op.has_backward) {
    entry.backward = read_points(reader.raw("backward"), reader.where(), "backward");
  } else {
    reader.raw("backward");
  }
  entry.forward_workspace_bytes = reader.int64_or("forward_workspace_bytes", 0, 0);
  entry.backward_workspace_bytes = reader.int64_or("backward_workspace_bytes", 0, 0);
  reader.finish();
  if (scales_with_rows(op.kind) &&
      (entry.forward_workspace_bytes > 0 || entry.backward_workspace_bytes > 0)) {
    throw InvalidInput(
        reader.where(), "forward_workspace_bytes, backward_workspace_bytes",
        fmt::format("{}, {}", entry.forward_workspace_bytes, entry.backward_workspace_bytes),
        "0: this operator's workspace follows the routed rows and is never a measured constant");
  }
  return entry;
}

std::string unit_kind(const std::string& name) { return name.substr(name.rfind('.') + 1); }

uint64_t fnv1a(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const unsigned char c : text) hash = (hash ^ c) * 1099511628211ULL;
  return hash;
}

void set_hidden(int64_t measured_bytes, int64_t tokens, Workspace& workspace) {
  workspace.hidden_bytes = 0;
  workspace.hidden_bytes = std::max<int64_t>(0, measured_bytes - workspace.eval(tokens, {}));
}

}  // namespace

MachineKey machine_from_json(const Json& object, const std::string& where) {
  JsonReader reader(object, where);
  MachineKey machine;
  machine.cpu = reader.string("cpu");
  machine.threads = reader.int64("threads", 1);
  machine.torch = reader.string("torch");
  machine.isa = reader.string("isa");
  reader.finish();
  return machine;
}

Json to_json(const MachineKey& machine) {
  return {{"cpu", machine.cpu},
          {"threads", machine.threads},
          {"torch", machine.torch},
          {"isa", machine.isa}};
}

std::string profile_key(const ModelSpec& spec, const NativeGraphOptions& options) {
  Json model = to_json(spec);
  model.erase("name");
  const std::string text = fmt::format("{} {} {} {} {}", model.dump(), options.micro_batch_size,
                                       options.seq, dtype_name(options.dtype), options.ep_size);
  return fmt::format("{:016x}", fnv1a(text));
}

void check_profile(const Json& profile, const MachineKey& machine, const std::string& key,
                   const std::string& where) {
  const ProfileParts parts = read_parts(profile, where);
  const MachineKey measured = machine_from_json(*parts.machine, where + ".machine");
  if (measured != machine) {
    throw InvalidInput(where, "machine", to_json(measured).dump(),
                       "a profile of this machine, " + to_json(machine).dump());
  }
  if (parts.key != key) {
    throw InvalidInput(where, "model_key", parts.key, "a profile of this model and shape, " + key);
  }
}

CostTable costs_from_profile(const Graph& graph, const Json& profile, const std::string& where) {
  const ProfileParts parts = read_parts(profile, where);
  CostTable costs;
  for (const OpSpec& op : graph.ops) {
    OpEntry entry = read_entry(*parts.ops, op, where);
    costs.forward.push_back(std::move(entry.forward));
    costs.backward.push_back(std::move(entry.backward));
  }
  costs.rebuild.resize(graph.units.size());
  JsonReader rebuild(*parts.rebuild, where + ".rebuild");
  for (size_t u = 0; u < graph.units.size(); ++u) {
    if (graph.units[u].rebuild != Rebuild::kInPieces) continue;
    const std::string kind = unit_kind(graph.units[u].name);
    costs.rebuild[u] = read_points(rebuild.raw(kind), rebuild.where(), kind);
  }
  for (const char* kind : {"expert_fc1", "moe_act"}) rebuild.raw(kind);  // a stage may have none
  rebuild.finish();
  costs.d2h_bytes_per_s = parts.d2h_bytes_per_s;
  costs.h2d_bytes_per_s = parts.h2d_bytes_per_s;
  costs.copy_hidden_fraction = parts.copy_hidden_fraction;
  costs.encode_bytes_per_s = parts.encode_bytes_per_s;
  costs.exchange_post_ns = parts.exchange_post_ns;
  return costs;
}

void apply_profile_workspaces(const Json& profile, const std::string& where, Graph& graph) {
  const ProfileParts parts = read_parts(profile, where);
  for (OpSpec& op : graph.ops) {
    const OpEntry entry = read_entry(*parts.ops, op, where);
    if (scales_with_rows(op.kind)) continue;
    set_hidden(entry.forward_workspace_bytes, graph.tokens, op.fwd_workspace);
    if (op.has_backward) set_hidden(entry.backward_workspace_bytes, graph.tokens, op.bwd_workspace);
  }
}

}  // namespace bagualu
