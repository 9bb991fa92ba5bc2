// Programs by hand for tests of the engine, and a second engine: one rank at a time, nothing worked
// out beforehand, no code shared with the first.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bagualu/sim/engine.h"

namespace bagualu {

/// Appends instructions to a program.
class ProgramWriter {
 public:
  explicit ProgramWriter(int64_t tokens = 1, int32_t cells = 0) {
    program.tokens = tokens;
    program.cells = cells;
  }

  ProgramWriter& compute(int64_t ns, const std::vector<SimBytes>& at_start = {},
                         const std::vector<SimBytes>& at_end = {}) {
    return compute(OpTime{{{0, ns}}}, -1, at_start, at_end);
  }
  ProgramWriter& compute(OpTime time, int32_t cell, const std::vector<SimBytes>& at_start = {},
                         const std::vector<SimBytes>& at_end = {}) {
    program.times.push_back(std::move(time));
    return add({.step = SimStep::kCompute,
                .cell = cell,
                .time = static_cast<int32_t>(program.times.size()) - 1},
               at_start, at_end);
  }
  int issue(SimTransfer transfer, const std::vector<SimBytes>& at_start = {},
            const std::vector<SimBytes>& at_end = {}) {
    program.transfers.push_back(transfer);
    const auto id = static_cast<int32_t>(program.transfers.size()) - 1;
    add({.step = SimStep::kIssue, .transfer = id}, at_start, at_end);
    return id;
  }
  int exchange(int32_t cell, int64_t bytes_per_row, int64_t bytes = 0) {
    return issue({.kind = SimTransferKind::kExchange,
                  .cell = cell,
                  .bytes = bytes,
                  .bytes_per_row = bytes_per_row});
  }
  int message(int32_t number, bool sends, int64_t bytes, bool gradient = false) {
    return issue({.kind = SimTransferKind::kMessage,
                  .message = number,
                  .sends = sends,
                  .gradient = gradient,
                  .bytes = bytes});
  }
  int copy(bool up, int64_t bytes, int32_t cell = -1, int64_t bytes_per_row = 0) {
    return issue({.kind = up ? SimTransferKind::kToDevice : SimTransferKind::kToHost,
                  .cell = cell,
                  .bytes = bytes,
                  .bytes_per_row = bytes_per_row});
  }
  ProgramWriter& await(int transfer, const std::vector<SimBytes>& at_start = {},
                       const std::vector<SimBytes>& at_end = {}) {
    return add({.step = SimStep::kAwait, .transfer = transfer}, at_start, at_end);
  }

  StepProgram program;

 private:
  ProgramWriter& add(SimInstruction instruction, const std::vector<SimBytes>& at_start,
                     const std::vector<SimBytes>& at_end) {
    auto& bytes = program.bytes;
    instruction.bytes_begin = static_cast<int32_t>(bytes.size());
    bytes.insert(bytes.end(), at_start.begin(), at_start.end());
    instruction.peak_bytes_end = static_cast<int32_t>(bytes.size());
    bytes.insert(bytes.end(), at_end.begin(), at_end.end());
    instruction.bytes_end = static_cast<int32_t>(bytes.size());
    program.instructions.push_back(instruction);
    return *this;
  }
};

inline SimBytes fixed_bytes(int64_t bytes, int32_t sign = 1) {
  return {.formula = {.fixed = bytes}, .sign = sign};
}

/// Links of 1 byte per nanosecond without latency.
inline SimLinks plain_links() {
  SimLinks links;
  links.node_bytes_per_s = links.network_bytes_per_s = links.message_bytes_per_s = 1e9;
  links.d2h_bytes_per_s = links.h2d_bytes_per_s = 1e9;
  return links;
}

class ReferenceEngine {
 public:
  ReferenceEngine(const SimLinks& links, const std::vector<SimGroup>& groups)
      : links_(links), groups_(groups), members_(groups.front().programs.size()) {}

  /// By rank, [pp_rank * members + member]. Empty: they wait for each other.
  std::vector<SimMemberResult> run() {
    ranks_.resize(groups_.size() * members_);
    for (Rank& rank : ranks_) {
      const size_t i = static_cast<size_t>(&rank - ranks_.data());
      rank.group = i / members_;
      rank.member = i % members_;
      rank.program = groups_[rank.group].programs[rank.member];
      rank.live = rank.result.peak_bytes = rank.program->static_bytes;
    }
    for (bool moved = true; moved;) {
      moved = false;
      for (Rank& rank : ranks_) {
        while (rank.at < rank.program->instructions.size() && step(rank)) moved = true;
      }
    }
    std::vector<SimMemberResult> results;
    for (Rank& rank : ranks_) {
      if (rank.at < rank.program->instructions.size()) return {};
      rank.result.end_ns = std::max(rank.result.end_ns, rank.now);
      results.push_back(rank.result);
    }
    return results;
  }

