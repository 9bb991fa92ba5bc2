#include "bagualu/schedule/dual_batch_families.h"

#include <fmt/core.h>

#include <algorithm>

namespace bagualu {
namespace {

// Of one layer, in us; bytes in MB.
struct LayerTimes {
  int64_t attn, dispatch, expert, combine;
  int64_t combine_b, expert_dx, expert_dw, dispatch_b, attn_dx, attn_dw;
  int64_t expert_rebuild, attn_rebuild;
  int64_t expert_mb, attn_mb;
};

// Rebuilds: activation of the experts; up-projections of attention.
constexpr LayerTimes kTimes[] = {
    {1500, 900, 1200, 900, 900, 1200, 1200, 900, 2000, 1000, 100, 150, 50, 30},
    {4450, 4300, 4100, 6100, 3600, 5400, 5100, 6500, 9600, 2400, 150, 490, 200, 130}};

constexpr int64_t kPercent = 100;

class Generator {
 public:
  Generator(const Family& family, std::mt19937_64& random)
      : family_(family), times_(kTimes[static_cast<int>(family.times)]), random_(random) {
    noise_percent_ = pick(10, 30);
    link_mb_per_s_ = pick(25'000, 50'000);
  }

  DualBatchInstance make() {
    for (int layer = 0; layer < family_.layers; ++layer) forward_layer(layer);
    for (int layer = 0; layer < family_.layers; ++layer) backward_layer(layer);
    return std::move(in_);
  }

 private:
  int64_t pick(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(random_() % static_cast<uint64_t>(most - least + 1));
  }

  // Load in per cent of the balanced one.
  int64_t draw_load(bool hot) { return hot ? pick(100, 260) : kPercent; }

  int64_t noisy_ns(int64_t us, int64_t load_percent = kPercent) {
    const int64_t per_mille = 1000 + pick(-10 * noise_percent_, 10 * noise_percent_);
    return us * load_percent / kPercent * per_mille;
  }

  int64_t comm_ns(int64_t us, int64_t load_percent) {
    const int64_t factor = family_.kind == FamilyKind::kCommSlow ? 160 : kPercent;
    return noisy_ns(us, load_percent) * factor / kPercent;
  }

  // Between half and all of what there is goes over the link.
  int64_t copy_ns(int64_t mb, int64_t load_percent = kPercent) {
    const int64_t factor = family_.kind == FamilyKind::kCopiesSlow ? 2 : 1;
    const int64_t kb = mb * 1000 * load_percent / kPercent * pick(50, 100) / kPercent;
    return kb * 1'000'000 / link_mb_per_s_ * factor;
  }

  void forward_layer(int layer) {
    const bool sync = family_.kind == FamilyKind::kHostSync;
    const int64_t load = draw_load(sync || family_.kind == FamilyKind::kForwardHot);
    const int first = static_cast<int>(in_.forward.size());
    in_.forward.push_back({noisy_ns(times_.attn), Resource::kCompute, false, layer});
    in_.forward.push_back({comm_ns(times_.dispatch, load), Resource::kComm, sync, layer});
    in_.forward.push_back({noisy_ns(times_.expert, load), Resource::kCompute, false, layer});
    in_.forward.push_back({comm_ns(times_.combine, load), Resource::kComm, false, layer});
    // The experts' copy is behind the attention's, so its end stands for both.
    const int later = layer + 2 < family_.layers ? first + 8 : -1;
    in_.copies_out.push_back({copy_ns(times_.attn_mb), first, -1});
    in_.copies_out.push_back({copy_ns(times_.expert_mb, load), first + 2, later});
  }

  void backward_layer(int layer) {
    const int64_t load = draw_load(family_.kind == FamilyKind::kBackwardHot);
    const int first = static_cast<int>(in_.backward.size());
    const int expert = first + 1, attn = first + 3;
    in_.backward.push_back({comm_ns(times_.combine_b, load), Resource::kComm, false, layer});
    in_.backward.push_back({noisy_ns(times_.expert_dx, load), Resource::kCompute, false, layer});
    in_.backward.push_back({comm_ns(times_.dispatch_b, load), Resource::kComm, false, layer});
    in_.backward.push_back({noisy_ns(times_.attn_dx), Resource::kCompute, false, layer});
    in_.weight_grads.push_back({noisy_ns(times_.expert_dw, load), expert});
    in_.weight_grads.push_back({noisy_ns(times_.attn_dw), attn});
    const int freed = layer < 2 ? -1 : first - 5;
    const int expert_rebuild = rebuild(noisy_ns(times_.expert_rebuild, load), expert);
    in_.copies_in.push_back({copy_ns(times_.expert_mb, load), expert, expert_rebuild, freed});
    const int attn_rebuild = rebuild(noisy_ns(times_.attn_rebuild), attn);
    in_.copies_in.push_back({copy_ns(times_.attn_mb), attn, attn_rebuild, freed});
  }

