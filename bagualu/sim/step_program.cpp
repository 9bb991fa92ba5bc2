#include "bagualu/sim/step_program.h"

#include <array>

namespace bagualu {

std::string_view sim_stream_name(SimStream stream) {
  static constexpr std::array<std::string_view, kSimStreams> kNames = {
      "compute", "comm", "d2h", "h2d", "send", "receive"};
  return kNames[static_cast<size_t>(stream)];
}

}  // namespace bagualu