 private:
  struct Rank {
    size_t group = 0, member = 0;
    const StepProgram* program = nullptr;
    size_t at = 0;
    int64_t now = 0, live = 0;
    int exchanges = 0;
    std::map<int, int> exchange_of;  // transfer -> which of the rank's
    std::map<int, int64_t> copy_end;
    std::map<int, int64_t> stream_free;
    SimMemberResult result;
  };
  using MessageEnds = std::map<std::pair<int, size_t>, int64_t>;  // (number, member) -> issued

  int64_t rows(const Rank& rank, int cell) const {
    return groups_[rank.group].rows[static_cast<size_t>(cell) * members_ + rank.member];
  }

  void change(Rank& rank, int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const SimBytes& bytes = rank.program->bytes[static_cast<size_t>(i)];
      LayerLoad load;
      if (bytes.cell >= 0) {
        const size_t at = static_cast<size_t>(bytes.cell) * members_ + rank.member;
        load.rows = groups_[rank.group].rows[at];
        load.piece_rows = groups_[rank.group].piece_rows[at];
      }
      rank.live += bytes.sign * bytes.formula.eval(rank.program->tokens, load);
    }
    rank.result.peak_bytes = std::max(rank.result.peak_bytes, rank.live);
  }

  bool step(Rank& rank) {
    const SimInstruction& instruction = rank.program->instructions[rank.at];
    if (instruction.step == SimStep::kAwait && !await(rank, instruction.transfer)) return false;
    change(rank, instruction.bytes_begin, instruction.peak_bytes_end);
    if (instruction.step == SimStep::kCompute) {
      const int64_t x = instruction.cell < 0 ? rank.program->tokens : rows(rank, instruction.cell);
      const int64_t ns = rank.program->times[static_cast<size_t>(instruction.time)].eval(x);
      rank.now += ns;
      rank.result.busy_ns[0] += ns;
    } else if (instruction.step == SimStep::kIssue) {
      issue(rank, instruction.transfer);
    }
    change(rank, instruction.peak_bytes_end, instruction.bytes_end);
    ++rank.at;
    return true;
  }

  void issue(Rank& rank, int id) {
    const SimTransfer& transfer = rank.program->transfers[static_cast<size_t>(id)];
    if (transfer.kind == SimTransferKind::kExchange) {
      const int number = rank.exchanges++;
      rank.exchange_of[id] = number;
      auto& issued = exchange_issued_[{rank.group, number}];
      issued.push_back(rank.now);
      if (issued.size() == members_) end_exchange(rank.group, number, transfer);
    } else if (transfer.kind == SimTransferKind::kMessage) {
      auto& own = transfer.sends ? sent_ : posted_;
      own[{transfer.message, rank.member}] = rank.now;
      peer_[{transfer.message, transfer.sends}] = rank.group;
      end_message(transfer, rank.member);
    } else {
      const bool up = transfer.kind == SimTransferKind::kToDevice;
      int64_t bytes = transfer.bytes;
      if (transfer.cell >= 0) bytes += transfer.bytes_per_row * rows(rank, transfer.cell);
      const double rate = up ? links_.h2d_bytes_per_s : links_.d2h_bytes_per_s;
      const auto ns = static_cast<int64_t>(static_cast<double>(bytes) * 1e9 / rate + 0.5);
      int64_t& free = rank.stream_free[up];
      free = rank.copy_end[id] = std::max(free, rank.now) + ns;
      rank.result.busy_ns[static_cast<size_t>(up ? SimStream::kToDevice : SimStream::kToHost)] +=
          ns;
      rank.result.end_ns = std::max(rank.result.end_ns, free);
    }
  }

