#include "bagualu/base/event_log.h"

#include <cerrno>
#include <cstring>
#include <string>

#include "bagualu/base/error.h"

namespace bagualu {

EventLog::EventLog(const std::filesystem::path& path, Open open)
    : path_(path), file_(std::fopen(path.c_str(), open == Open::kAppend ? "abe" : "wbe")) {
  if (file_ == nullptr) {
    throw InvalidInput(path.string(), "log", std::strerror(errno), "a writable file");
  }
}

void EventLog::write(const Json& event) {
  BGL_CHECK(event.is_object(), event.type_name());
  const std::string line = event.dump(-1, ' ', true) + "\n";
  const size_t written = std::fwrite(line.data(), 1, line.size(), file_.get());
  if (written != line.size() || std::fflush(file_.get()) != 0) {
    throw InvalidInput(path_.string(), "log", std::strerror(errno), "room on the disk");
  }
}

}  // namespace bagualu
