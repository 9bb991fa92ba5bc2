// Orders as text and pictures, and the check of an order that came from outside.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "bagualu/schedule/pipeline.h"

namespace bagualu {

/// One line per rank, passes separated by one space: "0F0 0F1 0B0 0B1\n1F0 ...\n".
std::string order_text(const PipelineOrder& order);

/// The exact inverse of order_text(); more spaces between passes are read too. Stages and
/// micro-batches are those that the largest numbers tell; nothing else is checked.
/// Throws:  InvalidInput(where, "line L, token T") for what is not a pass, and for no pass at all.
PipelineOrder parse_order(std::string_view text, const std::string& where);

/// What is wrong with an order, in one line that names a rank and a pass; nothing if it can run:
/// every micro-batch passes every stage forward once and backward once, whole or split, on one rank
/// each, reloads what it offloads, and no pass waits for one that comes after it.
/// Cost:    O(passes log passes), and no memory beyond what the listed passes need.
std::optional<std::string> order_fault(const PipelineOrder& order);
/// Also asks every pass to be where `kind` puts its stage.
std::optional<std::string> order_fault(const PipelineOrder& order, PipelineKind kind);

/// One row per rank, `columns` wide: "F12" begins the forward of micro-batch 12, "-" goes on with
/// it, "." is idle; f b i w r are the rank's stages above its lowest. Copies stand in rows of their
/// own below the rank's.
/// Requires: columns at least 1; run = simulate(order, ...).
std::string draw_order(const PipelineOrder& order, const PipelineRun& run, int columns = 100);

/// The same as a self-contained SVG, `width` pixels wide.
std::string draw_order_svg(const PipelineOrder& order, const PipelineRun& run, int width = 1200);

}  // namespace bagualu
