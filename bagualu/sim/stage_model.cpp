#include "bagualu/sim/stage_model.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/cost/job_cost.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/sim/pipeline_rank.h"

namespace bagualu {
namespace {

// The prices of JobCost: its links, and messages as long as it says.
SimLinks links_of(const Job& job, const SystemSpec& system, int64_t message_bytes) {
  const JobCost cost(job, system);
  SimLinks links;
  links.node_size = system.node_size;
  links.ranks_between = job.layout.etp;
  links.node_bytes_per_s = cost.links().ep_node_bytes_per_s;
  links.network_bytes_per_s = cost.links().ep_network_bytes_per_s;
  links.latency_ns = system.collective_latency_ns;
  links.message_latency_ns = system.collective_latency_ns;
  const double message_ns = cost.send_ns() - static_cast<double>(system.collective_latency_ns);
  links.message_bytes_per_s = job.layout.pp > 1
                                  ? static_cast<double>(message_bytes) * 1e9 / message_ns
                                  : cost.links().pp_bytes_per_s;
  links.d2h_bytes_per_s = system.d2h_bytes_per_s;
  links.h2d_bytes_per_s = system.h2d_bytes_per_s;
  return links;
}

// Programs of some hundred KiB each. All ranks with some levels and ways to vote fit.
constexpr size_t kMostKept = 512;

}  // namespace

class StageModel::Impl {
 public:
  Impl(const Job& job, const SystemSpec& system, const SimPolicy& policy, int64_t budget_bytes,
       int64_t host_budget_bytes)
      : plan_(job, system, policy, budget_bytes, host_budget_bytes),
        links_(links_of(job, system, plan_.message_bytes)) {
    const JobMemory memory(job);
    for (int r = 0; r < job.layout.pp; ++r) {
      ranks_.push_back(std::make_unique<PipelineRank>(plan_, memory, r));
    }
  }

  const PipelinePlan& plan() const { return plan_; }
  const SimLinks& links() const { return links_; }
  PipelineRank& rank(int pp_rank) const { return *ranks_[static_cast<size_t>(pp_rank)]; }
  int64_t members() const { return plan_.job.model.has_moe() ? plan_.job.layout.ep : 1; }

  std::vector<RankOutcome> group(int pp_rank, const int32_t* rows,
                                 const std::vector<double>& levels);

 private:
  /// Cells in which the hottest rank is above the threshold of a policy that looks at nothing else.
  using Triggered = std::vector<bool>;
  using LevelKey = std::tuple<int, int32_t, Triggered, std::vector<bool>>;

  std::vector<double> hottest(int pp_rank, const int32_t* rows) const;
  Triggered triggered(const std::vector<double>& imbalance) const;
  std::vector<int32_t> level_rows(const std::vector<double>& levels) const;
  std::vector<int32_t> member_levels(int pp_rank, const int32_t* rows,
                                     const std::vector<int32_t>& levels) const;
  const RankOutcome& at_level(int pp_rank, int32_t level, const Triggered& triggered,
                              const std::vector<double>& imbalance, const std::vector<bool>& votes);
  bool agree(const std::vector<RankOutcome>& members, std::vector<bool>& agreed) const;

