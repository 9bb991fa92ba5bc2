#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

namespace bagualu {

/// Compares `text` byte by byte with tests/golden/<name>. With BAGUALU_UPDATE_GOLDEN=1 in the
/// environment the file is written instead; look at its diff before you commit it.
inline void expect_golden(const std::string& name, const std::string& text) {
  const std::string path = std::string(BAGUALU_SOURCE_DIR "/tests/golden/") + name;
  if (std::getenv("BAGUALU_UPDATE_GOLDEN") != nullptr) {
    std::ofstream(path, std::ios::binary) << text;
    return;
  }
  std::ifstream file(path, std::ios::binary);
  ASSERT_TRUE(file) << path << " is missing";
  const std::string golden{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  EXPECT_EQ(text, golden) << path;
}

}  // namespace bagualu
