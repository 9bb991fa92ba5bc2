#include "bagualu/base/line_source.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "bagualu/base/error.h"

#ifdef BAGUALU_ZLIB
#include <zlib.h>
#endif

namespace bagualu {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 18;
constexpr const char* kReadable = "a readable text file, gzip file, or - for standard input";

int open_input(const std::filesystem::path& path, const std::string& name) {
  std::error_code status;
  if (path == "-") return ::dup(STDIN_FILENO);
  if (std::filesystem::is_directory(path, status)) {
    throw InvalidInput(name, "file", "a folder", kReadable);
  }
  return ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
}

}  // namespace

#ifdef BAGUALU_ZLIB

/// zlib passes plain text through.
struct LineSource::Input {
  gzFile file = nullptr;

  explicit Input(int descriptor) : file(::gzdopen(descriptor, "rb")) {
    if (file == nullptr) ::close(descriptor);
  }
  ~Input() {
    if (file != nullptr) ::gzclose(file);
  }
  bool open() const { return file != nullptr; }

  /// Bytes read; less than asked at the end or at damage, which is described in *damage.
  size_t read(char* bytes, size_t count, const std::string& name, std::string* damage) {
    const int got = ::gzread(file, bytes, static_cast<unsigned>(count));
    int status = Z_OK;
    const char* message = ::gzerror(file, &status);
    if (status == Z_ERRNO) throw InvalidInput(name, "file", std::strerror(errno), kReadable);
    if (got < 0) {
      *damage = message;
      return 0;
    }
    if (status == Z_BUF_ERROR) *damage = "the compressed data end early";
    return static_cast<size_t>(got);
  }
};

bool LineSource::reads_gzip() { return true; }

#else

struct LineSource::Input {
  int descriptor = -1;
  bool started = false;

  explicit Input(int opened) : descriptor(opened) {}
  ~Input() {
    if (descriptor >= 0) ::close(descriptor);
  }
  bool open() const { return descriptor >= 0; }

  size_t read(char* bytes, size_t count, const std::string& name, std::string*) {
    ssize_t got = 0;
    do {
      got = ::read(descriptor, bytes, count);
    } while (got < 0 && errno == EINTR);
    if (got < 0) throw InvalidInput(name, "file", std::strerror(errno), kReadable);
    const bool gzip = !started && got >= 2 && std::memcmp(bytes, "\x1f\x8b", 2) == 0;
    started = true;
    if (gzip) {
      throw InvalidInput(name, "file", "gzip data, and this program was built without zlib",
                         "plain text: gunzip -c FILE | bagualu ... -");
    }
    return static_cast<size_t>(got);
  }
};

bool LineSource::reads_gzip() { return false; }

#endif

LineSource::LineSource(const std::filesystem::path& path)
    : name_(path == "-" ? "standard input" : path.string()) {
  const int descriptor = open_input(path, name_);
  if (descriptor < 0) throw InvalidInput(name_, "file", std::strerror(errno), kReadable);
  input_ = std::make_unique<Input>(descriptor);
  if (!input_->open()) throw InvalidInput(name_, "file", "no memory to read it", kReadable);
}

LineSource::~LineSource() = default;

bool LineSource::fill() {
  if (at_end_) return false;
  buffer_.resize(kBufferBytes);
  buffer_.resize(input_->read(buffer_.data(), kBufferBytes, name_, &damage_));
  begin_ = 0;
  at_end_ = buffer_.empty();
  return !at_end_;
}

bool LineSource::take(std::string_view piece, bool ended, TextLine* line) {
  if (!piece.empty() && piece.back() == '\r') piece.remove_suffix(1);
  *line = {piece, ++number_, ended, cut_};
  cut_ = false;
  return true;
}

bool LineSource::next(TextLine* line) {
  line_.clear();
  for (;;) {
    if (begin_ == buffer_.size() && !fill()) {
      if (line_.empty()) return false;
      return take(line_, false, line);
    }
    const std::string_view rest = std::string_view(buffer_).substr(begin_);
    const size_t end = rest.find('\n');
    const std::string_view piece = rest.substr(0, end);
    begin_ += end == std::string_view::npos ? rest.size() : end + 1;
    if (line_.empty() && end != std::string_view::npos) return take(piece, true, line);
    const size_t room = kMaxLineBytes - line_.size();
    cut_ = cut_ || piece.size() > room;
    line_.append(piece.substr(0, room));
    if (end != std::string_view::npos) return take(line_, true, line);
  }
}

}  // namespace bagualu