  const PipelinePlan plan_;
  const SimLinks links_;
  std::vector<std::unique_ptr<PipelineRank>> ranks_;
  std::map<LevelKey, RankOutcome> kept_;
};

std::vector<double> StageModel::Impl::hottest(int pp_rank, const int32_t* rows) const {
  const auto balanced = static_cast<double>(std::max<int64_t>(1, plan_.balanced.rows));
  std::vector<double> imbalance(static_cast<size_t>(rank(pp_rank).cells()));
  for (size_t cell = 0; cell < imbalance.size(); ++cell) {
    const int32_t* of = rows + static_cast<int64_t>(cell) * members();
    imbalance[cell] = static_cast<double>(*std::max_element(of, of + members())) / balanced;
  }
  return imbalance;
}

StageModel::Impl::Triggered StageModel::Impl::triggered(
    const std::vector<double>& imbalance) const {
  Triggered cells;
  if (plan_.policy.policy != "threshold") return cells;
  for (const double one : imbalance) cells.push_back(one > plan_.policy.options.threshold);
  return cells;
}

// Rising. Above its buffers "retry" gives up at once, so no rank there stands for another.
std::vector<int32_t> StageModel::Impl::level_rows(const std::vector<double>& levels) const {
  std::vector<int32_t> rows;
  for (const double level : levels) {
    if (plan_.policy.policy == "retry" && level > plan_.policy.options.retry_factor) continue;
    const double scaled = std::ceil(level * static_cast<double>(plan_.balanced.rows));
    rows.push_back(
        static_cast<int32_t>(std::min(scaled, static_cast<double>(plan_.worst_case.rows))));
  }
  std::sort(rows.begin(), rows.end());
  return rows;
}

// -1: above all of them.
std::vector<int32_t> StageModel::Impl::member_levels(int pp_rank, const int32_t* rows,
                                                     const std::vector<int32_t>& levels) const {
  const auto count = static_cast<size_t>(members());
  std::vector<int32_t> most(count, 0);
  for (int32_t cell = 0; cell < rank(pp_rank).cells(); ++cell) {
    const int32_t* of = rows + static_cast<int64_t>(cell) * members();
    for (size_t m = 0; m < count; ++m) most[m] = std::max(most[m], of[m]);
  }
  for (int32_t& one : most) {
    const auto level = std::lower_bound(levels.begin(), levels.end(), one);
    one = level == levels.end() ? -1 : *level;
  }
  return most;
}

const RankOutcome& StageModel::Impl::at_level(int pp_rank, int32_t level,
                                              const Triggered& triggered,
                                              const std::vector<double>& imbalance,
                                              const std::vector<bool>& votes) {
  const LevelKey key{pp_rank, level, triggered, votes};
  const auto found = kept_.find(key);
  if (found != kept_.end()) return found->second;
  if (kept_.size() >= kMostKept) kept_.clear();
  PipelineRank& of = rank(pp_rank);
  const std::vector<int32_t> rows(static_cast<size_t>(std::max(1, of.cells())), level);
  const double* hottest = triggered.empty() ? nullptr : imbalance.data();
  return kept_.emplace(key, of.decide(rows.data(), 1, hottest, votes)).first->second;
}

// The first vote that is not unanimous fails; it ends what is agreed on so far.
// Returns: true if all members went the agreed way to their end.
bool StageModel::Impl::agree(const std::vector<RankOutcome>& members,
                             std::vector<bool>& agreed) const {
  size_t most = 0;
  for (const RankOutcome& one : members) most = std::max(most, one.votes.size());
  for (size_t k = agreed.size(); k < most; ++k) {
    size_t yes = 0, no = 0;
    for (const RankOutcome& one : members) {
      if (k >= one.votes.size()) continue;  // dead by then
      ++(one.votes[k] ? yes : no);
    }
    agreed.push_back(no == 0);
    if (yes > 0 && no > 0) return false;
  }
  return true;
}

std::vector<RankOutcome> StageModel::Impl::group(int pp_rank, const int32_t* rows,
                                                 const std::vector<double>& levels) {
  const auto count = static_cast<size_t>(members());
  const std::vector<double> imbalance = hottest(pp_rank, rows);
  const Triggered cells = triggered(imbalance);
  const std::vector<int32_t> level = member_levels(pp_rank, rows, level_rows(levels));
  std::vector<RankOutcome> outcomes(count);
  std::vector<bool> agreed;
  std::vector<bool> rerun(count, true);
  for (;;) {
    for (size_t m = 0; m < count; ++m) {
      if (!rerun[m]) continue;
      if (level[m] >= 0) outcomes[m] = at_level(pp_rank, level[m], cells, imbalance, agreed);
      // What dies at a level may live below it.
      if (level[m] < 0 || outcomes[m].died) {
        outcomes[m] = rank(pp_rank).decide(rows + m, members(), imbalance.data(), agreed);
      }
    }
    if (agree(outcomes, agreed)) return outcomes;
    // Who said no at the vote that failed went that way already.
    for (size_t m = 0; m < count; ++m) {
      const std::vector<bool>& said = outcomes[m].votes;
      rerun[m] = said.size() >= agreed.size() && said[agreed.size() - 1];
    }
  }
}

StageModel::StageModel(const Job& job, const SystemSpec& system, const SimPolicy& policy,
                       int64_t budget_bytes, int64_t host_budget_bytes)
    : impl_(std::make_unique<Impl>(job, system, policy, budget_bytes, host_budget_bytes)) {}
StageModel::~StageModel() = default;

int64_t StageModel::members() const { return impl_->members(); }
int64_t StageModel::cells(int pp_rank) const { return impl_->rank(pp_rank).cells(); }
const std::vector<SimCell>& StageModel::cell_places(int pp_rank) const {
  return impl_->rank(pp_rank).places();
}
int64_t StageModel::moe_layers() const {
  const std::vector<int32_t>& index = impl_->plan().moe_index;
  return std::count_if(index.begin(), index.end(), [](int32_t place) { return place >= 0; });
}
RoutingGroup StageModel::routing_group() const {
  const Job& job = impl_->plan().job;
  RoutingGroup group;
  group.layers = moe_layers();
  group.microbatches = job.microbatches;
  group.ranks = members();
  group.balanced_rows = balanced_rows();
  group.largest_rows = largest_rows();
  group.replicas = job.layout.expert_dp();
  return group;
}
int64_t StageModel::balanced_rows() const { return impl_->plan().balanced.rows; }
int64_t StageModel::largest_rows() const { return impl_->plan().worst_case.rows; }
int64_t StageModel::short_by_bytes(int pp_rank) const {
  return impl_->rank(pp_rank).short_by_bytes();
}
const SimLinks& StageModel::links() const { return impl_->links(); }

RankOutcome StageModel::decide(int pp_rank, const int32_t* rows, const std::vector<bool>& votes) {
  return impl_->rank(pp_rank).decide(rows, 1, nullptr, votes);
}
std::vector<RankOutcome> StageModel::group(int pp_rank, const int32_t* rows,
                                           const std::vector<double>& levels) {
  return impl_->group(pp_rank, rows, levels);
}

}  // namespace bagualu
