#include "bagualu/runtime/activation_store.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/runtime/transfer_cpu.h"
#include "bagualu/runtime/transfer_fake.h"

namespace bagualu {
namespace {

using testing::HasSubstr;

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(no exception)";
}

bool bit_equal(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && at::equal(a, b);
}

/// Storages 0..3 of step 3, micro-batch 1, on the hostile fake engine.
class ActivationStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    store_.begin(3, 1, {{"qkv.out", 0}, {"moe_act.out", 2}, {"logits", -1}, {"router.out", 2}});
  }
  void TearDown() override {
    store_.abort();
    arena_.set_budget(BudgetCounter::kNoBudget);
    EXPECT_EQ(arena_.live_bytes(), base_bytes_);
    EXPECT_EQ(host_.live_bytes(), 0);
  }
  int64_t grown() const { return arena_.live_bytes() - base_bytes_; }
  void to_host(int id) {
    store_.offload(id);
    store_.drain(id);
  }
  void back(int id) {
    store_.reload(id);
    store_.await(id);
  }

  DeviceArena& arena_ = DeviceArena::install(BudgetCounter::kNoBudget);
  int64_t base_bytes_ = arena_.live_bytes();
  HostArena host_{{64 * kKiB, 0, {}}};
  FakeTransferEngine engine_;
  ActivationStore store_{arena_, host_, engine_, {.verify_checksums = true}};
};

TEST_F(ActivationStoreTest, DropAndReleaseFreeTheBytes) {
  store_.put(0, at::ones({64}, at::kFloat));
  store_.put(1, at::ones({64}, at::kFloat));
  EXPECT_EQ(grown(), 512);
  EXPECT_EQ(store_.device_resident_bytes(), 512);
  store_.drop(0);
  EXPECT_EQ(grown(), 256);
  store_.release(1);
  EXPECT_EQ(grown(), 0);
  store_.finish();
}

TEST_F(ActivationStoreTest, OffloadAndReloadGiveEqualBits) {
  at::Tensor original = at::randn({8, 16});
  const at::Tensor expected = original.clone();
  const int64_t expected_bytes = 512;
  store_.put(0, std::move(original));
  store_.offload(0);
  EXPECT_EQ(store_.device_resident_bytes(), expected_bytes);  // undrained bytes are resident
  store_.drain(0);
  EXPECT_EQ(store_.device_resident_bytes(), 0);
  EXPECT_EQ(host_.live_bytes(), expected_bytes);
  store_.reload(0);
  EXPECT_EQ(store_.device_resident_bytes(), expected_bytes);
  EXPECT_EQ(host_.live_bytes(), expected_bytes);  // until the copy in has ended
  store_.await(0);
  EXPECT_EQ(host_.live_bytes(), 0);
  EXPECT_TRUE(bit_equal(store_.get(0), expected));
  store_.release(0);
  const ActivationStoreStats stats = store_.finish();
  EXPECT_EQ(stats.bytes_offloaded, expected_bytes);
  EXPECT_EQ(stats.bytes_reloaded, expected_bytes);
}

TEST_F(ActivationStoreTest, StridesAndTypesSurvive) {
  const std::vector<std::function<at::Tensor()>> makers = {
      [] {
        return at::randn({5, 7}).t();
      },
      [] {
        return at::randn({2, 3, 4}).permute({2, 0, 1});
      },
      [] {
        return at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
      },
      [] {
        return at::randn({6, 2}).to(at::kBFloat16).t();
      },
      [] {
        return at::randint(100, {3, 3}, at::kLong).t();
      },
      [] { return at::ones({9}, at::kBool); },
      [] { return at::ones({}, at::kDouble); },
      [] {
        return at::ones({1, 1}, at::kFloat);
      }};
  for (const auto& make : makers) {
    store_.abort();
    store_.begin(0, 0, {{"x", 0}});
    at::Tensor tensor = make();
    const at::Tensor expected = tensor.clone(at::MemoryFormat::Preserve);
    const std::vector<int64_t> strides = tensor.strides().vec();
    store_.put(0, std::move(tensor));
    to_host(0);
    back(0);
    EXPECT_EQ(store_.get(0).strides().vec(), strides);
    EXPECT_TRUE(bit_equal(store_.get(0), expected));
  }
}

