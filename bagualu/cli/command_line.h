// The program `bagualu`. Start here: run() finds the subcommand by name in one table; every
// subcommand is one file that parses, calls and prints.
//
// Glossary
//   exit code   0 done; 1 the job itself failed; 2 bad input; 3 infeasible, with the missing bytes.
// Invariants
//   Results go to `out`, complaints to `err`, one readable line each. Only train, profile, report
//   and generate leave this process: they start Python in its place.
#pragma once

#include <ostream>
#include <string>
#include <vector>

namespace bagualu {

inline constexpr int kExitDone = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitBadInput = 2;
inline constexpr int kExitInfeasible = 3;

/// Where a subcommand prints.
struct Streams {
  std::ostream& out;
  std::ostream& err;
};

/// Runs one command line (without the program's name) and returns its exit code.
/// Throws nothing: every exception becomes one line on `err`.
int run(const std::vector<std::string>& arguments, const Streams& streams);

}  // namespace bagualu
