#include "bagualu/sim/engine.h"

#include <fmt/core.h>

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/sim/engine_impl.h"

namespace bagualu {

SimEngine::SimEngine(const SimLinks& links) : impl_(std::make_unique<Impl>(links)) {}
SimEngine::~SimEngine() = default;

SimReplicaResult SimEngine::run(const std::vector<SimGroup>& groups,
                                std::vector<SimTrace>* traces) {
  return impl_->run(groups, traces);
}

SimReplicaResult SimEngine::Impl::run(const std::vector<SimGroup>& groups,
                                      std::vector<SimTrace>* traces) {
  set_up(groups);
  for (size_t i = 0; i < queue_.size(); ++i) advance(queue_[i]);
  const auto finished = [](const Class& one) { return one.finished; };
  const auto died = [](const Class& one) { return one.finished && one.program->dies; };
  if (!std::all_of(classes_.begin(), classes_.end(), finished) &&
      std::none_of(classes_.begin(), classes_.end(), died)) {
    report_stall();
  }
  for (const Class& one : classes_) run_memory(one, groups_[one.group]);
  if (traces != nullptr) {
    for (SimTrace& wanted : *traces) trace(wanted);
  }
  return result();
}

void SimEngine::Impl::advance(size_t c) {
  Class& one = classes_[c];
  Group& group = groups_[one.group];
  one.blocked = false;
  const std::vector<TimeOp>& ops = one.code->time_ops;
  while (!one.finished) {
    if (!step(one, group, ops[one.at])) {
      one.blocked = true;
      return;
    }
    ++one.at;
  }
}

// False: it waits for what is not over; nothing has happened.
bool SimEngine::Impl::step(Class& one, Group& group, const TimeOp& op) {
  int64_t* const clock = group.clock.data() + one.first;
  const StepCode& code = *one.code;
  switch (op.kind) {
    case TimeOp::Kind::kRows:
      math_.add_rows(clock, group.rows + static_cast<size_t>(op.cell) * group.stride + one.first,
                     one.lanes, one.ahead_ns + op.before_ns, code.row_times.data() + op.begin,
                     op.end - op.begin, code.pieces.data());
      one.ahead_ns = 0;
      return true;
    case TimeOp::Kind::kIssueExchange:
      one.ahead_ns += op.before_ns;
      issue_exchange(one, group, op);
      return true;
    case TimeOp::Kind::kAwaitExchange: {
      const Exchange& exchange = group.exchanges[static_cast<size_t>(op.slot)];
      if (!exchange.over) return false;
      math_.await_one(clock, group.comm_wait.data() + one.first, one.lanes,
                      one.ahead_ns + op.before_ns, exchange.end_ns);
      one.ahead_ns = 0;
      return true;
    }
    case TimeOp::Kind::kIssueSend:
    case TimeOp::Kind::kIssueReceive:
      one.ahead_ns += op.before_ns;
      issue_message(one, group, op);
      return true;
    case TimeOp::Kind::kAwaitMessage:
      if (!messages_[static_cast<size_t>(op.slot)].over) return false;
      await_message(one, group, op);
      return true;
    case TimeOp::Kind::kIssueCopy:
      one.ahead_ns += op.before_ns;
      issue_copy(one, group, op);
      return true;
    case TimeOp::Kind::kAwaitCopy:
      math_.await_each(clock, group.copy_wait.data() + one.first, one.lanes,
                       one.ahead_ns + op.before_ns,
                       group.copy_ends.data() + one.copy_ends +
                           static_cast<size_t>(op.slot) * static_cast<size_t>(one.lanes));
      one.ahead_ns = 0;
      return true;
    case TimeOp::Kind::kEnd:
      for (int lane = 0; lane < one.lanes; ++lane) clock[lane] += one.ahead_ns + op.before_ns;
      one.ahead_ns = 0;
      one.finished = true;
      return true;
  }
  throw InternalError("unknown time op");
}

void SimEngine::Impl::issue_exchange(Class& one, Group& group, const TimeOp& op) {
  Exchange& exchange = group.exchanges[static_cast<size_t>(op.slot)];
  if (exchange.members == 0) {  // the others' transfers are the same
    const SimTransfer& transfer = one.program->transfers[static_cast<size_t>(op.transfer)];
    exchange.cell = transfer.cell;
    exchange.bytes = transfer.bytes;
    exchange.bytes_per_row = transfer.bytes_per_row;
  }
  BGL_CHECK(exchange.cell == op.cell, one.group, op.slot, exchange.cell, op.cell,
            "members of a group exchange in different orders");
  exchange.members += one.members;
  exchange.issued_ns = std::max(
      exchange.issued_ns, math_.latest(group.clock.data() + one.first, one.lanes) + one.ahead_ns);
  if (exchange.members == static_cast<int32_t>(members_)) finish_exchange(group, exchange);
}

void SimEngine::Impl::finish_exchange(Group& group, Exchange& exchange) {
  // Every member issues in one order, so the exchange before it is over.
  exchange.start_ns = std::max(exchange.issued_ns, group.comm_free_ns);
  int64_t duration = 0;
  const auto members = static_cast<int64_t>(members_);
  if (exchange.cell >= 0 && exchange.bytes_per_row != 0) {
    ExchangeShares& shares = group.shares[static_cast<size_t>(exchange.cell)];
    if (shares.node < 0) {
      by_member_.resize(members_);
      const int32_t* rows = group.rows + static_cast<size_t>(exchange.cell) * group.stride;
      for (int lane = 0; lane < group.lanes; ++lane) {
        by_member_[static_cast<size_t>(group.members[static_cast<size_t>(lane)])] = rows[lane];
      }
      shares = exchange_shares(links_, by_member_.data(), members);
    }
    duration = exchange_ns(links_, static_cast<double>(exchange.bytes_per_row), shares, members);
    if (exchange.bytes != 0)
      duration +=
          even_exchange_ns(links_, exchange.bytes, members) - (members > 1 ? links_.latency_ns : 0);
  } else {
    duration = even_exchange_ns(links_, exchange.bytes, members);
  }
  exchange.end_ns = group.comm_free_ns = exchange.start_ns + duration;
  group.comm_busy_ns += duration;
  exchange.over = true;
  ++group.exchanges_over;
  wake(group);
}

void SimEngine::Impl::wake(const Group& group) {
  for (size_t c = group.first_class; c < group.end_class; ++c) {
    Class& one = classes_[c];
    if (!one.blocked) continue;
    const TimeOp& op = one.code->time_ops[one.at];
    const auto slot = static_cast<size_t>(op.slot);
    const bool over =
        op.kind == TimeOp::Kind::kAwaitExchange ? group.exchanges[slot].over : messages_[slot].over;
    if (!over) continue;
    one.blocked = false;
    queue_.push_back(c);
  }
}

void SimEngine::Impl::issue_message(Class& one, Group& group, const TimeOp& op) {
  const auto id = static_cast<size_t>(op.slot);
  Message& message = messages_[id];
  MessageEnd& end = message.ends[op.kind == TimeOp::Kind::kIssueSend ? 0 : 1];
  const int32_t order = one.messages++;
  if (end.members == 0) {  // the others' transfers are the same
    const SimTransfer& transfer = one.program->transfers[static_cast<size_t>(op.transfer)];
    end = {transfer.bytes, static_cast<int32_t>(one.group), 0, order, transfer.gradient};
  }
  BGL_CHECK(end.group == static_cast<int32_t>(one.group) && end.order == order, id, one.group,
            "members of a group issue messages in different orders");
  end.members += one.members;
  int64_t* const ready = message_ns(id);
  const int64_t* const clock = group.clock.data() + one.first;
  const int32_t* const member = group.members.data() + one.first;
  for (int lane = 0; lane < one.members; ++lane) {
    int64_t& at = ready[member[lane]];
    at = std::max(at, clock[lane] + one.ahead_ns);
  }
  const auto all = static_cast<int32_t>(members_);
  if (message.ends[0].members == all && message.ends[1].members == all) finish_message(id);
}

void SimEngine::Impl::finish_message(size_t id) {
  Message& message = messages_[id];
  const MessageEnd &from = message.ends[0], &to = message.ends[1];
  BGL_CHECK(from.bytes == to.bytes && from.gradient == to.gradient, id, from.bytes, to.bytes,
            "the ends of a message disagree");
  const size_t link =
      (static_cast<size_t>(from.group) * group_count_ + static_cast<size_t>(to.group)) * 2 +
      (from.gradient ? 1 : 0);
  if (channel_of_[link] < 0) channel_of_[link] = channels_used_++;
  if (channels_.size() < static_cast<size_t>(channels_used_)) {
    channels_.push_back({.orders = {-1, -1}, .free_ns = std::vector<int64_t>(members_, 0)});
  }
  Channel& channel = channels_[static_cast<size_t>(channel_of_[link])];
  BGL_CHECK(channel.orders[0] < from.order && channel.orders[1] < to.order, id, from.group,
            to.group, "messages between two ranks overtake each other");
  channel.orders[0] = from.order;
  channel.orders[1] = to.order;
  const int64_t duration = links_.message_latency_ns +
                           transfer_ns(static_cast<double>(from.bytes), links_.message_bytes_per_s);
  message.duration_ns = duration;
  int64_t* const end = message_ns(id);
  Group& sender = groups_[static_cast<size_t>(from.group)];
  Group& receiver = groups_[static_cast<size_t>(to.group)];
  for (size_t m = 0; m < members_; ++m) {
    end[m] = channel.free_ns[m] = std::max(end[m], channel.free_ns[m]) + duration;
    for (Group* group : {&sender, &receiver}) {
      group->last_message_ns[m] = std::max(group->last_message_ns[m], end[m]);
    }
  }
  std::fill(end + members_, end + message_stride_, end[members_ - 1]);
  message.over = true;
  sender.send_busy_ns += duration;
  receiver.receive_busy_ns += duration;
  wake(sender);
  if (from.group != to.group) wake(receiver);
}

void SimEngine::Impl::await_message(Class& one, Group& group, const TimeOp& op) {
  const int64_t* end = message_ns(static_cast<size_t>(op.slot));
  if (!group.in_order) {
    const int32_t* const member = group.members.data() + one.first;
    for (int lane = 0; lane < one.lanes; ++lane) {
      gathered_[static_cast<size_t>(lane)] = end[member[lane]];
    }
    end = gathered_.data();
  }
  math_.await_each(group.clock.data() + one.first, group.comm_wait.data() + one.first, one.lanes,
                   one.ahead_ns + op.before_ns, end);
  one.ahead_ns = 0;
}

void SimEngine::Impl::issue_copy(Class& one, Group& group, const TimeOp& op) {
  const SimTransfer& transfer = one.program->transfers[static_cast<size_t>(op.transfer)];
  const bool up = transfer.kind == SimTransferKind::kToDevice;
  const double rate = up ? links_.h2d_bytes_per_s : links_.d2h_bytes_per_s;
  BGL_CHECK(rate > 0, "copies to or from a host without a speed");
  const size_t first = static_cast<size_t>(one.first);
  const auto cell = static_cast<size_t>(std::max(transfer.cell, 0));
  // Without a cell its rows do not count; any numbers will do.
  const int32_t* rows =
      transfer.cell >= 0 ? group.rows + cell * group.stride + first : group.members.data() + first;
  SimTransfer fixed = transfer;
  if (transfer.cell < 0) fixed.bytes_per_row = 0;
  int64_t* end = nullptr;
  if (op.slot >= 0) {
    end = group.copy_ends.data() + one.copy_ends +
          static_cast<size_t>(op.slot) * static_cast<size_t>(one.lanes);
  }
  math_.copy(group.clock.data() + first, one.ahead_ns, group.copy_free[up].data() + first,
             group.copy_busy[up].data() + first, end, rows, one.lanes, fixed, rate);
}

void SimEngine::Impl::run_memory(const Class& one, Group& group) {
  int64_t* const own = group.own.data() + one.first;
  int64_t* const peak = group.peak.data() + one.first;
  const StepCode& code = *one.code;
  for (const MemoryOp& op : code.memory_ops) {
    const size_t at = static_cast<size_t>(op.cell) * group.stride + static_cast<size_t>(one.first);
    math_.memory(own, peak, group.rows + at, group.piece_rows + at, one.lanes, op,
                 code.rounded.data());
  }
  for (int lane = 0; lane < one.lanes; ++lane) {
    peak[lane] = std::max(peak[lane], own[lane] + code.last_high_bytes) + one.program->static_bytes;
  }
}

std::string SimEngine::Impl::waits_for(const Class& one) const {
  const TimeOp& op = one.code->time_ops[one.at];
  const SimTransfer& transfer = one.program->transfers[static_cast<size_t>(op.transfer)];
  const int32_t member = groups_[one.group].members[static_cast<size_t>(one.first)];
  const bool named =
      transfer.name >= 0 && transfer.name < static_cast<int32_t>(one.program->names.size());
  const std::string name =
      named ? one.program->names[static_cast<size_t>(transfer.name)] : std::string("unnamed");
  std::string missing;
  if (op.kind == TimeOp::Kind::kAwaitMessage) {
    const Message& message = messages_[static_cast<size_t>(op.slot)];
    for (int side = 0; side < 2; ++side) {
      if (message.ends[side].members == static_cast<int32_t>(members_)) continue;
      missing += fmt::format(", {} by {} of {} members", side == 0 ? "sent" : "posted",
                             message.ends[side].members, members_);
    }
    return fmt::format("pp rank {} member {} waits for message {} ({}){}", one.group, member,
                       op.slot, name, missing);
  }
  return fmt::format("pp rank {} member {} waits for exchange {} ({}), issued by {} of {} members",
                     one.group, member, op.slot, name,
                     groups_[one.group].exchanges[static_cast<size_t>(op.slot)].members, members_);
}

void SimEngine::Impl::report_stall() const {
  std::string text = "ranks wait for each other";
  int told = 0;
  for (const Class& one : classes_) {
    if (one.finished) continue;
    if (++told > 8) break;
    text += "; " + waits_for(one);
  }
  throw InternalError(text);
}

}  // namespace bagualu