TEST_F(ActivationStoreTest, ZeroSizeStoragesAreLegalAndDistinct) {
  store_.put(0, at::empty({0, 8}, at::kFloat));
  store_.put(1, at::empty({8, 0}, at::kBFloat16));
  for (const int id : {0, 1}) {
    to_host(id);
    back(id);
  }
  EXPECT_EQ(store_.get(0).sizes(), (std::vector<int64_t>{0, 8}));
  EXPECT_EQ(store_.get(1).sizes(), (std::vector<int64_t>{8, 0}));
  EXPECT_EQ(store_.get(1).scalar_type(), at::kBFloat16);
  store_.drop(0);
  store_.put_recomputed(0, at::empty({0, 8}, at::kFloat));
  store_.release(0);
  store_.release(1);
  store_.finish();
}

TEST_F(ActivationStoreTest, RecomputedStorageActsAsLive) {
  store_.put(0, at::ones({4}, at::kFloat));
  store_.drop(0);
  EXPECT_FALSE(store_.is_live(0));
  EXPECT_THAT(message_of([&] { store_.get(0); }), HasSubstr("EMPTY > LIVE > DROPPED"));
  store_.put_recomputed(0, at::ones({4}, at::kFloat));
  EXPECT_TRUE(store_.is_live(0));
  EXPECT_EQ(store_.get(0).numel(), 4);
  EXPECT_EQ(store_.stats().bytes_recomputed, 16);
  store_.drop(0);  // as often as wanted
  store_.put_recomputed(0, at::ones({4}, at::kFloat));
  store_.release(0);
  EXPECT_EQ(store_.finish().bytes_recomputed, 32);
}

TEST_F(ActivationStoreTest, IllegalStepsThrowWithADump) {
  EXPECT_THAT(message_of([&] { store_.get(1); }),
              HasSubstr("step 3 microbatch 1 layer 2 storage moe_act.out generation 0"));
  EXPECT_THROW(store_.await(0), InternalError);  // empty: only put makes it live
  EXPECT_THROW(store_.put_recomputed(0, at::ones({4})), InternalError);
  store_.put(0, at::ones({4}));
  EXPECT_THROW(store_.put(0, at::ones({4})), InternalError);
  EXPECT_THROW(store_.drain(0), InternalError);
  EXPECT_THROW(store_.reload(0), InternalError);
  store_.offload(0);
  EXPECT_THROW(store_.get(0), InternalError);
  EXPECT_THROW(store_.drop(0), InternalError);  // the copy still reads the bytes
  EXPECT_THROW(store_.release(0), InternalError);
  EXPECT_THROW(store_.reload(0), InternalError);  // H2D before D2H is done
  store_.drain(0);
  EXPECT_THROW(store_.drop(0), InternalError);
  store_.reload(0);
  EXPECT_THROW(store_.put(0, at::ones({4})), InternalError);
  EXPECT_THROW(store_.get(0), InternalError);      // the bytes are not there yet
  EXPECT_THROW(store_.release(0), InternalError);  // the copy still writes the bytes
  store_.await(0);
  store_.release(0);
  EXPECT_THROW(store_.release(0), InternalError);
  EXPECT_THROW(store_.put(0, at::ones({4})), InternalError);  // a key is used once
  EXPECT_THROW(store_.get(4), InternalError);
  EXPECT_THROW(store_.get(-1), InternalError);
  store_.finish();
}

TEST_F(ActivationStoreTest, NothingWorksOutsideAMicrobatch) {
  EXPECT_THROW(store_.begin(3, 2, {}), InternalError);
  store_.finish();
  EXPECT_THROW(store_.put(0, at::ones({4})), InternalError);
  EXPECT_THROW(store_.finish(), InternalError);
  store_.begin(3, 2, {});
  store_.finish();
}