  // Byte by byte over all pairs of members.
  int64_t exchange_duration(size_t group, const SimTransfer& transfer) const {
    if (members_ == 1) return 0;
    const auto node = [&](size_t m) {
      return (links_.first_member_in_node + static_cast<int64_t>(m) * links_.ranks_between) /
             links_.node_size;
    };
    const auto most = [&](const auto& rows_to) {
      std::pair<int64_t, int64_t> most{0, 0};
      for (size_t a = 0; a < members_; ++a) {
        int64_t sent[2] = {0, 0}, received[2] = {0, 0};
        for (size_t b = 0; b < members_; ++b) {
          if (a == b) continue;
          sent[node(a) != node(b)] += rows_to(b);
          received[node(a) != node(b)] += rows_to(a);
        }
        most.first = std::max({most.first, sent[0], received[0]});
        most.second = std::max({most.second, sent[1], received[1]});
      }
      return most;
    };
    const auto ns = [&](std::pair<int64_t, int64_t> shares, int64_t bytes) {
      const double each = static_cast<double>(bytes) / static_cast<double>(members_);
      const auto one = [](double bytes, double rate) {
        return static_cast<int64_t>(bytes * 1e9 / rate + 0.5);
      };
      return std::max(one(each * static_cast<double>(shares.first), links_.node_bytes_per_s),
                      one(each * static_cast<double>(shares.second), links_.network_bytes_per_s));
    };
    int64_t duration = links_.latency_ns;
    if (transfer.bytes != 0) duration += ns(most([](size_t) { return 1; }), transfer.bytes);
    if (transfer.cell >= 0) {
      const int32_t* rows = groups_[group].rows + static_cast<size_t>(transfer.cell) * members_;
      duration += ns(most([&](size_t m) { return rows[m]; }), transfer.bytes_per_row);
    }
    return duration;
  }

  void end_exchange(size_t group, int number, const SimTransfer& transfer) {
    const auto& issued = exchange_issued_[{group, number}];
    const int64_t ns = exchange_duration(group, transfer);
    int64_t& free = comm_free_[group];
    free = std::max(free, *std::max_element(issued.begin(), issued.end())) + ns;
    exchange_end_[{group, number}] = free;
    for (size_t m = 0; m < members_; ++m) {
      SimMemberResult& result = ranks_[group * members_ + m].result;
      result.busy_ns[static_cast<size_t>(SimStream::kComm)] += ns;
      result.end_ns = std::max(result.end_ns, free);
    }
  }

  void end_message(const SimTransfer& transfer, size_t member) {
    const std::pair<int, size_t> key{transfer.message, member};
    if (!sent_.contains(key) || !posted_.contains(key)) return;
    const size_t from = peer_[{transfer.message, true}], to = peer_[{transfer.message, false}];
    const int64_t ns =
        links_.message_latency_ns +
        static_cast<int64_t>(
            static_cast<double>(transfer.bytes) * 1e9 / links_.message_bytes_per_s + 0.5);
    int64_t& free = link_free_[{from, to, transfer.gradient, member}];
    free = std::max({free, sent_[key], posted_[key]}) + ns;
    message_end_[key] = free;
    SimMemberResult& sender = ranks_[from * members_ + member].result;
    SimMemberResult& receiver = ranks_[to * members_ + member].result;
    sender.busy_ns[static_cast<size_t>(SimStream::kSend)] += ns;
    receiver.busy_ns[static_cast<size_t>(SimStream::kReceive)] += ns;
    sender.end_ns = std::max(sender.end_ns, free);
    receiver.end_ns = std::max(receiver.end_ns, free);
  }

  bool await(Rank& rank, int id) {
    const SimTransfer& transfer = rank.program->transfers[static_cast<size_t>(id)];
    int64_t end = 0;
    int64_t* wait = &rank.result.comm_wait_ns;
    if (transfer.kind == SimTransferKind::kExchange) {
      const auto found = exchange_end_.find({rank.group, rank.exchange_of.at(id)});
      if (found == exchange_end_.end()) return false;
      end = found->second;
    } else if (transfer.kind == SimTransferKind::kMessage) {
      const auto found = message_end_.find({transfer.message, rank.member});
      if (found == message_end_.end()) return false;
      end = found->second;
    } else {
      end = rank.copy_end.at(id);
      wait = &rank.result.copy_wait_ns;
    }
    *wait += std::max<int64_t>(0, end - rank.now);
    rank.now = std::max(rank.now, end);
    return true;
  }

  SimLinks links_;
  std::vector<SimGroup> groups_;
  size_t members_;
  std::vector<Rank> ranks_;
  std::map<std::pair<size_t, int>, std::vector<int64_t>> exchange_issued_;
  std::map<std::pair<size_t, int>, int64_t> exchange_end_;
  std::map<size_t, int64_t> comm_free_;
  MessageEnds sent_, posted_, message_end_;
  std::map<std::pair<int, bool>, size_t> peer_;
  std::map<std::tuple<size_t, size_t, bool, size_t>, int64_t> link_free_;
};

}  // namespace bagualu
