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
#include "bagualu/sim/scenario.h"

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
  /// Pipeline rank, what binds the whole group, levels.
  using LevelKey = std::tuple<int, Triggered, std::vector<int32_t>>;
  /// Of a group.
  struct Rows {
    const int32_t* of_cells = nullptr;  ///< [cell][member]
    std::vector<double> imbalance;      ///< by cell: hottest member over the mean
    Triggered triggered;
  };

  std::vector<double> hottest(int pp_rank, const int32_t* rows) const;
  Triggered triggered(const std::vector<double>& imbalance) const;
  std::vector<int32_t> level_rows(const std::vector<double>& levels) const;
  std::vector<int32_t> member_levels(int pp_rank, const int32_t* rows,
                                     const std::vector<int32_t>& levels) const;
  /// Of the levels that are there, then of the members with rows of their own.
  std::vector<RankOutcome> drive(int pp_rank, const Rows& rows, const std::vector<int32_t>& levels,
                                 const std::vector<size_t>& hot);
  const std::vector<RankOutcome>& at_levels(int pp_rank, const Rows& rows,
                                            const std::vector<int32_t>& levels);
  std::vector<MemberRows> company(const Rows& rows, const std::vector<int32_t>& levels,
                                  const std::vector<size_t>& hot) const;

  const PipelinePlan plan_;
  const SimLinks links_;
  std::vector<std::unique_ptr<PipelineRank>> ranks_;
  std::map<LevelKey, std::vector<RankOutcome>> kept_;
  size_t kept_programs_ = 0;
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

std::vector<MemberRows> StageModel::Impl::company(const Rows& rows,
                                                  const std::vector<int32_t>& levels,
                                                  const std::vector<size_t>& hot) const {
  std::vector<MemberRows> members;
  const double* bound = rows.triggered.empty() ? nullptr : rows.imbalance.data();
  for (const int32_t& level : levels) members.push_back({&level, 0, bound});
  for (const size_t m : hot) {
    members.push_back({rows.of_cells + m, this->members(), rows.imbalance.data()});
  }
  return members;
}

const std::vector<RankOutcome>& StageModel::Impl::at_levels(int pp_rank, const Rows& rows,
                                                            const std::vector<int32_t>& levels) {
  const LevelKey key{pp_rank, rows.triggered, levels};
  const auto found = kept_.find(key);
  if (found != kept_.end()) return found->second;
  kept_programs_ += levels.size();
  if (kept_programs_ > kMostKept) {
    kept_.clear();
    kept_programs_ = levels.size();
  }
  return kept_.emplace(key, rank(pp_rank).decide(company(rows, levels, {}))).first->second;
}

std::vector<RankOutcome> StageModel::Impl::drive(int pp_rank, const Rows& rows,
                                                 const std::vector<int32_t>& levels,
                                                 const std::vector<size_t>& hot) {
  if (plan_.policy.overlap) {
    if (hot.empty()) return at_levels(pp_rank, rows, levels);
    return rank(pp_rank).decide(company(rows, levels, hot));
  }
  // Nobody votes: everyone goes his own way.
  std::vector<RankOutcome> outcomes;
  for (const int32_t level : levels) {
    outcomes.push_back(at_levels(pp_rank, rows, {level}).front());
  }
  for (const size_t m : hot) {
    outcomes.push_back(rank(pp_rank).decide(company(rows, {}, {m})).front());
  }
  return outcomes;
}

std::vector<RankOutcome> StageModel::Impl::group(int pp_rank, const int32_t* of_cells,
                                                 const std::vector<double>& levels) {
  const auto count = static_cast<size_t>(members());
  Rows rows{of_cells, hottest(pp_rank, of_cells), {}};
  rows.triggered = triggered(rows.imbalance);
  std::vector<int32_t> level = member_levels(pp_rank, of_cells, level_rows(levels));
  for (;;) {
    std::vector<int32_t> present;
    std::vector<size_t> hot;
    for (size_t m = 0; m < count; ++m) {
      if (level[m] < 0) {
        hot.push_back(m);
      } else {
        present.push_back(level[m]);
      }
    }
    std::sort(present.begin(), present.end());
    present.erase(std::unique(present.begin(), present.end()), present.end());
    const std::vector<RankOutcome> driven = drive(pp_rank, rows, present, hot);
    std::vector<RankOutcome> outcomes(count);
    bool all = true;
    size_t next_hot = present.size();
    for (size_t m = 0; m < count; ++m) {
      const auto at = std::lower_bound(present.begin(), present.end(), level[m]) - present.begin();
      outcomes[m] = driven[level[m] < 0 ? next_hot++ : static_cast<size_t>(at)];
      // What dies at a level may live below it.
      if (level[m] >= 0 && outcomes[m].died) {
        level[m] = -1;
        all = false;
      }
    }
    if (all) return outcomes;
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
  RoutingGroup group = bagualu::routing_group(impl_->plan().job);
  group.largest_rows = largest_rows();  // without rows that are padding: programs have none
  return group;
}
int64_t StageModel::balanced_rows() const { return impl_->plan().balanced.rows; }
int64_t StageModel::largest_rows() const { return impl_->plan().worst_case.rows; }
int64_t StageModel::short_by_bytes(int pp_rank) const {
  return impl_->rank(pp_rank).short_by_bytes();
}
const SimLinks& StageModel::links() const { return impl_->links(); }

RankOutcome StageModel::decide(int pp_rank, const int32_t* rows) {
  return impl_->rank(pp_rank).decide({{rows, 1, nullptr}}).front();
}
std::vector<RankOutcome> StageModel::group(int pp_rank, const int32_t* rows,
                                           const std::vector<double>& levels) {
  return impl_->group(pp_rank, rows, levels);
}

}  // namespace bagualu
