#include "bagualu/cli/progress_line.h"

#include <gtest/gtest.h>

#include <csignal>
#include <sstream>

#include "bagualu/cli/interrupt.h"

namespace bagualu {
namespace {

TEST(ProgressLine, SaysWhatIsLeftAndClearsItself) {
  double now = 0;
  std::ostringstream out;
  {
    ProgressLine line(out, true, 100, [&] { return now; });
    now = 10;
    line.show("working", 20);  // 80 left at 2 a second
    EXPECT_EQ(out.str(), "\rworking, about 40 s left");
    now = 10.05;
    line.show("too soon", 21);
    EXPECT_EQ(out.str(), "\rworking, about 40 s left");
  }
  EXPECT_EQ(out.str(), "\rworking, about 40 s left\r" + std::string(24, ' ') + "\r");
}

TEST(ProgressLine, IsSilentWhereNobodyLooks) {
  std::ostringstream out;
  ProgressLine line(out, false, 100);
  line.show("working", 20);
  line.clear();
  EXPECT_EQ(out.str(), "");
  EXPECT_FALSE(is_terminal(out));
}

TEST(ProgressLine, DurationsAreShort) {
  EXPECT_EQ(duration_text(0.2), "1 s");
  EXPECT_EQ(duration_text(185), "3 min 5 s");
  EXPECT_EQ(duration_text(3720), "1 h 2 min");
}

TEST(InterruptGuard, TakesOneSignalAndGivesTheOldHandlersBack) {
  struct sigaction before = {};
  sigaction(SIGINT, nullptr, &before);
  {
    const InterruptGuard guard;
    EXPECT_EQ(InterruptGuard::signal(), 0);
    std::raise(SIGINT);
    EXPECT_EQ(InterruptGuard::signal(), SIGINT);
    struct sigaction now = {};
    sigaction(SIGINT, nullptr, &now);
    EXPECT_EQ(now.sa_handler, SIG_DFL) << "the second one ends the program";
  }
  struct sigaction after = {};
  sigaction(SIGINT, nullptr, &after);
  EXPECT_EQ(after.sa_handler, before.sa_handler);
}

}  // namespace
}  // namespace bagualu
