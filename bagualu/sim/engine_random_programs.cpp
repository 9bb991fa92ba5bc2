#include "bagualu/sim/engine_random_programs.h"

#include <map>
#include <tuple>

namespace bagualu {
namespace {

struct Variant {
  ProgramWriter writer;
  std::vector<int> exchanges;  // issued, not awaited
  std::vector<int> copies;
  std::map<int, int> messages;  // number -> transfer, not awaited
};

struct Channel {
  size_t done[2] = {0, 0};  // sent, posted
  std::vector<int> numbers;
  std::vector<int64_t> bytes;
};

class Builder {
 public:
  explicit Builder(uint64_t seed) : dice_(seed), made_() {
    made_.links.node_size = 1 + dice_.roll(4);
    made_.links.first_member_in_node = dice_.roll(made_.links.node_size);
    made_.links.ranks_between = 1 + dice_.roll(2);
    for (double* rate : {&made_.links.node_bytes_per_s, &made_.links.network_bytes_per_s,
                         &made_.links.message_bytes_per_s, &made_.links.d2h_bytes_per_s,
                         &made_.links.h2d_bytes_per_s}) {
      *rate = static_cast<double>(1 + dice_.roll(1000)) * 1e7;
    }
    made_.links.latency_ns = dice_.roll(100);
    made_.links.message_latency_ns = dice_.roll(100);
    members_ = static_cast<size_t>(1 + dice_.roll(9));
    cells_ = static_cast<int32_t>(1 + dice_.roll(4));
    groups_.resize(static_cast<size_t>(1 + dice_.roll(4)));
    for (auto& variants : groups_) {
      variants.resize(static_cast<size_t>(1 + dice_.roll(3)));
      const int64_t tokens = dice_.roll(500);
      for (Variant& variant : variants) variant.writer = ProgramWriter(tokens, cells_);
    }
  }

  RandomReplica build() {
    const int64_t events = 20 + dice_.roll(60);
    for (int64_t i = 0; i < events; ++i) add_event();
    for (auto& [key, channel] : channels_) {
      for (int side = 0; side < 2; ++side) {
        while (channel.done[side] < channel.numbers.size()) issue_message(key, channel, side);
      }
    }
    for (auto& variants : groups_) {
      for (Variant& variant : variants) {
        if (dice_.chance(50)) await_all(variant);
      }
    }
    return finish();
  }

 private:
  using Key = std::tuple<size_t, size_t, bool>;  // from, to, gradient

  void add_event() {
    const auto g = static_cast<size_t>(dice_.roll(static_cast<int64_t>(groups_.size())));
    auto& variants = groups_[g];
    const int64_t kind = dice_.roll(10);
    if (kind < 2) {
      const auto cell = static_cast<int32_t>(dice_.roll(cells_ + 1)) - 1;
      const int64_t per_row = cell < 0 ? 0 : dice_.roll(100), bytes = dice_.roll(2) * 500;
      for (Variant& variant : variants) {
        variant.exchanges.push_back(variant.writer.exchange(cell, per_row, bytes));
      }
    } else if (kind < 4 && groups_.size() > 1) {
      const auto other =
          (g + 1 + static_cast<size_t>(dice_.roll(static_cast<int64_t>(groups_.size()) - 1))) %
          groups_.size();
      const Key key{g, other, dice_.chance(50)};
      issue_message(key, channels_[key], static_cast<int>(dice_.roll(2)));
    } else {
      for (Variant& variant : variants) add_own(variant);
    }
  }

  void add_own(Variant& variant) {
    ProgramWriter& writer = variant.writer;
    for (int64_t n = dice_.roll(4); n > 0; --n) {
      if (dice_.chance(15)) {
        const auto cell = static_cast<int32_t>(dice_.roll(cells_ + 1)) - 1;
        variant.copies.push_back(
            writer.copy(dice_.chance(50), dice_.roll(3000), cell, cell < 0 ? 0 : dice_.roll(9)));
      } else if (dice_.chance(20)) {
        await_some(variant);
      } else {
        const auto cell = static_cast<int32_t>(dice_.roll(cells_ + 1)) - 1;
        writer.compute(time(), cell, bytes(), bytes());
      }
    }
  }

