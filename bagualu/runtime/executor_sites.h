#pragma once

namespace bagualu {

/// The two places of a layer that draw dropout masks; part of the seed.
enum DropoutSite : int { kAfterAttention = 0, kAfterMlp = 1 };

/// No place: the gradient has been masked already.
inline constexpr int kMasked = -1;

}  // namespace bagualu
