// Plans of several micro-batches that share one budget: a pipeline stage at the moment when most of
// them are in flight. Bytes are those of saved storages at the peak; what runs at the peak (working
// set of a backward, reload buffers) is the caller's to subtract from the budget.
#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/provision/frontier.h"
#include "bagualu/provision/least_device.h"
#include "bagualu/provision/packing.h"
#include "bagualu/provision/pool_solver.h"
#include "bagualu/provision/tensor_search.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// Units: free_link_bytes are copied in the time between forward and backward without anyone
/// waiting; bubble_ns of compute are hidden (schedule/pipeline.h, slack).
struct StageMicrobatch {
  const std::vector<LayerLoad>* loads = nullptr;  ///< one per layer
  int64_t free_link_bytes = 0;
  int64_t bubble_ns = 0;
};

struct StageProblem {
  std::vector<StageMicrobatch> microbatches;
  int64_t budget_bytes = 0;       ///< of the device, for saved storages
  int64_t host_budget_bytes = 0;  ///< 0 = no limit
  double link_ns_per_byte = 0;    ///< past the free bytes; 0 = nothing goes past them
};

struct StagePlan {
  bool feasible = false;
  int64_t missing_bytes = 0;  ///< of the device, if not feasible
  std::vector<Plan> plans;    ///< by micro-batch
  int64_t exposed_ns = 0;
  int64_t bound_ns = 0;  ///< certified: no plan exposes less
  int64_t device_bytes = 0;
  std::vector<int64_t> offloaded_bytes;  ///< by micro-batch
  bool closed = false;                   ///< the closing search ran to its end
};

/// Not thread-safe; scratch is reused between calls, and values at unchanged loads are kept.
class StagePlanner {
 public:
  StagePlanner(const Graph& graph, const CostTable& cost, bool allow_quantise);
  StagePlanner(const StagePlanner&) = delete;
  StagePlanner& operator=(const StagePlanner&) = delete;

  const Frontier& frontier() const { return frontier_; }
  void set_tolerance(const PoolTolerance& tolerance) { tolerance_ = tolerance; }

  /// Same problem, same plan.
  void plan(const StageProblem& problem, StagePlan& result);

 private:
  struct Slot {  // values of one micro-batch
    std::vector<LayerLoad> loads;
    std::vector<OptionValue> values;  // by option of the frontier, component by component
    int64_t pinned_bytes = 0;
  };

  void load_slot(const StageMicrobatch& microbatch, Slot& slot);
  void build_pool(const StageProblem& problem, bool cap_windows);
  void solve_and_pack(const StageProblem& problem, int64_t spare_bytes,
                      const PoolTolerance& tolerance, StagePlan& result);
  int64_t unfilled_bytes(const StageProblem& problem, const StagePlan& result) const;
  bool good_enough(const StagePlan& result) const;
  void avoid_codes_in_windows(const StageProblem& problem, StagePlan& result);
  void fill_windows(const StageProblem& problem, StagePlan& result);
  bool pack(const StageProblem& problem, StagePlan& result);
  void price(const StageProblem& problem, StagePlan& result) const;

  struct TensorChoice {
    int option = 0;          // of the component
    uint32_t offloaded = 0;  // bit i: unit i of the component
  };
  void carry_out(const StageProblem& problem, StagePlan& result);
  struct Candidate {  // of the pool: one or two options instead of those taken
    int64_t pool_ns = 0;
    int option = -1;
    int other = -1;
  };
  static PoolTolerance without_closing(PoolTolerance tolerance);
  void force_largest(const StageProblem& problem, StagePlan& result);
  void search_choices(const StageProblem& problem, StagePlan& result);
  void list_candidates(int64_t below_ns);
  int pool_group(int option) const;
  std::vector<int> pool_choice(const StagePlan& result) const;
  bool take_least(const StageProblem& problem, StagePlan& result);
  void search_tensors(const StageProblem& problem, StagePlan& result);
  void add_tensor_options(int component, int microbatch, const StageProblem& problem);
  int start_option(const TensorGroup& group, size_t index, const StagePlan& result) const;
  ResidencyId tensor_residency(const FrontierComponent& component, const TensorChoice& choice,
                               size_t unit) const;
  void take_tensors(const StageProblem& problem, StagePlan& result);

  const Graph& graph_;
  Frontier frontier_;
  PoolTolerance tolerance_;
  PoolSolver solver_;
  std::vector<int> first_value_;  // by component
  int values_ = 0;
  std::vector<Slot> slots_;
  int64_t pinned_sum_ = 0;
  int64_t last_spare_ = 0;
  double ns_per_byte_ = 0;
  PoolProblem pool_;
  PoolSolution solution_;
  std::vector<int64_t> windows_;
  Packer packer_;
  PoolTotals totals_;
  std::vector<std::pair<double, int>> moves_;  // reduced cost, option
  std::vector<Candidate> candidates_;
  std::vector<PackItem> items_;
  std::vector<uint8_t> chosen_;
  StagePlan attempt_;
  PoolRelaxation relaxation_;
  TensorProblem tensors_;
  std::vector<TensorChoice> tensor_choices_;  // by option of tensors_
  std::vector<int> tensor_choice_;
  TensorSearch tensor_search_;
  std::vector<StubbornItem> stubborn_;
};

}  // namespace bagualu