  void await_some(Variant& variant) {
    auto& list = dice_.chance(50) ? variant.exchanges : variant.copies;
    if (!list.empty()) {
      const auto at = static_cast<size_t>(dice_.roll(static_cast<int64_t>(list.size())));
      variant.writer.await(list[at], bytes(), bytes());
      list.erase(list.begin() + static_cast<int64_t>(at));
    }
    for (auto& [number, transfer] : variant.messages) {
      if (!both_issued_[number]) continue;
      variant.writer.await(transfer);
      variant.messages.erase(number);
      break;
    }
  }

  void await_all(Variant& variant) {
    for (int id : variant.exchanges) variant.writer.await(id);
    for (int id : variant.copies) variant.writer.await(id);
    for (auto& [number, id] : variant.messages) variant.writer.await(id);
  }

  void issue_message(const Key& key, Channel& channel, int side) {
    const auto& [from, to, gradient] = key;
    const size_t index = channel.done[side]++;
    if (index == channel.numbers.size()) {
      channel.numbers.push_back(messages_++);
      channel.bytes.push_back(dice_.roll(2000));
    } else {
      both_issued_[channel.numbers[index]] = true;
    }
    for (Variant& variant : groups_[side == 0 ? from : to]) {
      variant.messages[channel.numbers[index]] =
          variant.writer.message(channel.numbers[index], side == 0, channel.bytes[index], gradient);
    }
  }

  OpTime time() {
    OpTime time;
    const int64_t points = 1 + dice_.roll(4);
    for (int64_t i = 0, x = dice_.roll(50); i < points; ++i, x += 1 + dice_.roll(200)) {
      time.points.emplace_back(x, dice_.roll(1000));
    }
    return time;
  }

  std::vector<SimBytes> bytes() {
    std::vector<SimBytes> list;
    for (int64_t n = dice_.roll(4); n > 0; --n) {
      const int64_t unit = dice_.chance(50) ? 64 : 1;
      SimBytes one;
      one.cell = static_cast<int32_t>(dice_.roll(cells_ + 1)) - 1;
      one.sign = dice_.chance(50) ? 1 : -1;
      one.formula = {dice_.roll(100) * unit, dice_.roll(5) * unit, dice_.roll(2) * 3 * unit,
                     dice_.roll(2) * 5 * unit};
      list.push_back(one);
    }
    return list;
  }

  RandomReplica finish() {
    for (auto& variants : groups_) {
      std::vector<const StepProgram*> programs;
      for (Variant& variant : variants) {
        variant.writer.program.static_bytes = dice_.roll(1000);
        made_.programs.push_back(std::move(variant.writer.program));
        if (dice_.chance(50)) prepare(&made_.programs.back());
        programs.push_back(&made_.programs.back());
      }
      SimGroup group;
      for (size_t m = 0; m < members_; ++m) {
        const auto pick = static_cast<size_t>(dice_.roll(static_cast<int64_t>(programs.size())));
        group.programs.push_back(programs[pick]);
      }
      for (auto* rows : {&made_.rows, &made_.piece_rows}) {
        rows->emplace_back();
        for (size_t i = 0; i < static_cast<size_t>(cells_) * members_; ++i) {
          rows->back().push_back(static_cast<int32_t>(dice_.roll(700)));
        }
      }
      group.rows = made_.rows.back().data();
      group.piece_rows = made_.piece_rows.back().data();
      made_.groups.push_back(group);
    }
    return std::move(made_);
  }

  Dice dice_;
  RandomReplica made_;
  size_t members_ = 1;
  int32_t cells_ = 1;
  int messages_ = 0;
  std::vector<std::vector<Variant>> groups_;
  std::map<Key, Channel> channels_;
  std::map<int, bool> both_issued_;
};

}  // namespace

RandomReplica random_replica(uint64_t seed) { return Builder(seed).build(); }

}  // namespace bagualu
