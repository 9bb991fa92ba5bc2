#include <iostream>
#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  const int code = bagualu::run(arguments, {std::cout, std::cerr});
  // A full disk shows only when the buffer is written; a cut table must not look like success.
  if (!std::cout.flush()) {
    std::cerr << "bagualu: standard output: cannot be written\n";
    return code == bagualu::kExitDone ? bagualu::kExitFailed : code;
  }
  return code;
}