TEST_F(ActivationStoreTest, SharedStorageCannotBeFreed) {
  at::Tensor mine = at::ones({4});
  store_.put(0, mine);  // as a parameter or a caller's variable would be
  EXPECT_THAT(message_of([&] { store_.drop(0); }), HasSubstr("others hold the storage"));
  EXPECT_THAT(message_of([&] { store_.release(0); }), HasSubstr("storage qkv.out"));
  EXPECT_THROW(store_.offload(0), InternalError);
  EXPECT_TRUE(store_.is_live(0));
  mine.reset();
  at::Tensor view = store_.get(0).view({2, 2});  // an escaped view holds the bytes as well
  EXPECT_THROW(store_.drop(0), InternalError);
  view.reset();
  store_.drop(0);
  EXPECT_EQ(grown(), 0);
}

TEST_F(ActivationStoreTest, ViewTakenDuringTheCopyOutKeepsDrainFromFreeing) {
  store_.put(0, at::ones({4}));
  const at::Tensor& inside = store_.get(0);
  store_.offload(0);
  at::Tensor view = inside.view({2, 2});
  EXPECT_THROW(store_.drain(0), InternalError);
  view.reset();
  store_.drain(0);
  EXPECT_EQ(grown(), 0);
}

TEST_F(ActivationStoreTest, ViewOfAGoneBaseIsTheSoleOwner) {
  // Torch lets a view hold its base; the store must not keep the base's bytes through it.
  store_.put(0, at::randn({5, 7}).t());
  store_.drop(0);
  EXPECT_EQ(grown(), 0);
}

TEST_F(ActivationStoreTest, OneStorageUnderTwoIdsIsFound) {
  at::Tensor tensor = at::ones({4});
  store_.put(0, tensor.view({2, 2}));
  store_.put(1, std::move(tensor));
  EXPECT_THROW(store_.drop(0), InternalError);
}

TEST_F(ActivationStoreTest, PutRefusesWhatDoesNotCoverItsStorage) {
  const at::Tensor whole = at::ones({4, 4});
  EXPECT_THAT(message_of([&] { store_.put(0, whole[1]); }), HasSubstr("offset 4 cover 16 B"));
  EXPECT_THROW(store_.put(0, whole.narrow(0, 0, 2)), InternalError);
  EXPECT_THROW(store_.put(0, whole.slice(1, 0, 4, 2)), InternalError);
  EXPECT_THROW(store_.put(0, at::ones({1}).expand({4})), InternalError);
  EXPECT_THROW(store_.put(0, whole.narrow(0, 0, 0)), InternalError);
  EXPECT_THROW(store_.put(0, at::Tensor()), InternalError);
  EXPECT_THROW(store_.put(0, at::ones({4}).requires_grad_()), InternalError);
  float foreign[4] = {};
  EXPECT_THAT(message_of([&] { store_.put(0, at::from_blob(foreign, {4})); }),
              HasSubstr("not counted by the device arena"));
  EXPECT_EQ(store_.device_resident_bytes(), 0);
  store_.finish();
}

TEST_F(ActivationStoreTest, FullHostIsATypedFailureThatLeavesTheStorageLive) {
  store_.put(0, at::ones({12 * 1024}, at::kFloat));  // 48 KiB of 64
  store_.put(1, at::ones({8 * 1024}, at::kFloat));   // 32 KiB
  store_.offload(0);
  const auto full = store_.try_offload(1);
  ASSERT_TRUE(full);
  EXPECT_EQ(full->reason, HostFull::Reason::kLimit);
  EXPECT_EQ(full->wanted_bytes, 32 * kKiB);
  EXPECT_EQ(full->left_bytes, 16 * kKiB);
  EXPECT_THROW(store_.offload(1), HostOverLimit);
  EXPECT_TRUE(store_.is_live(1));
  store_.drop(1);  // degrade to recompute
  store_.drain(0);
  store_.release(0);
  store_.finish();
}

TEST_F(ActivationStoreTest, ReleaseOnTheHostFreesTheBlock) {
  store_.put(0, at::ones({64}));
  to_host(0);
  store_.release(0);
  EXPECT_EQ(host_.live_bytes(), 0);
  store_.finish();  // in = out counts what was never reloaded
}

