#include "bagualu/provision/stage_driver.h"

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/provision/rank_driver.h"

namespace bagualu {
namespace {

// Nothing is executed: the driver's own replay is all there is.
class LoadsHost final : public RankHost {
 public:
  LoadsHost(const ProvisionContext& context, const std::vector<std::vector<LayerLoad>>& loads)
      : context_(context), loads_(loads) {}

  void open(int slot, int, int microbatch) override {
    const auto at = static_cast<size_t>(slot);
    if (microbatch_.size() <= at) microbatch_.resize(at + 1);
    microbatch_[at] = microbatch;
  }
  void run(const RankTimeline&) override {}
  GateCounts counts(int slot, int layer) override {
    const auto microbatch = static_cast<size_t>(microbatch_[static_cast<size_t>(slot)]);
    const LayerLoad load = loads_[microbatch][static_cast<size_t>(layer)];
    return {load, static_cast<double>(load.rows) /
                      static_cast<double>(std::max<int64_t>(1, context_.balanced.rows))};
  }
  bool agree(bool mine) override { return mine; }
  void close(int) override {}

 private:
  const ProvisionContext& context_;
  const std::vector<std::vector<LayerLoad>>& loads_;
  std::vector<int> microbatch_;  ///< by slot
};

}  // namespace

RankRun drive_stage(const ProvisionContext& context, Policy& policy, const PipelineOrder& order,
                    int rank, const std::vector<std::vector<LayerLoad>>& loads,
                    const StageOptions& options) {
  BGL_CHECK(rank >= 0 && rank < static_cast<int>(order.ranks.size()), rank, order.ranks.size());
  BGL_CHECK(static_cast<int>(loads.size()) == order.microbatches, loads.size(), order.microbatches);
  for (const auto& layers : loads) {
    BGL_CHECK(static_cast<int>(layers.size()) == context.graph->layers, layers.size());
  }
  const std::vector<PipelinePass>& passes = order.ranks[static_cast<size_t>(rank)];
  BGL_CHECK(!passes.empty(), rank);
  LoadsHost host(context, loads);
  RankDriver driver({{passes.front().stage, &context, &policy}},
                    {.activation_budget_bytes = context.activation_budget_bytes,
                     .host_budget_bytes = context.host_budget_bytes,
                     .stop_at_death = options.stop_at_death},
                    host);
  return driver.run({.passes = passes});
}

}  // namespace bagualu
