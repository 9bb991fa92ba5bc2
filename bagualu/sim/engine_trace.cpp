// Results of a run, and the walk of one member's program that turns the ends of its transfers into
// a trace.
#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/sim/engine_impl.h"

namespace bagualu {

SimMemberResult SimEngine::Impl::member_result(const Class& one, const Group& group,
                                               int lane) const {
  const auto at = static_cast<size_t>(lane);
  SimMemberResult member;
  member.comm_wait_ns = group.comm_wait[at];
  member.copy_wait_ns = group.copy_wait[at];
  member.peak_bytes = group.peak[at];
  const int64_t compute_end = group.clock[at] + one.ahead_ns;
  const auto busy = [&](SimStream stream) -> int64_t& {
    return member.busy_ns[static_cast<size_t>(stream)];
  };
  // The compute stream computes or waits.
  busy(SimStream::kCompute) = compute_end - member.comm_wait_ns - member.copy_wait_ns;
  busy(SimStream::kComm) = group.comm_busy_ns;
  busy(SimStream::kToHost) = group.copy_busy[0][at];
  busy(SimStream::kToDevice) = group.copy_busy[1][at];
  busy(SimStream::kSend) = group.send_busy_ns;
  busy(SimStream::kReceive) = group.receive_busy_ns;
  member.end_ns = std::max({compute_end, group.comm_free_ns,
                            group.last_message_ns[static_cast<size_t>(group.members[at])],
                            group.copy_free[0][at], group.copy_free[1][at]});
  return member;
}

SimReplicaResult SimEngine::Impl::result() const {
  SimReplicaResult result;
  result.members = static_cast<int64_t>(members_);
  result.by_member.resize(group_count_ * members_);
  int64_t first_death = -1;
  for (const Class& one : classes_) {
    const Group& group = groups_[one.group];
    result.events += one.members * one.code->operators;
    for (int lane = one.first; lane < one.first + one.members; ++lane) {
      const auto m = static_cast<size_t>(group.members[static_cast<size_t>(lane)]);
      SimMemberResult& member = result.by_member[one.group * members_ + m];
      member = member_result(one, group, lane);
      result.end_ns = std::max(result.end_ns, member.end_ns);
      if (!one.program->dies || !one.finished) continue;
      const int64_t death = group.clock[static_cast<size_t>(lane)];
      first_death = first_death < 0 ? death : std::min(first_death, death);
    }
  }
  if (first_death >= 0) {
    result.died = true;
    result.end_ns = first_death;
  }
  return result;
}

class SimEngine::Impl::TraceWalk {
 public:
  TraceWalk(const Impl& engine, SimTrace& to) : engine_(engine), to_(to) {
    const auto g = static_cast<size_t>(to.pp_rank);
    const auto m = static_cast<size_t>(to.member);
    BGL_CHECK(g < engine.group_count_ && m < engine.members_, to.pp_rank, to.member);
    group_ = &engine.groups_[g];
    for (size_t c = group_->first_class; c < group_->end_class; ++c) {
      const auto& one = engine.classes_[c];
      for (int lane = one.first; lane < one.first + one.members; ++lane) {
        if (group_->members[static_cast<size_t>(lane)] != to.member) continue;
        program_ = one.program;
        lane_ = static_cast<size_t>(lane);
      }
    }
    ends_.assign(program_->transfers.size(), -1);
    live_ = peak_ = program_->static_bytes;
  }

  void run() {
    to_.events.clear();
    for (const SimInstruction& instruction : program_->instructions) {
      change_bytes(instruction.bytes_begin, instruction.peak_bytes_end);
      SimTraceEvent event;
      event.name = instruction.name;
      event.microbatch = instruction.microbatch;
      event.stage = instruction.stage;
      event.start_ns = event.end_ns = now_ns_;
      bool shown = true;
      switch (instruction.step) {
        case SimStep::kCompute:
          now_ns_ += compute_ns(instruction);
          event.end_ns = now_ns_;
          break;
        case SimStep::kIssue:
          shown = issue(instruction.transfer, event);
          break;
        case SimStep::kAwait: {
          const int64_t end = ends_[static_cast<size_t>(instruction.transfer)];
          if (end < 0) return;  // of a replica that died meanwhile
          now_ns_ = std::max(now_ns_, end);
          shown = false;
          break;
        }
      }
      change_bytes(instruction.peak_bytes_end, instruction.bytes_end);
      if (!shown) continue;
      event.live_bytes = live_;
      event.peak_bytes = peak_;
      peak_ = live_;
      to_.events.push_back(event);
    }
  }

 private:
  int64_t rows(int32_t cell, const int32_t* from) const {
    return cell < 0 ? 0 : from[static_cast<size_t>(cell) * group_->stride + lane_];
  }

  int64_t compute_ns(const SimInstruction& instruction) const {
    const OpTime& time = program_->times[static_cast<size_t>(instruction.time)];
    return time.eval(instruction.cell < 0 ? program_->tokens
                                          : rows(instruction.cell, group_->rows));
  }

  void change_bytes(int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
      const SimBytes& bytes = program_->bytes[static_cast<size_t>(i)];
      const LayerLoad load{rows(bytes.cell, group_->rows), rows(bytes.cell, group_->piece_rows)};
      live_ += bytes.sign * bytes.formula.eval(program_->tokens, load);
    }
    peak_ = std::max(peak_, live_);
  }

  // False: it never started.
  bool issue(int32_t id, SimTraceEvent& event) {
    const SimTransfer& transfer = program_->transfers[static_cast<size_t>(id)];
    switch (transfer.kind) {
      case SimTransferKind::kExchange: {
        const auto& exchange = group_->exchanges[exchanges_++];
        if (!exchange.over) return false;
        event.stream = SimStream::kComm;
        event.start_ns = exchange.start_ns;
        event.end_ns = exchange.end_ns;
        break;
      }
      case SimTransferKind::kMessage: {
        const auto number = static_cast<size_t>(transfer.message);
        const auto& message = engine_.messages_[number];
        if (!message.over) return false;
        event.stream = transfer.sends ? SimStream::kSend : SimStream::kReceive;
        event.end_ns = engine_.message_ns(number)[to_.member];
        event.start_ns = event.end_ns - message.duration_ns;
        break;
      }
      case SimTransferKind::kToHost:
      case SimTransferKind::kToDevice: {
        const bool up = transfer.kind == SimTransferKind::kToDevice;
        event.stream = up ? SimStream::kToDevice : SimStream::kToHost;
        const int64_t bytes =
            transfer.bytes + transfer.bytes_per_row * rows(transfer.cell, group_->rows);
        event.start_ns = std::max(now_ns_, copy_free_[up]);
        event.end_ns = event.start_ns +
                       transfer_ns(static_cast<double>(bytes), up ? engine_.links_.h2d_bytes_per_s
                                                                  : engine_.links_.d2h_bytes_per_s);
        copy_free_[up] = event.end_ns;
        break;
      }
    }
    ends_[static_cast<size_t>(id)] = event.end_ns;
    return true;
  }

  const Impl& engine_;
  SimTrace& to_;
  const Group* group_ = nullptr;
  const StepProgram* program_ = nullptr;
  size_t lane_ = 0;
  size_t exchanges_ = 0;
  std::vector<int64_t> ends_;  // by transfer
  int64_t copy_free_[2] = {0, 0};
  int64_t now_ns_ = 0;
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

void SimEngine::Impl::trace(SimTrace& to) const { TraceWalk(*this, to).run(); }

}  // namespace bagualu