  // In seven of ten layers. Returns: its index, or -1.
  int rebuild(int64_t ns, int before) {
    if (pick(1, 10) > 7) return -1;
    in_.rebuilds.push_back({ns, before});
    return static_cast<int>(in_.rebuilds.size()) - 1;
  }

  const Family& family_;
  const LayerTimes& times_;
  std::mt19937_64& random_;
  int64_t noise_percent_ = 0;
  int64_t link_mb_per_s_ = 0;
  DualBatchInstance in_;
};

Json chain_json(const std::vector<ChainOp>& chain) {
  Json list = Json::array();
  for (const ChainOp& op : chain) {
    list.push_back({op.ns, static_cast<int>(op.resource), op.host_sync});
  }
  return list;
}

}  // namespace

std::vector<Family> all_families() {
  std::vector<Family> families;
  for (int layers : {4, 8}) {
    for (FamilyTimes times : {FamilyTimes::kBrief, FamilyTimes::kDeepSeekV3}) {
      for (int kind = 0; kind <= static_cast<int>(FamilyKind::kHostSync); ++kind) {
        families.push_back({times, static_cast<FamilyKind>(kind), layers});
      }
    }
  }
  return families;
}

std::string family_name(const Family& family) {
  static const char* const kKinds[] = {"balanced",  "forward hot", "backward hot",
                                       "comm slow", "copies slow", "host sync"};
  return fmt::format("{} L{} {}", family.times == FamilyTimes::kBrief ? "brief" : "dsv3",
                     family.layers, kKinds[static_cast<int>(family.kind)]);
}

DualBatchInstance family_instance(const Family& family, bool pinned, std::mt19937_64& random) {
  DualBatchInstance instance = Generator(family, random).make();
  if (pinned) instance.comm_order = pinned_comm_order(instance);
  return instance;
}

DualBatchInstance milp_instance(int64_t number) {
  std::mt19937_64 random(static_cast<uint64_t>(number));
  const Family family{static_cast<FamilyTimes>(number % 2), static_cast<FamilyKind>(number / 2 % 6),
                      number % 5 == 0 ? 1 : 2};
  DualBatchInstance instance = family_instance(family, number / 12 % 2 == 0, random);
  instance.weight_lag = static_cast<int>(random() % 3) + 1;
  instance.rebuild_lead = static_cast<int>(random() % 4);
  const auto round = [](auto& items) {
    for (auto& item : items) item.ns = (item.ns / kMilpUnitNs + 1) * kMilpUnitNs;
  };
  round(instance.forward);
  round(instance.backward);
  round(instance.weight_grads);
  round(instance.rebuilds);
  round(instance.copies_out);
  round(instance.copies_in);
  return instance;
}

int64_t no_overlap_ns(const DualBatchInstance& instance) {
  DualBatchInstance serial = instance;
  serial.comm_order.clear();
  for (auto* chain : {&serial.forward, &serial.backward}) {
    for (ChainOp& op : *chain) op.resource = Resource::kCompute;
  }
  std::vector<ScheduleItem> order = sequential_order(serial);
  const int64_t backward_first_ns = replay(serial, order).makespan_ns;
  std::stable_partition(order.begin(), order.end(),
                        [](const ScheduleItem& item) { return item.kind == ItemKind::kForward; });
  return std::min(backward_first_ns, replay(serial, order).makespan_ns);
}

Json instance_json(const DualBatchInstance& instance) {
  Json grads = Json::array(), rebuilds = Json::array(), out = Json::array(), in = Json::array(),
       comm = Json::array();
  for (const auto& grad : instance.weight_grads) grads.push_back({grad.ns, grad.after_backward});
  for (const auto& filler : instance.rebuilds) {
    rebuilds.push_back({filler.ns, filler.before_backward});
  }
  for (const auto& copy : instance.copies_out) {
    out.push_back({copy.ns, copy.source_forward, copy.releases_for_forward});
  }
  for (const auto& copy : instance.copies_in) {
    in.push_back(
        {copy.ns, copy.wanted_by_backward, copy.wanted_by_rebuild, copy.not_before_backward});
  }
  for (const auto& item : instance.comm_order) {
    comm.push_back({static_cast<int>(item.kind), item.index});
  }
  return {{"forward", chain_json(instance.forward)},
          {"backward", chain_json(instance.backward)},
          {"weight_grads", grads},
          {"rebuilds", rebuilds},
          {"copies_out", out},
          {"copies_in", in},
          {"weight_lag", instance.weight_lag},
          {"rebuild_lead", instance.rebuild_lead},
          {"comm_order", comm}};
}

}  // namespace bagualu
