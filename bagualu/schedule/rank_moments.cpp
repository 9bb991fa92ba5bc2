#include "bagualu/schedule/rank_moments.h"

#include <algorithm>

namespace bagualu {
namespace {

bool same_place(const RankMoment& a, const RankMoment& b) {
  return a.pass.stage == b.pass.stage && a.pass.kind == b.pass.kind &&
         a.backward_seen == b.backward_seen && a.last_forward == b.last_forward;
}

bool holds_no_more(const RankMoment& a, const RankMoment& b) {
  return std::equal(a.resident.begin(), a.resident.end(), b.resident.begin(),
                    [](int mine, int other) { return mine <= other; });
}

/// Adds `moment` unless one at its place holds as much; drops those that it exceeds.
void keep(std::vector<RankMoment>* moments, const RankMoment& moment) {
  for (const RankMoment& known : *moments) {
    if (same_place(moment, known) && holds_no_more(moment, known)) return;
  }
  std::erase_if(*moments, [&](const RankMoment& known) {
    return same_place(known, moment) && holds_no_more(known, moment);
  });
  moments->push_back(moment);
}

}  // namespace

std::vector<RankMoment> rank_moments(const std::vector<PipelinePass>& passes, int stages) {
  std::vector<RankMoment> moments;
  RankMoment now;
  now.resident.assign(static_cast<size_t>(stages), 0);
  for (const PipelinePass& pass : passes) {
    now.pass = pass;
    if (pass.kind != PassKind::kWeightGrad) keep(&moments, now);
    int& resident = now.resident[static_cast<size_t>(pass.stage)];
    if (pass.kind == PassKind::kForward) {
      ++resident;
      now.last_forward = pass.stage;
    } else {
      now.backward_seen = true;
      if (pass.kind != PassKind::kInputGrad) --resident;
    }
  }
  return moments;
}

}  // namespace bagualu
