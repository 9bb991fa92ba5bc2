// Files of Megatron's arguments: any bytes are read or refused with InvalidInput that names place
// and field in one line, and a job that was read and can be written reads back the same. The first
// line of an input is its format.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/model/megatron_args.h"
#include "bagualu/model/megatron_flags.h"

namespace {

using bagualu::InvalidInput;
using bagualu::Job;

/// Words of the flags that this job needs; none if Megatron has none for it.
std::vector<std::string> flags_of(const Job& job) {
  try {
    return bagualu::megatron_flags(job, "written");
  } catch (const InvalidInput&) {
    return {};
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(all.find('\n'), all.size());
  const std::string_view text = all.substr(std::min(end + 1, all.size()));
  Job job;
  try {
    job = bagualu::parse_megatron_args(text, all.substr(0, end), "args",
                                       {.world_size = 64, .vocab = 32000})
              .job;
  } catch (const InvalidInput& error) {
    const std::string_view message = error.what();
    BGL_CHECK(error.where() == "args" && !error.field().empty() &&
                  message.find('\n') == std::string_view::npos,
              error.what());
    return 0;
  }
  const std::vector<std::string> flags = flags_of(job);
  if (flags.empty()) return 0;
  BGL_CHECK(bagualu::check_exclusions(flags).empty(), bagualu::megatron_flags_text(job));
  const Job back = bagualu::megatron_job_from_words(flags, "written", {.world_size = 64}).job;
  BGL_CHECK(back == job, bagualu::megatron_flags_text(job), bagualu::megatron_flags_text(back));
  return 0;
}