TEST_F(ActivationStoreTest, ReloadOverBudgetLeavesTheHostCopy) {
  at::Tensor tensor = at::randn({64});
  const at::Tensor expected = tensor.clone();
  store_.put(0, std::move(tensor));
  to_host(0);
  arena_.set_budget(arena_.live_bytes() + 128);
  EXPECT_THROW(store_.reload(0), OverBudget);
  arena_.set_budget(BudgetCounter::kNoBudget);
  back(0);
  EXPECT_TRUE(bit_equal(store_.get(0), expected));
}

TEST_F(ActivationStoreTest, NewBytesAtAnOldAddressHaveTheirOwnGeneration) {
  store_.put(0, at::ones({64}));
  const void* address = store_.get(0).data_ptr();
  store_.drop(0);
  at::Tensor second = at::full({64}, 2.0);
  const bool same_address = second.data_ptr() == address;  // the usual case with malloc
  store_.put(1, std::move(second));
  store_.put_recomputed(0, at::ones({64}));
  EXPECT_EQ(store_.get(1)[0].item<float>(), 2.0F) << same_address;
  store_.offload(1);
  EXPECT_THAT(message_of([&] { store_.drop(1); }), HasSubstr("generation 2"));
  EXPECT_THAT(message_of([&] { store_.put(0, at::ones({1})); }), HasSubstr("generation 3"));
}

TEST_F(ActivationStoreTest, HostBlockIsNotReusedWhileItsCopyInRuns) {
  at::Tensor first = at::randn({64});
  const at::Tensor expected = first.clone();
  store_.put(0, std::move(first));
  store_.put(1, at::randn({64}));
  to_host(0);
  store_.reload(0);  // issued; the fake reads the host block at the end only
  to_host(1);        // wants a block of the same size
  store_.await(0);
  EXPECT_TRUE(bit_equal(store_.get(0), expected));
}

TEST_F(ActivationStoreTest, SourceChangedUnderTheCopyIsFound) {
  store_.put(0, at::ones({64}));
  float* data = store_.get(0).mutable_data_ptr<float>();
  store_.offload(0);
  data[5] = 7.0F;  // an optimizer or an in-place add would
  EXPECT_THAT(message_of([&] { store_.drain(0); }), HasSubstr("device bytes changed"));
}

TEST_F(ActivationStoreTest, DeadlineNamesTheStorage) {
  store_.abort();
  ActivationStore store(arena_, host_, engine_, {.copy_timeout_ns = 2'000'000});
  store.begin(3, 1, {{"moe_act.out", 2}});
  store.put(0, at::ones({64}));
  engine_.stall(Direction::kD2H, true);
  store.offload(0);
  EXPECT_THAT(message_of([&] { store.drain(0); }),
              HasSubstr("D2H copy of step 3 microbatch 1 layer 2 storage moe_act.out "
                        "generation 1 did not end within 2 ms"));
  EXPECT_EQ(store.device_resident_bytes(), 256);
  engine_.stall(Direction::kD2H, false);
  store.drain(0);
  store.release(0);
  store.finish();
}

TEST_F(ActivationStoreTest, FailedCopyOutKeepsTheDeviceBytes) {
  store_.put(0, at::ones({64}));
  engine_.fail_next(Direction::kD2H, "link down");
  store_.offload(0);
  EXPECT_THAT(message_of([&] { store_.drain(0); }), HasSubstr("link down"));
  EXPECT_EQ(grown(), 256);
}

