#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/routing_cells.h"
#include "bagualu/model/routing_source.h"
#include "bagualu/model/routing_trace.h"

namespace bagualu {
namespace {

/// `counts` scaled to a sum of `sum`, none above largest: whole parts first, then one row each by
/// the largest remainder, then what is cut off at the top goes to the ranks below it, evenly.
/// Without any rows: evenly. Requires: ranks * largest >= sum.
void scale_cell(const int64_t* counts, int64_t ranks, int64_t sum, int64_t largest, int32_t* out) {
  int64_t total = 0;
  for (int64_t r = 0; r < ranks; ++r) total += counts[r];
  std::vector<std::pair<int64_t, int64_t>> remainders;  // negative remainder, rank
  int64_t left = sum;
  for (int64_t r = 0; r < ranks; ++r) {
    // Both are below 2^37 * 2^20 in any trace that can be read; 128 bits are for those that are
    // not.
    const __int128 share = total == 0 ? __int128{sum} : __int128{counts[r]} * sum;
    const __int128 parts = total == 0 ? ranks : total;
    const auto rows = static_cast<int64_t>(share / parts);
    remainders.emplace_back(-static_cast<int64_t>(share % parts), r);
    out[r] = static_cast<int32_t>(std::min(rows, largest));
    left -= out[r];
  }
  std::sort(remainders.begin(), remainders.end());
  while (left > 0) {
    for (const auto& [remainder, rank] : remainders) {
      if (left == 0) break;
      if (out[rank] >= largest) continue;
      const int64_t part = std::clamp<int64_t>(left / ranks, 1, largest - out[rank]);
      out[rank] += static_cast<int32_t>(part);
      left -= part;
    }
  }
}

/// Rows of all steps.
struct Recorded {
  struct Step {
    int64_t first = 0;  ///< micro-batches of the steps before
    int64_t microbatches = 0;
    size_t first_cell = 0;
    size_t end_cell = 0;
  };

  std::vector<Step> steps;
  int64_t parts = 1;  ///< expert groups in the trace
  /// [step][part][micro-batch of the step][layer][rank]
  std::vector<int32_t> rows;
};

class RecordedBuilder {
 public:
  RecordedBuilder(const RoutingTrace& trace, const RoutingGroup& group)
      : group_(group), cells_(trace, {}) {}

  Recorded build(const std::string& where) {
    find_layers(where);
    find_steps();
    int64_t microbatches = 0;
    for (const Step& step : result_.steps) microbatches += step.microbatches;
    result_.rows.resize(
        static_cast<size_t>(microbatches * result_.parts * group_.layers * group_.ranks));
    for (const Step& step : result_.steps) fill_step(step);
    return std::move(result_);
  }

 private:
  using Step = Recorded::Step;

  void find_layers(const std::string& where) {
    for (const auto& [layer, ranks] : cells_.ranks_of_layer()) {
      if (static_cast<int64_t>(layers_.size()) == group_.layers) break;
      const auto found = static_cast<int64_t>(ranks.size());
      if (found < group_.ranks || found % group_.ranks != 0) {
        throw InvalidInput(where, "ranks", fmt::format("{} in layer {}", found, layer),
                           fmt::format("{} of one expert group, or a multiple", group_.ranks));
      }
      const int64_t parts = found / group_.ranks;
      result_.parts = layers_.empty() ? parts : std::min(result_.parts, parts);
      layers_[layer] = static_cast<int64_t>(layers_.size());
    }
    if (static_cast<int64_t>(layers_.size()) < group_.layers) {
      throw InvalidInput(where, "layers", fmt::format("{} with experts", layers_.size()),
                         fmt::format("at least {}, those of the model", group_.layers));
    }
  }

  void find_steps() {
    const std::vector<RoutedCell>& cells = cells_.cells();
    for (size_t first = 0; first < cells.size();) {
      Step step;
      step.first_cell = first;
      if (!result_.steps.empty()) {
        step.first = result_.steps.back().first + result_.steps.back().microbatches;
      }
      size_t next = first;
      for (; next < cells.size() && cells[next].step() == cells[first].step(); ++next) {
        if (next == first || cells[next].microbatch() != cells[next - 1].microbatch()) {
          ++step.microbatches;
        }
      }
      step.end_cell = next;
      result_.steps.push_back(step);
      first = next;
    }
  }

