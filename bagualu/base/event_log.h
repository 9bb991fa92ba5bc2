#pragma once

#include <cstdio>
#include <filesystem>
#include <memory>

#include "bagualu/base/json.h"

namespace bagualu {

/// Writes one JSON object per line.
/// Ensures: a line reaches the operating system before write() returns, so after `kill -9` the file
///          holds every written event and at most one torn last line.
/// Threads: one writer at a time.
class EventLog {
 public:
  enum class Open { kTruncate, kAppend };

  /// Throws:  InvalidInput if the file cannot be opened for writing.
  EventLog(const std::filesystem::path& path, Open open);

  /// Requires: event is an object.
  /// Throws:  InvalidInput if the bytes cannot be written (disk full).
  void write(const Json& event);

 private:
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  std::filesystem::path path_;
  std::unique_ptr<std::FILE, Closer> file_;
};

}  // namespace bagualu