TEST_F(ActivationStoreTest, AbortFromAnyStateReturnsBothArenasToTheirBase) {
  for (int reached = 0; reached < 6; ++reached) {
    for (const bool stalled : {false, true}) {
      store_.abort();
      store_.begin(4, 0, {{"x", 0}, {"y", 1}});
      store_.put(0, at::ones({64}));
      store_.put(1, at::ones({32}));
      const std::vector<std::function<void()>> life = {
          [&] { store_.offload(0); }, [&] { store_.drain(0); }, [&] { store_.reload(0); },
          [&] { store_.await(0); }, [&] { store_.drop(0); }};
      for (int i = 0; i < reached; ++i) {
        life[static_cast<size_t>(i)]();
      }
      engine_.stall(Direction::kD2H, stalled);
      engine_.stall(Direction::kH2D, stalled);
      store_.abort();
      engine_.stall(Direction::kD2H, false);
      engine_.stall(Direction::kH2D, false);
      EXPECT_EQ(grown(), 0) << reached;
      EXPECT_EQ(host_.live_bytes(), 0) << reached;
    }
  }
}

TEST_F(ActivationStoreTest, FinishNamesWhatIsStillHeld) {
  store_.put(1, at::ones({64}));
  EXPECT_THAT(message_of([&] { store_.finish(); }), HasSubstr("finish: the storage is still held"));
  to_host(1);
  EXPECT_THAT(message_of([&] { store_.finish(); }), HasSubstr("storage moe_act.out"));
}

TEST_F(ActivationStoreTest, StatisticsStartAnewWithEachMicrobatch) {
  store_.put(0, at::ones({64}));
  to_host(0);
  store_.release(0);
  EXPECT_EQ(store_.finish().bytes_offloaded, 256);
  EXPECT_EQ(store_.stats().bytes_offloaded, 256);
  store_.begin(3, 2, {});
  EXPECT_EQ(store_.stats().bytes_offloaded, 0);
}

/// Random lives of many storages; every bit must come back whatever the engine does.
void live_randomly(TransferEngine& engine, uint64_t seed) {
  constexpr int kStorages = 40;
  DeviceArena& arena = DeviceArena::install(BudgetCounter::kNoBudget);
  const int64_t base_bytes = arena.live_bytes();
  HostArena host({0, 64 * kKiB, {}});
  ActivationStore store(arena, host, engine, {.verify_checksums = true});
  std::mt19937_64 random(seed);
  const auto make = [](int id) {
    return at::arange(int64_t{id} * 37, at::kFloat).add_(id).view({37, id}).t();
  };
  std::vector<StorageInfo> storages(kStorages, StorageInfo{"x", 0});
  store.begin(0, 0, std::move(storages));
  for (int id = 0; id < kStorages; ++id) {
    store.put(id, make(id).clone(at::MemoryFormat::Preserve));
  }
  // Forward: half are offloaded, drained in a window; some of the others are dropped.
  std::vector<int> offloaded;
  size_t drained = 0;
  for (int id = 0; id < kStorages; ++id) {
    if (random() % 2 == 0) {
      store.offload(id);
      offloaded.push_back(id);
    } else if (random() % 2 == 0) {
      store.drop(id);
      store.put_recomputed(id, make(id).clone(at::MemoryFormat::Preserve));
    }
    while (offloaded.size() > drained + 3) {
      store.drain(offloaded[drained++]);
    }
  }
  while (drained < offloaded.size()) {
    store.drain(offloaded[drained++]);
  }
  // Backward: reload two ahead.
  size_t reloaded = offloaded.size();
  for (int id = kStorages - 1; id >= 0; --id) {
    while (reloaded > 0 && offloaded[reloaded - 1] >= id - 2) {
      store.reload(offloaded[--reloaded]);
    }
    if (!store.is_live(id)) {
      store.await(id);
    }
    EXPECT_TRUE(bit_equal(store.get(id), make(id))) << id;
    store.release(id);
  }
  store.finish();
  EXPECT_EQ(arena.live_bytes(), base_bytes);
  EXPECT_EQ(host.live_bytes(), 0);
}

TEST(ActivationStore, RandomLivesOnTheFakeEngine) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    FakeTransferEngine engine({seed, 1'000});
    live_randomly(engine, seed);
  }
}

TEST(ActivationStore, RandomLivesOnTheCpuEngine) {
  CpuTransferEngine engine({.chunk_bytes = 256, .copy_chunk = {}});
  for (uint64_t seed = 0; seed < 20; ++seed) {
    live_randomly(engine, seed);
  }
}

}  // namespace
}  // namespace bagualu
