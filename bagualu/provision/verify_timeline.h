#pragma once

#include <string>
#include <vector>

#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// Checks that a whole micro-batch's actions can be carried out, whatever made them: operators in
/// order and once each, inputs there when read, nothing given up that is pinned, persistent or
/// needed again, no bytes returned while a copy of them is under way, no collective and no routing
/// run again, every storage and host copy returned at the end.
///
/// Shares no code with schedule/timeline.cpp. Plans may have changed at the gates. A storage of a
/// kInPieces unit that no action names was never whole.
/// Returns: one line per violation, in order, "action 17 (free layer2.rows): ...". After one, the
///          storage counts as the action says, so that one mistake does not cause many.
/// Requires: a graph without provenance_violations().
std::vector<std::string> verify_timeline(const Graph& graph, const Timeline& timeline);

}  // namespace bagualu
