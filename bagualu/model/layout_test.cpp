#include "bagualu/model/layout.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

ModelSpec tiny() {
  return model_from_file(std::string(BAGUALU_SOURCE_DIR) + "/configs/models/tiny.json");
}

TEST(Dtype, HasNamesAndBytes) {
  EXPECT_EQ(dtype_bytes(Dtype::kFp32), 4);
  EXPECT_EQ(dtype_bytes(Dtype::kBf16), 2);
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    EXPECT_EQ(parse_dtype(dtype_name(dtype), "test", "dtype"), dtype);
  }
  EXPECT_THROW(parse_dtype("fp16", "test", "dtype"), InvalidInput);
}

TEST(Layout, DerivesGroups) {
  const ParallelLayout layout{8, 4};
  EXPECT_EQ(layout.expert_dp_size(), 2);
  EXPECT_EQ(layout.ep_rank(6), 2);
  EXPECT_EQ(layout.experts_local(tiny()), 2);
}

TEST(Layout, MaxRowsIsBoundedByTopKAndByLocalExperts) {
  const TrainShape shape{2, 32, 1, Dtype::kFp32};
  EXPECT_EQ(max_rows(tiny(), shape, {4, 4}), 4 * 64 * 2);  // 2 local experts, top 2
  EXPECT_EQ(max_rows(tiny(), shape, {8, 8}), 8 * 64 * 1);  // 1 local expert takes a token once
  EXPECT_EQ(max_rows(tiny(), shape, {1, 1}), 64 * 2);
}

TEST(Layout, AcceptsWhatDivides) {
  EXPECT_NO_THROW(validate(tiny(), {2, 32, 4, Dtype::kFp32}, {8, 4}, "test"));
}

TEST(Layout, RefusesBadSizesNamingTheField) {
  struct Case {
    TrainShape shape;
    ParallelLayout layout;
    const char* field;
  };
  const std::vector<Case> cases = {
      {{0, 32, 1, Dtype::kFp32}, {4, 4}, "micro_batch_size"},
      {{1, 0, 1, Dtype::kFp32}, {4, 4}, "seq"},
      {{1, 32, -1, Dtype::kFp32}, {4, 4}, "microbatches"},
      {{1, 32, 1, Dtype::kFp32}, {0, 1}, "world_size"},
      {{1, 32, 1, Dtype::kFp32}, {4, 0}, "ep"},
      {{1, 32, 1, Dtype::kFp32}, {3, 3}, "ep"},  // 8 experts % 3
      {{1, 32, 1, Dtype::kFp32}, {6, 4}, "ep"},  // 6 ranks % 4
      {{1 << 12, 1 << 20, 1, Dtype::kFp32}, {4, 4}, "micro_batch_size * seq"},
  };
  for (const Case& c : cases) {
    try {
      validate(tiny(), c.shape, c.layout, "test");
      ADD_FAILURE() << "accepted a bad " << c.field;
    } catch (const InvalidInput& error) {
      EXPECT_EQ(error.field(), c.field) << error.what();
    }
  }
}

TEST(Layout, RefusesAnotherNumberOfRanks) {
  EXPECT_NO_THROW(check_world_size({4, 2}, 4, "test"));
  EXPECT_THROW(check_world_size({4, 2}, 3, "test"), InvalidInput);
}

}  // namespace
}  // namespace bagualu
