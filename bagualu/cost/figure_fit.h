// Solves a few numbers of a machine from as many published figures of it, where no rows of
// measurements are to be had. What comes out is no better than the figures: everything else must
// be predicted with it, never fitted too.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/calibration.h"
#include "bagualu/cost/system.h"

namespace bagualu {

/// A published figure, positive, such as the MFU of a policy.
struct PublishedFigure {
  std::string name;
  double value = 0;
  double predicted = 0;  ///< with the fitted numbers
  double unfitted = 0;   ///< from the system as it was given
};

struct FigureFit {
  Json system;  ///< provenance "fitted", with "fit": numbers, figures, errors
  std::vector<FittedNumber> numbers;
  std::vector<PublishedFigure> figures;
  int64_t predictions = 0;
  /// All figures are met to kFigureTolerance. Otherwise the numbers are those that came closest: a
  /// bound was in the way, or the figures contradict the model.
  bool solved = false;
};

inline constexpr double kFigureTolerance = 0.002;  ///< of a figure

/// All figures on a machine, in their order.
using FigurePredictor = std::function<std::vector<double>(const SystemSpec&)>;

/// Newton's method on the logarithms, with differences of 5 % for derivatives, steps halved until
/// they help: the same on every machine.
/// Requires: as many keys as figures, predictions positive.
/// Throws:   InvalidInput if a key cannot be fitted, or the counts differ.
/// Cost:     some tens of predictions.
FigureFit fit_figures(const Json& system, const std::string& where,
                      const std::vector<std::string>& keys, std::vector<PublishedFigure> figures,
                      const FigurePredictor& predictor);

}  // namespace bagualu
