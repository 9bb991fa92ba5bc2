#include "bagualu/runtime/transfer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/runtime/transfer_cpu.h"
#include "bagualu/runtime/transfer_fake.h"

namespace bagualu {
namespace {

using testing::HasSubstr;
using Bytes = std::vector<unsigned char>;

constexpr int64_t kShortNs = 20'000'000;

/// What the contract suite must be able to do to an engine besides using it.
class EngineUnderTest {
 public:
  virtual ~EngineUnderTest() = default;
  virtual TransferEngine& engine() = 0;
  /// While held, no copy ends (but a cancelled one may).
  virtual void hold(bool held) = 0;
  /// The copy issued next fails with `cause`.
  virtual void fail_next(Direction direction, const std::string& cause) = 0;
  virtual void destroy() = 0;
};

class CpuUnderTest final : public EngineUnderTest {
 public:
  CpuUnderTest() {
    CpuTransferOptions options;
    options.chunk_bytes = 64;  // so that a small copy already has several chunks
    options.copy_chunk = [this](void* dst, const void* src, size_t size) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !held_; });
      if (cause_) {
        const std::string cause = *std::exchange(cause_, std::nullopt);
        throw std::runtime_error(cause);
      }
      std::memcpy(dst, src, size);
    };
    engine_ = std::make_unique<CpuTransferEngine>(std::move(options));
  }
  ~CpuUnderTest() override { hold(false); }
  TransferEngine& engine() override { return *engine_; }
  void hold(bool held) override {
    const std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  void fail_next(Direction, const std::string& cause) override {
    const std::lock_guard lock(mutex_);
    cause_ = cause;
  }
  void destroy() override { engine_.reset(); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  std::optional<std::string> cause_;
  std::unique_ptr<CpuTransferEngine> engine_;
};

class FakeUnderTest final : public EngineUnderTest {
 public:
  explicit FakeUnderTest(uint64_t seed)
      : engine_(std::make_unique<FakeTransferEngine>(FakeTransferOptions{seed, 1'000})) {}
  TransferEngine& engine() override { return *engine_; }
  void hold(bool held) override {
    engine_->stall(Direction::kD2H, held);
    engine_->stall(Direction::kH2D, held);
  }
  void fail_next(Direction direction, const std::string& cause) override {
    engine_->fail_next(direction, cause);
  }
  void destroy() override { engine_.reset(); }

 private:
  std::unique_ptr<FakeTransferEngine> engine_;
};

struct EngineCase {
  const char* name;
  std::function<std::unique_ptr<EngineUnderTest>()> make;
};

class TransferContract : public testing::TestWithParam<EngineCase> {
 protected:
  TransferEngine& engine() { return subject_->engine(); }
  std::unique_ptr<EngineUnderTest> subject_ = GetParam().make();
};

INSTANTIATE_TEST_SUITE_P(
    Engines, TransferContract,
    testing::Values(EngineCase{"Cpu", [] { return std::make_unique<CpuUnderTest>(); }},
                    EngineCase{"FakeSeed1", [] { return std::make_unique<FakeUnderTest>(1); }},
                    EngineCase{"FakeSeed2", [] { return std::make_unique<FakeUnderTest>(2); }},
                    EngineCase{"FakeSeed3", [] { return std::make_unique<FakeUnderTest>(3); }}),
    [](const auto& each) { return std::string(each.param.name); });

Bytes pattern(size_t size, int seed) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<unsigned char>(i * 31 + static_cast<size_t>(seed));
  }
  return bytes;
}

TEST_P(TransferContract, CopiesEveryByte) {
  const Bytes src = pattern(1001, 1);
  Bytes dst(src.size());
  const CopyTicket ticket = engine().copy(Direction::kD2H, dst.data(), src.data(), 1001);
  engine().wait(ticket);
  EXPECT_EQ(dst, src);
  EXPECT_TRUE(engine().query(ticket));
  EXPECT_EQ(engine().stats().copied_bytes[0], 1001);
  EXPECT_EQ(engine().stats().copied_bytes[1], 0);
}

TEST_P(TransferContract, CopyInReadsWhatItsCopyOutWrote) {
  // Without the dependency the two directions race for `host`.
  for (int round = 0; round < 50; ++round) {
    const Bytes src = pattern(640, round);
    Bytes host(src.size());
    Bytes dst(src.size());
    const CopyTicket out = engine().copy(Direction::kD2H, host.data(), src.data(), 640, {}, "x");
    const CopyTicket in = engine().copy(Direction::kH2D, dst.data(), host.data(), 640, out, "x");
    engine().wait(in);
    EXPECT_TRUE(engine().query(out));
    ASSERT_EQ(dst, src);
  }
}

TEST_P(TransferContract, OneDirectionKeepsTheOrderOfIssue) {
  // Each copy feeds the next one, so any other order shows in the last buffer.
  constexpr int kCopies = 40;
  std::vector<Bytes> buffers(kCopies + 1, Bytes(200));
  buffers[0] = pattern(200, 9);
  CopyTicket last;
  for (size_t i = 0; i < kCopies; ++i) {
    last = engine().copy(Direction::kH2D, buffers[i + 1].data(), buffers[i].data(), 200);
  }
  engine().wait(last);
  EXPECT_EQ(buffers[kCopies], buffers[0]);
}

TEST_P(TransferContract, ManyMixedCopiesAllEnd) {
  constexpr size_t kRounds = 100;
  std::vector<Bytes> src, host(kRounds, Bytes(128)), dst(kRounds, Bytes(128));
  std::vector<CopyTicket> out, in;
  for (size_t i = 0; i < kRounds; ++i) {
    src.push_back(pattern(128, static_cast<int>(i)));
  }
  for (size_t i = 0; i < kRounds; ++i) {
    out.push_back(engine().copy(Direction::kD2H, host[i].data(), src[i].data(), 128));
    const size_t back = i / 2;
    if (in.size() == back) {
      in.push_back(
          engine().copy(Direction::kH2D, dst[back].data(), host[back].data(), 128, out[back]));
    }
  }
  for (const CopyTicket each : out) {
    engine().wait(each);
  }
  for (size_t i = in.size(); i-- > 0;) {  // not in the order of issue
    engine().wait(in[i]);
    EXPECT_EQ(dst[i], src[i]);
  }
}

TEST_P(TransferContract, TicketsAreNeverReused) {
  std::set<uint64_t> seen;
  Bytes src(8), dst(8);
  for (int i = 0; i < 20; ++i) {
    const CopyTicket ticket = engine().copy(Direction::kD2H, dst.data(), src.data(), 8);
    EXPECT_TRUE(seen.insert(ticket.sequence).second);
    engine().wait(ticket);
  }
}

TEST_P(TransferContract, ZeroBytesAreLegal) {
  engine().wait(engine().copy(Direction::kH2D, nullptr, nullptr, 0));
}

TEST_P(TransferContract, NoTicketIsDone) {
  EXPECT_TRUE(engine().query({}));
  engine().wait({});
}

TEST_P(TransferContract, DeadlineNamesLabelAndDirection) {
  Bytes src(64), dst(64);
  subject_->hold(true);
  const CopyTicket ticket =
      engine().copy(Direction::kH2D, dst.data(), src.data(), 64, {}, "layer 4 storage qkv.out");
  EXPECT_FALSE(engine().query(ticket));
  try {
    engine().wait(ticket, kShortNs);
    ADD_FAILURE() << "no deadline";
  } catch (const DeadlineExceeded& error) {
    EXPECT_EQ(error.label(), "layer 4 storage qkv.out");
    EXPECT_THAT(error.what(), HasSubstr("H2D copy of layer 4 storage qkv.out did not end within"));
  }
  EXPECT_GE(engine().stats().wait_ns, kShortNs);
  subject_->hold(false);
  engine().wait(ticket);  // a deadline ends the wait, not the copy
}

TEST_P(TransferContract, FailureSurfacesAtEveryWait) {
  Bytes src(64), dst(64);
  subject_->fail_next(Direction::kD2H, "link down");
  const CopyTicket ticket = engine().copy(Direction::kD2H, dst.data(), src.data(), 64, {}, "x");
  for (int i = 0; i < 2; ++i) {
    try {
      engine().wait(ticket);
      ADD_FAILURE() << "no failure";
    } catch (const TransferFailed& error) {
      EXPECT_STREQ(error.what(), "D2H copy of x failed: link down");
    }
  }
  EXPECT_TRUE(engine().query(ticket));
  EXPECT_EQ(engine().stats().copied_bytes[0], 0);
  engine().wait(engine().copy(Direction::kD2H, dst.data(), src.data(), 64));  // the next one works
}

TEST_P(TransferContract, CopyBehindAFailedOneFailsToo) {
  Bytes src(64), host(64), dst(64);
  subject_->fail_next(Direction::kD2H, "link down");
  const CopyTicket out = engine().copy(Direction::kD2H, host.data(), src.data(), 64, {}, "x");
  const CopyTicket in = engine().copy(Direction::kH2D, dst.data(), host.data(), 64, out, "y");
  try {
    engine().wait(in);
    ADD_FAILURE() << "no failure";
  } catch (const TransferFailed& error) {
    EXPECT_STREQ(error.what(), "H2D copy of y failed: D2H copy of x failed: link down");
  }
}

TEST_P(TransferContract, CancelledCopyFailsAndFreesItsFollowers) {
  Bytes src(6400), host(6400), dst(6400);
  subject_->hold(true);
  const CopyTicket out = engine().copy(Direction::kD2H, host.data(), src.data(), 6400, {}, "x");
  const CopyTicket in = engine().copy(Direction::kH2D, dst.data(), host.data(), 6400, out, "y");
  engine().cancel(in);
  EXPECT_THROW(engine().wait(in), TransferFailed);
  engine().cancel(out);
  subject_->hold(false);
  EXPECT_THROW(engine().wait(out), TransferFailed);
  engine().cancel(out);  // ended: nothing to do
  engine().wait(engine().copy(Direction::kH2D, dst.data(), host.data(), 64));
}

TEST_P(TransferContract, DestructorFinishesEveryCopy) {
  const Bytes src = pattern(500, 3);
  Bytes host(500), dst(500);
  const CopyTicket out = engine().copy(Direction::kD2H, host.data(), src.data(), 500);
  engine().copy(Direction::kH2D, dst.data(), host.data(), 500, out);
  subject_->destroy();
  EXPECT_EQ(dst, src);
}

TEST_P(TransferContract, RejectsNonsense) {
  Bytes src(8), dst(8);
  EXPECT_THROW(engine().copy(Direction::kD2H, dst.data(), src.data(), -1), InternalError);
  EXPECT_THROW(engine().copy(Direction::kD2H, nullptr, src.data(), 8), InternalError);
  const CopyTicket never_issued{Direction::kH2D, 99};
  EXPECT_THROW(engine().copy(Direction::kD2H, dst.data(), src.data(), 8, never_issued),
               InternalError);
  EXPECT_THROW(engine().wait(never_issued), InternalError);
  EXPECT_THROW(engine().query(never_issued), InternalError);
}

TEST_P(TransferContract, DirectionsRunAtOnce) {
  // A D2H that waits for an H2D issued before it: one shared queue would do too, but the H2D
  // behind it must also pass it.
  const Bytes a = pattern(64, 1);
  Bytes b(64), c(64), d(64);
  const CopyTicket first = engine().copy(Direction::kH2D, b.data(), a.data(), 64);
  const CopyTicket second = engine().copy(Direction::kD2H, c.data(), b.data(), 64, first);
  const CopyTicket third = engine().copy(Direction::kH2D, d.data(), c.data(), 64, second);
  engine().wait(third);
  EXPECT_EQ(d, a);
}

TEST(CpuTransferEngine, WaitWithoutTimeoutEnds) {
  CpuTransferEngine cpu;
  TransferEngine& engine = cpu;
  const Bytes src = pattern(1 << 20, 5);
  Bytes dst(src.size());
  engine.wait(engine.copy(Direction::kD2H, dst.data(), src.data(), 1 << 20),
              TransferEngine::kNoTimeout);
  EXPECT_EQ(dst, src);
  EXPECT_GT(engine.stats().busy_ns[0], 0);
}

TEST(CpuTransferEngine, ThreadsShareIt) {
  CpuTransferEngine cpu;
  TransferEngine& engine = cpu;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&engine, t] {
      for (int i = 0; i < 50; ++i) {
        const Bytes src = pattern(256, t * 100 + i);
        Bytes host(256), dst(256);
        const CopyTicket out = engine.copy(Direction::kD2H, host.data(), src.data(), 256);
        engine.wait(engine.copy(Direction::kH2D, dst.data(), host.data(), 256, out));
        ASSERT_EQ(dst, src);
      }
    });
  }
  for (auto& each : threads) {
    each.join();
  }
}

TEST(FakeTransferEngine, TimeMovesOnlyWhenAskedTo) {
  Bytes src(8, 1), dst(8, 2);
  FakeTransferEngine fake({1, 1'000});
  TransferEngine& engine = fake;
  const CopyTicket ticket = engine.copy(Direction::kD2H, dst.data(), src.data(), 8);
  EXPECT_EQ(dst, Bytes(8, 0xCD));  // overwritten at issue, filled at the end
  fake.advance(1'000);
  EXPECT_TRUE(engine.query(ticket));
  EXPECT_EQ(fake.now_ns(), 1'000);
  EXPECT_EQ(dst, src);
}

TEST(FakeTransferEngine, EndlessWaitIsAnErrorInsteadOfAHang) {
  Bytes src(8), dst(8);  // before the engine, whose destructor still copies
  FakeTransferEngine fake;
  TransferEngine& engine = fake;
  fake.stall(Direction::kD2H, true);
  const CopyTicket ticket = engine.copy(Direction::kD2H, dst.data(), src.data(), 8);
  EXPECT_THROW(engine.wait(ticket, TransferEngine::kNoTimeout), InternalError);
}

}  // namespace
}  // namespace bagualu
