#include "bagualu/graph/native_moe.h"
#include "bagualu/graph/test_models.h"
#include "bagualu/schedule/timeline.h"
#include "tests/golden/golden.h"

namespace bagualu {
namespace {

void expect_timeline(const std::string& name, ResidencyId residency) {
  const Graph graph = build_native_graph(small_moe_spec(), {.seq = 16, .ep_size = 4});
  const Timeline timeline = build_timeline(graph, uniform_plan(graph, residency));
  expect_golden(name, timeline_to_text(graph, timeline));
}

TEST(GoldenTimeline, SaveAll) { expect_timeline("timeline_save.txt", kSave); }
TEST(GoldenTimeline, FullRecompute) { expect_timeline("timeline_recompute.txt", kRecompute); }
TEST(GoldenTimeline, Offload) { expect_timeline("timeline_offload.txt", kOffload); }

}  // namespace
}  // namespace bagualu