  /// Counts of every rank of a layer: of complete cells as they are, of others the sums over the
  /// step's complete ones (none: no rows, which scale_cell() spreads evenly).
  void fill_step(const Step& step) {
    std::vector<std::vector<int64_t>> sums(layers_.size());
    for (const auto& [layer, place] : layers_) {
      sums[static_cast<size_t>(place)].resize(cells_.ranks_of_layer().at(layer).size());
    }
    std::vector<const RoutedCell*> found(static_cast<size_t>(step.microbatches) * layers_.size());
    int64_t m = -1;
    for (size_t i = step.first_cell; i < step.end_cell; ++i) {
      const RoutedCell& cell = cells_.cells()[i];
      if (i == step.first_cell || cell.microbatch() != cells_.cells()[i - 1].microbatch()) ++m;
      const auto layer = layers_.find(cell.layer());
      if (layer == layers_.end() || !cell.complete) continue;
      found[static_cast<size_t>(m * group_.layers + layer->second)] = &cell;
      add_counts(cell, &sums[static_cast<size_t>(layer->second)]);
    }
    for (size_t i = 0; i < found.size(); ++i) {
      const size_t layer = i % layers_.size();
      std::vector<int64_t> counts(sums[layer].size());
      if (found[i] != nullptr) add_counts(*found[i], &counts);
      write_cell(step, static_cast<int64_t>(i / layers_.size()), static_cast<int64_t>(layer),
                 found[i] != nullptr ? counts : sums[layer]);
    }
  }

  void add_counts(const RoutedCell& cell, std::vector<int64_t>* counts) const {
    const std::vector<int32_t>& ranks = cells_.ranks_of_layer().at(cell.layer());
    for (const RoutedRecord* r = cell.begin; r != cell.end; ++r) {
      const auto at = std::lower_bound(ranks.begin(), ranks.end(), r->rank);
      if (at != ranks.end() && *at == r->rank) {
        (*counts)[static_cast<size_t>(at - ranks.begin())] += r->tokens;
      }
    }
  }

  void write_cell(const Step& step, int64_t microbatch, int64_t layer,
                  const std::vector<int64_t>& counts) {
    for (int64_t part = 0; part < result_.parts; ++part) {
      const int64_t row = step.first * result_.parts + part * step.microbatches + microbatch;
      scale_cell(counts.data() + part * group_.ranks, group_.ranks,
                 group_.ranks * group_.balanced_rows, group_.largest_rows,
                 result_.rows.data() + (row * group_.layers + layer) * group_.ranks);
    }
  }

  const RoutingGroup& group_;
  const RoutedCells cells_;
  std::map<int32_t, int64_t> layers_;  ///< as the trace numbers them -> place
  Recorded result_;
};

class RecordedSource : public RoutingSource {
 public:
  RecordedSource(Recorded recorded, const RoutingGroup& group)
      : recorded_(std::move(recorded)), group_(group) {}

  std::string_view name() const override { return "recorded"; }

  void rows(int64_t iteration, int64_t replica, const RoutingGroup& group,
            std::vector<int32_t>* rows) const override {
    BGL_CHECK(group.ranks == group_.ranks && group.layers == group_.layers &&
                  group.balanced_rows == group_.balanced_rows,
              group.ranks, group.layers, group.balanced_rows);
    const int64_t cell = group.layers * group.ranks;
    rows->resize(static_cast<size_t>(group.microbatches * cell));
    const Recorded::Step& step =
        recorded_.steps[static_cast<size_t>((iteration + offset(replica)) % steps())];
    const int64_t row =
        step.first * recorded_.parts + replica % recorded_.parts * step.microbatches;
    for (int64_t m = 0; m < group.microbatches; ++m) {
      std::copy_n(recorded_.rows.data() + (row + m % step.microbatches) * cell, cell,
                  rows->data() + m * cell);
    }
  }

 private:
  int64_t steps() const { return static_cast<int64_t>(recorded_.steps.size()); }

  /// Spread over the trace as multiples of the golden ratio are; the parts of one trace stay at
  /// the same iteration.
  int64_t offset(int64_t replica) const {
    const auto round = static_cast<uint64_t>(replica / recorded_.parts);
    const uint64_t place = (round * 0x9e3779b97f4a7c15ULL) >> 32;
    return static_cast<int64_t>((place * static_cast<uint64_t>(steps())) >> 32);
  }

  Recorded recorded_;
  RoutingGroup group_;
};

}  // namespace

std::unique_ptr<RoutingSource> recorded_source(RoutingTrace trace, const RoutingGroup& group,
                                               const std::string& where) {
  BGL_CHECK(group.ranks >= 1 && group.layers >= 1, group.ranks, group.layers);
  BGL_CHECK(group.largest_rows >= group.balanced_rows && group.largest_rows <= INT32_MAX,
            group.largest_rows);
  if (trace.records.empty()) {
    throw InvalidInput(where, "records", "none", "a trace with rows of at least one step");
  }
  if (std::all_of(trace.records.begin(), trace.records.end(),
                  [](const RoutedRecord& record) { return record.tokens == 0; })) {
    throw InvalidInput(where, "tokens", "0 in every record", "a trace in which somebody gets rows");
  }
  if (trace.per_expert) trace = fold_experts(trace, group.ranks, where, "ranks of an expert group");
  return std::make_unique<RecordedSource>(RecordedBuilder(trace, group).build(where), group);
}

}  // namespace bagualu
