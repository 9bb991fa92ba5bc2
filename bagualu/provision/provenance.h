#pragma once

#include <string>
#include <vector>

#include "bagualu/graph/graph.h"

namespace bagualu {

/// What makes bytes of a graph uncountable, under any plan; empty for a sound one. Rules:
///   a storage is created by one operator, listed once, by the unit it names, and has a name of its
///   own, so that its bytes are counted once;
///   operators read only what an earlier one created, so that a rebuild ends;
///   a storage is derived only from an older one: a cast or gather never restores its origin;
///   views of persistent memory are in pinned units and have no bytes of their own.
/// Works on any graph, also one with indices out of range; these are named and nothing else is.
std::vector<std::string> provenance_violations(const Graph& graph);

}  // namespace bagualu
