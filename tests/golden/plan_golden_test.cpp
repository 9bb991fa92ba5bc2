// What `bagualu plan` prints for jobs: the same bytes from run to run and from compiler to
// compiler.
#include <sstream>
#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"
#include "tests/golden/golden.h"

namespace bagualu {
namespace {

std::string config(const std::string& kind, const std::string& name) {
  return std::string(BAGUALU_SOURCE_DIR) + "/configs/" + kind + "/" + name + ".json";
}

/// Both channels of one command line that names no path.
std::string printed(std::vector<std::string> arguments) {
  std::ostringstream out;
  std::ostringstream err;
  const int code = run(arguments, {out, err});
  return out.str() + err.str() + "exit code " + std::to_string(code) + "\n";
}

TEST(GoldenPlan, DeepSeekOn1024) {
  expect_golden("plan_deepseek.txt",
                printed({"plan", "--model", config("models", "deepseek-v3"), "--system",
                         config("systems", "h800"), "--layout", "pp=16,ep=64,dp=64", "--stages",
                         "Et*3|(t*4|)*14t*2mL", "--micro-batches", "120", "--imbalance", "1.5",
                         "--recompute", "mla_up_proj,layernorm"}));
}

TEST(GoldenPlan, MixtralSearch) {
  expect_golden("plan_mixtral_search.json",
                printed({"plan", "--model", config("models", "mixtral-8x7b"), "--system",
                         config("systems", "h100"), "--layout", "tp=1,pp=4,ep=8,dp=8",
                         "--micro-batches", "16", "--search", "--json", "-"}));
}

TEST(GoldenPlan, LlamaInterleavedWithOffload) {
  expect_golden("plan_llama.txt",
                printed({"plan", "--model", config("models", "llama-2-70b"), "--system",
                         config("systems", "a100"), "--layout", "tp=4,pp=4,vpp=5,dp=2",
                         "--micro-batches", "16", "--offload", "all@0.3"}));
}

TEST(GoldenPlan, Flags) {
  expect_golden("plan_flags.txt",
                printed({"plan", "--model", config("models", "qwen3-30b-a3b"), "--system",
                         config("systems", "h100"), "--layout", "tp=2,pp=2,ep=4,dp=4",
                         "--micro-batches", "8", "--emit", "megatron"}));
}

TEST(GoldenPlan, Tensors) {
  expect_golden("plan_tensors.txt", printed({"plan", "--model", config("models", "deepseek-v3"),
                                             "--system", config("systems", "h100"), "--layout",
                                             "pp=16,ep=64,dp=64", "--explain", "layer"}));
}

TEST(GoldenSchedule, DualPipeV) {
  expect_golden("schedule_dualpipev.txt", printed({"schedule", "--order", "dualpipe-v", "--pp", "4",
                                                   "--micro-batches", "8", "--text"}));
}

}  // namespace
}  // namespace bagualu
