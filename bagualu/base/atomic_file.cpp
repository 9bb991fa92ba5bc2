#include "bagualu/base/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

/// A file descriptor that closes itself, and a temporary file that removes itself unless kept.
class TemporaryFile {
 public:
  TemporaryFile(std::string path, const std::filesystem::path& target)
      : path_(std::move(path)), target_(target) {
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (descriptor_ < 0) fail("a writable folder");
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!kept_) ::unlink(path_.c_str());
  }

  void write_and_sync(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("room on the disk");
      bytes.remove_prefix(static_cast<size_t>(written));
    }
    if (::fsync(descriptor_) != 0) fail("room on the disk");
    const int closed = ::close(descriptor_);
    descriptor_ = -1;
    if (closed != 0) fail("room on the disk");
  }

  void rename_to_target() {
    if (::rename(path_.c_str(), target_.c_str()) != 0) fail("a replaceable file");
    kept_ = true;
  }

 private:
  [[noreturn]] void fail(const char* allowed) {
    const std::string reason = std::strerror(errno);
    // The destructor does not run when the constructor throws; then there is no file either.
    throw InvalidInput(target_.string(), "write", reason, allowed);
  }

  std::string path_;
  const std::filesystem::path& target_;
  int descriptor_ = -1;
  bool kept_ = false;
};

/// A pipe or a device: a rename would put a file in its place.
bool is_special(const std::filesystem::path& path) {
  std::error_code missing;
  const auto status = std::filesystem::status(path, missing);
  return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status) &&
         !std::filesystem::is_directory(status);
}

void write_in_place(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream stream(path, std::ios::binary);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  stream.flush();
  if (!stream) throw InvalidInput(path.string(), "write", std::strerror(errno), "room for it");
}

/// A link stays one: what it names is replaced.
std::filesystem::path named_by(const std::filesystem::path& link) {
  std::error_code missing;
  std::filesystem::path named = std::filesystem::canonical(link, missing);
  return missing ? link : named;
}

/// The process id keeps two ranks that write the same file from sharing one temporary.
std::string temporary_name(const std::filesystem::path& path) {
  return path.string() + ".tmp." + std::to_string(::getpid());
}

}  // namespace

void check_writable(const std::filesystem::path& link) {
  const std::filesystem::path path = named_by(link);
  if (std::error_code status; std::filesystem::is_directory(path, status)) {
    throw InvalidInput(path.string(), "write", "a folder", "a file");
  }
  if (!is_special(path)) TemporaryFile(temporary_name(path), path);
}

void write_file_atomic(const std::filesystem::path& link, std::string_view bytes) {
  const std::filesystem::path path = named_by(link);
  if (is_special(path)) return write_in_place(path, bytes);
  TemporaryFile temporary(temporary_name(path), path);
  temporary.write_and_sync(bytes);
  temporary.rename_to_target();

  // Without this a power cut may undo the rename although the data is on the disk.
  const std::string folder = path.has_parent_path() ? path.parent_path().string() : ".";
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) {
    throw InvalidInput(path.string(), "write", std::strerror(errno), "a readable folder");
  }
  const int synced = ::fsync(descriptor);
  const int reason = errno;
  ::close(descriptor);
  // Some network file systems cannot sync a folder; their rename is durable on its own terms.
  if (synced != 0 && reason != EINVAL && reason != ENOTSUP) {
    throw InvalidInput(path.string(), "write", std::strerror(reason), "a folder that syncs");
  }
}

}  // namespace bagualu
