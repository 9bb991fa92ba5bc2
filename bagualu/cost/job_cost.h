#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "bagualu/cost/job_ops.h"
#include "bagualu/cost/system.h"
#include "bagualu/model/job.h"

namespace bagualu {

/// Time of one micro-batch through a part of the model on one rank, exposed communication included.
struct PartTimes {
  double forward_ns = 0;
  double input_gradient_ns = 0;
  double weight_gradient_ns = 0;
  double recompute_ns = 0;  ///< forward work that the backward repeats, by the job's settings
  /// Parts of the above that are waits for other ranks.
  double forward_exposed_ns = 0;
  double backward_exposed_ns = 0;
  double recompute_exposed_ns = 0;
  std::array<double, kJobOpClasses> by_class_ns{};  ///< of forward and backward, without recompute
  double model_flops = 0;                           ///< of the forward
  double dense_weights = 0;                         ///< elements on this rank
  double expert_weights = 0;
  double offload_bytes = 0;  ///< saved bytes that the job sends to the host

  double backward_ns() const { return input_gradient_ns + weight_gradient_ns; }
  PartTimes& operator+=(const PartTimes& other) { return add(other, 1); }
  PartTimes& add(const PartTimes& other, double times);
};

/// An operator's share of PartTimes, its waits for other ranks included. What runs beside the rows'
/// exchange is not subtracted.
struct JobOpPrice {
  std::string_view name;  ///< of the JobOp
  double forward_ns = 0;
  double input_gradient_ns = 0;
  double weight_gradient_ns = 0;
  double backward_ns() const { return input_gradient_ns + weight_gradient_ns; }
};

/// Rates of the groups that a job's ranks form on a machine.
/// Ranks are numbered tp first, then cp (ep for the experts), dp, pp; nodes hold neighbours.
struct JobLinks {
  double tp_bytes_per_s = 0, cp_bytes_per_s = 0, pp_bytes_per_s = 0;
  double etp_bytes_per_s = 0;
  double ep_bytes_per_s = 0;  ///< of the bytes an all-to-all sends to other ranks
  /// The two kinds of links that such an all-to-all uses at once, per byte of a row for a rank of
  /// the same node and of another one.
  double ep_node_bytes_per_s = 0, ep_network_bytes_per_s = 0;
  double dp_bytes_per_s = 0, expert_dp_bytes_per_s = 0;  ///< of ring collectives
};
JobLinks job_links(const Job& job, const SystemSpec& system);

/// Prices the parts of one job on one machine.
/// Cost:    about a microsecond per part; MoE layers are priced per distinct load.
/// Source:  docs/design.md, "Cost of jobs".
class JobCost {
 public:
  /// Requires: job passed validate(); both outlive this object.
  JobCost(const Job& job, const SystemSpec& system);

  /// `factor`: routed load of the layer's experts over the balanced one. References stay valid
  /// until the next call.
  const PartTimes& layer(int64_t layer, double factor);
  const PartTimes& mtp_layer(double factor);
  const PartTimes& embedding();
  const PartTimes& head();

  /// Operator by operator.
  std::vector<JobOpPrice> op_prices(const JobOpList& ops) const;

  const JobLinks& links() const { return links_; }
  /// Sending a micro-batch's hidden state to the next stage.
  double send_ns() const;

 private:
  struct Priced {
    JobLayerKind kind;
    bool mtp = false;
    double factor = 0;
    PartTimes times;
  };
  const PartTimes& layer_of(JobLayerKind kind, bool mtp, double factor);
  PartTimes price(const JobOpList& ops) const;
  double wire_bytes_per_ns(const JobOp& op) const;
  double busy_ns(const JobOp& op, const JobWork& work, bool backward) const;
  double exposed_ns(const JobOp& op, const JobWork& work, double busy_ns) const;
  PartTimes price_of(const JobOp& op) const;

  const Job& job_;
  const SystemSpec& system_;
  JobLinks links_;
  double peak_flops_per_ns_ = 0;
  double memory_bytes_per_ns_ = 0;
  std::vector<Priced> priced_;
  PartTimes embedding_, head_;
};

/// True if these --recompute-modules repeat the operator's forward in the backward.
bool recomputes(const RecomputeSettings& settings, std::string_view op);
/// True if these offload modules send what the operator saves to the host.
bool offloads(const OffloadSettings& settings, std::string_view op);

}  // namespace bagualu
