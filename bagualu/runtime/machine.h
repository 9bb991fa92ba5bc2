#pragma once

#include "bagualu/cost/profile.h"

namespace bagualu {

/// The machine, threads and torch that this process runs on.
MachineKey this_machine();

}  // namespace bagualu
