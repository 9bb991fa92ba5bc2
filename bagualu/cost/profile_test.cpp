#include "bagualu/cost/profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "bagualu/base/error.h"
#include "bagualu/cost/op_flops.h"
#include "bagualu/cost/system.h"
#include "bagualu/graph/test_models.h"

namespace bagualu {
namespace {

using ::testing::HasSubstr;

const NativeGraphOptions kOptions = {.micro_batch_size = 2, .seq = 16, .ep_size = 4};
const MachineKey kMachine = {"EPYC", 1, "2.13.0", "AVX2"};

Json profile_of(const ModelSpec& spec) {
  Json ops = Json::object();
  for (const OpSpec& op : build_native_graph(spec, kOptions).ops) {
    Json entry = {{"forward", {{16, 100}, {32, 200}}}, {"backward", {{16, 300}, {32, 600}}}};
    if (!scales_with_rows(op.kind)) {
      entry["forward_workspace_bytes"] = 4096;
      entry["backward_workspace_bytes"] = 8192;
    }
    ops[std::string(op_kind_name(op.kind))] = entry;
  }
  return {{"version", 1},
          {"machine", to_json(kMachine)},
          {"model_key", profile_key(spec, kOptions)},
          {"ops", ops},
          {"rebuild", {{"expert_fc1", {{0, 10}, {100, 1010}}}, {"moe_act", {{0, 1}, {100, 101}}}}},
          {"d2h_bytes_per_s", 1e9},
          {"h2d_bytes_per_s", 2e9},
          {"copy_hidden_fraction", 0.5},
          {"encode_bytes_per_s", 1e9}};
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidInput& error) {
    return error.what();
  }
  return "no InvalidInput";
}

TEST(Profile, GivesMeasuredTimesByOperatorKind) {
  const ModelSpec spec = rich_moe_spec();
  const Graph graph = build_native_graph(spec, kOptions);
  const CostTable costs = costs_from_profile(graph, profile_of(spec), "p.json");
  // T = 32 tokens for qkv, 64 rows for the experts: 200 + (64 - 32) * 100 / 16.
  EXPECT_EQ(costs.forward_ns(graph, graph.find_op("layer2.qkv"), {.rows = 64}), 200);
  EXPECT_EQ(costs.forward_ns(graph, graph.find_op("layer2.experts"), {.rows = 64}), 400);
  EXPECT_EQ(costs.backward_ns(graph, graph.find_op("layer2.dispatch_unpack"), {.rows = 64}), 0);
  EXPECT_EQ(
      costs.residency_ns(graph, graph.find_unit("layer1.expert_fc1"), kRecompute, {.rows = 50}),
      510);
  EXPECT_TRUE(costs.forward[0].measured);
}

TEST(Profile, SetsHiddenWorkspaceOfTokenOperatorsOnly) {
  const ModelSpec spec = rich_moe_spec();
  Graph graph = build_native_graph(spec, kOptions);
  const Workspace experts = graph.ops[graph.find_op("layer1.experts")].bwd_workspace;
  apply_profile_workspaces(profile_of(spec), "p.json", graph);
  EXPECT_EQ(graph.ops[graph.find_op("layer1.core_attn")].fwd_workspace.eval(32, {}), 4096);
  EXPECT_EQ(graph.ops[graph.find_op("layer1.core_attn")].bwd_workspace.eval(32, {}), 8192);
  // The masked gradient [32 tokens, 32] fp32 = 4096 is analytic; the rest of the 8192 is hidden.
  EXPECT_EQ(graph.ops[graph.find_op("layer1.attn_proj")].bwd_workspace.hidden_bytes, 4096);
  EXPECT_EQ(graph.ops[graph.find_op("layer1.experts")].bwd_workspace.eval(32, {64, 16}),
            experts.eval(32, {64, 16}));
}

TEST(Profile, RefusesAMeasuredWorkspaceThatFollowsTheLoad) {
  const ModelSpec spec = small_moe_spec();
  Graph graph = build_native_graph(spec, kOptions);
  Json profile = profile_of(spec);
  profile["ops"]["experts"]["backward_workspace_bytes"] = 64;
  EXPECT_THAT(message_of([&] { apply_profile_workspaces(profile, "p.json", graph); }),
              HasSubstr("p.json.ops.experts"));
}

TEST(Profile, IsRefusedOnAnotherMachineOrForAnotherModel) {
  const ModelSpec spec = small_moe_spec();
  const Json profile = profile_of(spec);
  const std::string key = profile_key(spec, kOptions);
  EXPECT_NO_THROW(check_profile(profile, kMachine, key, "p.json"));
  MachineKey other = kMachine;
  other.isa = "AVX512";
  const std::string machine_message =
      message_of([&] { check_profile(profile, other, key, "p.json"); });
  EXPECT_THAT(machine_message, HasSubstr("AVX2"));
  EXPECT_THAT(machine_message, HasSubstr("AVX512"));
  const std::string key_message =
      message_of([&] { check_profile(profile, kMachine, "0123", "p.json"); });
  EXPECT_THAT(key_message, HasSubstr(key));
  EXPECT_THAT(key_message, HasSubstr("0123"));
}

TEST(Profile, KeyFollowsModelShapeDtypeAndExpertParallelSize) {
  ModelSpec spec = small_moe_spec();
  const std::string key = profile_key(spec, kOptions);
  EXPECT_EQ(key.size(), 16u);
  spec.name = "renamed";
  NativeGraphOptions threads = kOptions;
  threads.threads = 2;
  EXPECT_EQ(profile_key(spec, threads), key);
  NativeGraphOptions seq = kOptions, dtype = kOptions, ep = kOptions, batch = kOptions;
  seq.seq = 32;
  dtype.dtype = Dtype::kBf16;
  ep.ep_size = 2;
  batch.micro_batch_size = 1;
  for (const NativeGraphOptions& options : {seq, dtype, ep, batch}) {
    EXPECT_NE(profile_key(spec, options), key);
  }
  spec.expert_ffn = 64;
  EXPECT_NE(profile_key(spec, kOptions), key);
}

TEST(Profile, NamesWhatIsWrongInTheFile) {
  const ModelSpec spec = small_moe_spec();
  const Graph graph = build_native_graph(spec, kOptions);
  const auto message = [&](const std::function<void(Json&)>& damage) {
    Json profile = profile_of(spec);
    damage(profile);
    return message_of([&] { costs_from_profile(graph, profile, "p.json"); });
  };
  EXPECT_THAT(message([](Json& p) { p["ops"].erase("experts"); }), HasSubstr("experts"));
  EXPECT_THAT(message([](Json& p) { p["extra"] = 1; }), HasSubstr("extra"));
  EXPECT_THAT(message([](Json& p) { p["version"] = 2; }), HasSubstr("version"));
  EXPECT_THAT(message([](Json& p) { p["rebuild"].erase("moe_act"); }), HasSubstr("moe_act"));
  EXPECT_THAT(message([](Json& p) {
                p["ops"]["qkv"]["forward"] = {{8, 1}, {8, 2}};
              }),
              HasSubstr("x rising"));
  EXPECT_THAT(message([](Json& p) { p["ops"]["qkv"]["forward"] = Json::array(); }),
              HasSubstr("p.json.ops.qkv: forward"));
  EXPECT_THAT(message([](Json& p) {
                p["ops"]["qkv"]["forward"] = {{8, 1.5}};
              }),
              HasSubstr("[8,1.5]"));
  EXPECT_THAT(message([](Json& p) {
                p["ops"]["qkv"]["backward"] = {{-1, 1}};
              }),
              HasSubstr("backward"));
  EXPECT_THAT(message([](Json& p) { p["copy_hidden_fraction"] = 1.5; }),
              HasSubstr("copy_hidden_fraction"));
}

TEST(System, ReadsTheShippedFiles) {
  const std::string folder = BAGUALU_SOURCE_DIR "/configs/systems/";
  const SystemSpec h800 = system_from_file(folder + "h800.json");
  EXPECT_EQ(h800.provenance, "fitted");
  EXPECT_EQ(h800.flops_per_s(Dtype::kBf16), 989e12);
  EXPECT_EQ(system_from_file(folder + "cpu-2core.json").provenance, "measured");
  // 2.012e18 FLOP/s on 12,288 cards at 32.9 % of the peak: 497.7e12 each.
  const SystemSpec dcu = system_from_file(folder + "dcu-bw1000.json");
  EXPECT_EQ(dcu.provenance, "derived");
  EXPECT_NEAR(dcu.bf16_flops_per_s, 2.012e18 / 12288 / 0.329, 0.5e12);
  int accelerators = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const SystemSpec system = system_from_file(entry.path());
    EXPECT_EQ(system.name, entry.path().stem().string());
    EXPECT_FALSE(system.source.empty()) << system.name;
    accelerators += system.device_memory_bytes >= int64_t{60} << 30 ? 1 : 0;
    SystemSpec again = system_from_json(to_json(system), system.name);
    EXPECT_EQ(to_json(again), to_json(system)) << system.name;
  }
  EXPECT_GE(accelerators, 7) << "a100, h100, h800, h200, b200, mi300x, dcu-bw1000";
}

TEST(System, RefusesUnknownProvenanceKeysAndRates) {
  const std::string path = BAGUALU_SOURCE_DIR "/configs/systems/h800.json";
  const auto message = [&](const std::string& key, const Json& value) {
    Json system = read_json_file(path);
    system[key] = value;
    return message_of([&] { system_from_json(system, "s.json"); });
  };
  EXPECT_THAT(message("provenance", "guessed"), HasSubstr("found guessed"));
  EXPECT_THAT(message("flops", 1), HasSubstr("flops"));
  EXPECT_THAT(message("link_bytes_per_s", 0), HasSubstr("link_bytes_per_s"));
  EXPECT_THAT(message("format", "bagualu.model"), HasSubstr("bagualu.system"));
}

}  // namespace
}  // namespace bagualu
