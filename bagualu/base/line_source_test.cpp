#include "bagualu/base/line_source.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <fstream>
#include <string>
#include <vector>

#include "bagualu/base/error.h"

#ifdef BAGUALU_ZLIB
#include <zlib.h>
#endif

namespace bagualu {
namespace {

namespace fs = std::filesystem;

class LineSourceTest : public testing::Test {
 protected:
  fs::path write(const std::string& text) const {
    const fs::path path =
        fs::path(testing::TempDir()) /
        (std::string(testing::UnitTest::GetInstance()->current_test_info()->name()) + ".txt");
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  static std::vector<std::string> lines_of(const fs::path& path, std::string* damage = nullptr) {
    LineSource source(path);
    std::vector<std::string> lines;
    for (TextLine line; source.next(&line);) {
      EXPECT_EQ(line.number, static_cast<int64_t>(lines.size()) + 1);
      lines.emplace_back(line.text);
    }
    if (damage != nullptr) *damage = source.damage();
    return lines;
  }
};

TEST_F(LineSourceTest, StripsLineEndsAndNumbersFromOne) {
  EXPECT_EQ(lines_of(write("a\n\nb\r\nc\n")), (std::vector<std::string>{"a", "", "b", "c"}));
  EXPECT_TRUE(lines_of(write("")).empty());
}

TEST_F(LineSourceTest, SaysWhetherTheLastLineHasAnEnd) {
  LineSource source(write("a\nb"));
  TextLine line;
  ASSERT_TRUE(source.next(&line));
  EXPECT_TRUE(line.ended);
  ASSERT_TRUE(source.next(&line));
  EXPECT_EQ(line.text, "b");
  EXPECT_FALSE(line.ended);
  EXPECT_FALSE(source.next(&line));
}

TEST_F(LineSourceTest, JoinsLinesThatCrossTheBuffer) {
  // Lines of 100,001 bytes against a buffer of 262,144: the third begins in one and ends in another
  std::string text;
  for (char c = 'a'; c < 'h'; ++c) text += std::string(100'000, c) + "\n";
  const std::vector<std::string> lines = lines_of(write(text));
  ASSERT_EQ(lines.size(), 7U);
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(lines[i], std::string(100'000, static_cast<char>('a' + i)));
  }
}

TEST_F(LineSourceTest, CutsALineWithoutEnd) {
  LineSource source(write(std::string(LineSource::kMaxLineBytes + 5, 'x') + "\nshort\n"));
  TextLine line;
  ASSERT_TRUE(source.next(&line));
  EXPECT_TRUE(line.too_long);
  EXPECT_EQ(line.text.size(), LineSource::kMaxLineBytes);
  ASSERT_TRUE(source.next(&line));
  EXPECT_EQ(line.text, "short");
  EXPECT_FALSE(line.too_long);
}

TEST_F(LineSourceTest, RefusesWhatIsNoFile) {
  EXPECT_THROW(LineSource(fs::path(testing::TempDir()) / "absent.log"), InvalidInput);
  EXPECT_THROW(LineSource(fs::path(testing::TempDir())), InvalidInput);
}

#ifdef BAGUALU_ZLIB

TEST_F(LineSourceTest, ReadsGzipAndKeepsWhatStandsBeforeDamage) {
  const fs::path path = fs::path(testing::TempDir()) / "lines.gz";
  std::string text;  // does not compress to nothing: a cut leaves whole lines before it
  for (int i = 0; i < 20'000; ++i) text += std::to_string(i * 7919 % 100'003) + "\n";
  gzFile file = gzopen(path.c_str(), "wb");
  ASSERT_NE(file, nullptr);
  ASSERT_EQ(gzwrite(file, text.data(), static_cast<unsigned>(text.size())),
            static_cast<int>(text.size()));
  ASSERT_EQ(gzclose(file), Z_OK);
  std::string damage;
  const std::vector<std::string> whole = lines_of(path, &damage);
  EXPECT_EQ(whole.size(), 20'000U);
  EXPECT_EQ(whole[3], "23757");
  EXPECT_EQ(damage, "");

  fs::resize_file(path, fs::file_size(path) / 2);
  const std::vector<std::string> half = lines_of(path, &damage);
  EXPECT_EQ(damage, "the compressed data end early");
  ASSERT_GT(half.size(), 5'000U);
  ASSERT_LT(half.size(), 15'000U);
  for (size_t i = 0; i + 1 < half.size(); ++i) ASSERT_EQ(half[i], whole[i]);
}

#endif

}  // namespace
}  // namespace bagualu
