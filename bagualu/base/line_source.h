#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace bagualu {

/// One line of a text, without its line end (LF or CR LF).
struct TextLine {
  std::string_view text;  ///< valid until the next call
  int64_t number = 0;     ///< from 1
  bool ended = true;      ///< false: the last one, without a line end
  bool too_long = false;  ///< over kMaxLineBytes; text is its beginning
};

/// Reads a text line by line without holding it: a file, plain or gzip, or standard input ("-").
/// Memory: at most kMaxLineBytes and a buffer, whatever the file.
/// Throws:  InvalidInput from the constructor and next() if the file cannot be read.
class LineSource {
 public:
  static constexpr size_t kMaxLineBytes = size_t{4} << 20;

  explicit LineSource(const std::filesystem::path& path);
  ~LineSource();
  LineSource(const LineSource&) = delete;
  LineSource& operator=(const LineSource&) = delete;

  /// False at the end.
  bool next(TextLine* line);

  /// Not empty if compressed data ended early or are damaged: what was read before is good.
  const std::string& damage() const { return damage_; }

  /// False if this program was built without zlib.
  static bool reads_gzip();

 private:
  struct Input;

  bool fill();
  bool take(std::string_view piece, bool ended, TextLine* line);

  std::string name_;
  std::unique_ptr<Input> input_;
  std::string buffer_;
  size_t begin_ = 0;  ///< of what next() has not returned yet
  std::string line_;  ///< a line that crosses the buffer's end
  bool cut_ = false;  ///< line_ is full, its rest is skipped
  bool at_end_ = false;
  int64_t number_ = 0;
  std::string damage_;
};

}  // namespace bagualu
