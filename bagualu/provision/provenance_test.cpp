#include "bagualu/provision/provenance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bagualu/provision/test_graphs.h"
#include "bagualu/provision/test_setup.h"

namespace bagualu {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Provenance, SoundGraphsHaveNoViolations) {
  for (const CaseOptions& options :
       {CaseOptions{.layers = 1}, CaseOptions{.layers = 3, .ep_size = 1},
        CaseOptions{.layers = 4, .dense_first = true, .shared = true}}) {
    EXPECT_THAT(provenance_violations(SmallModel(options).graph), IsEmpty());
  }
  EXPECT_THAT(provenance_violations(precision_twins(true)), IsEmpty());
  std::mt19937 random(1);
  for (int i = 0; i < 100; ++i) EXPECT_THAT(provenance_violations(random_graph(random)), IsEmpty());
}

TEST(Provenance, AStorageCountedTwiceIsNamed) {
  Graph graph = precision_twins();
  graph.units[0].storages.push_back(0);
  EXPECT_THAT(provenance_violations(graph), ElementsAre("x is counted in 2 units"));
  graph = precision_twins();
  graph.units[1].storages.push_back(0);
  EXPECT_THAT(provenance_violations(graph),
              ElementsAre("x belongs to x and is listed by x_bf16", "x is counted in 2 units"));
  graph = precision_twins();
  graph.units[0].storages.clear();
  EXPECT_THAT(provenance_violations(graph), ElementsAre("x is counted in 0 units"));
  graph = precision_twins();
  graph.storages[1].name = "x";
  EXPECT_THAT(provenance_violations(graph), ElementsAre("x is the name of two storages"));
  graph = precision_twins();
  graph.ops.back().creates = {0};
  EXPECT_THAT(provenance_violations(graph), Contains("x is created by 2 operators"));
}

TEST(Provenance, AnOriginIsOlderThanWhatIsDerivedFromIt) {
  Graph graph = precision_twins(true);
  graph.storages[0].derived_from = 0;
  EXPECT_THAT(provenance_violations(graph), Contains(HasSubstr("x is derived from x, which")));
  graph.storages[0].derived_from = 3;  // x -> columns -> rows -> x
  graph.storages[3].derived_from = 2;
  EXPECT_THAT(provenance_violations(graph),
              ElementsAre("x is derived from x_fp8_columns, which is newer"));
}

TEST(Provenance, OperatorsReadWhatIsThere) {
  Graph graph = precision_twins();
  graph.ops[0].reads = {1};
  EXPECT_THAT(provenance_violations(graph), ElementsAre("input reads x_bf16 before it is there"));
}

TEST(Provenance, IndicesOutOfRangeAreNamedAndNothingElseIsRead) {
  Graph graph = precision_twins();
  graph.storages[0].unit = 9;
  graph.storages[1].producer = -1;
  graph.storages[1].layer = 1;
  graph.units[1].storages = {-1};
  graph.ops[1].bwd_saved = {77};
  EXPECT_THAT(provenance_violations(graph),
              ElementsAre("x names a unit that is not there", "x_bf16 has no producer",
                          "x_bf16 is in a layer that is not there",
                          "x_bf16 names storage -1, which is not there",
                          "cast names storage 77, which is not there"));
}

TEST(Provenance, ViewsOfPersistentMemoryArePinnedAndHaveNoBytes) {
  Graph graph = precision_twins();
  graph.storages[0].persistent = true;
  EXPECT_EQ(provenance_violations(graph).size(), 2U);
  EXPECT_THROW(graph.finalize(), std::logic_error);
  graph.units[0].pinned = true;
  graph.storages[0].bytes = {};
  EXPECT_THAT(provenance_violations(graph), IsEmpty());
  EXPECT_NO_THROW(graph.finalize());
}

}  // namespace
}  // namespace bagualu
