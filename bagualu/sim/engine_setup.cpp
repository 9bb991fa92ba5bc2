// What a run begins with: classes, their code, rows in the order of lanes, empty clocks.
#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/sim/engine_impl.h"

namespace bagualu {

void SimEngine::Impl::set_up(const std::vector<SimGroup>& groups) {
  BGL_CHECK(!groups.empty() && !groups.front().programs.empty(), "a replica without ranks");
  members_ = groups.front().programs.size();
  group_count_ = groups.size();
  if (groups_.size() < group_count_) groups_.resize(group_count_);
  classes_.clear();
  codes_used_ = 0;
  queue_.clear();
  // Codes must not move while classes point at them.
  size_t programs = 0;
  for (const SimGroup& group : groups) programs += group.programs.size();
  if (codes_.size() < programs) codes_.resize(programs);
  for (size_t g = 0; g < groups.size(); ++g) {
    BGL_CHECK(groups[g].programs.size() == members_, g, groups[g].programs.size(), members_);
    set_up_group(groups[g], g);
  }
  set_up_messages();
  for (size_t c = 0; c < classes_.size(); ++c) queue_.push_back(c);
}

void SimEngine::Impl::set_up_group(const SimGroup& group, size_t g) {
  Group& to = groups_[g];
  find_classes(group, g);
  place_rows(group, to);
  const auto lanes = static_cast<size_t>(to.lanes);
  for (auto* by_lane : {&to.clock, &to.comm_wait, &to.copy_wait, &to.own, &to.peak,
                        &to.copy_free[0], &to.copy_free[1], &to.copy_busy[0], &to.copy_busy[1]}) {
    by_lane->assign(lanes, 0);
  }
  to.exchanges_over = 0;
  to.comm_free_ns = to.comm_busy_ns = to.send_busy_ns = to.receive_busy_ns = 0;
  to.last_message_ns.assign(members_, 0);
  int32_t exchanges = 0;
  size_t copy_ends = 0;
  for (size_t c = to.first_class; c < to.end_class; ++c) {
    Class& one = classes_[c];
    exchanges = std::max(exchanges, one.code->exchanges);
    one.copy_ends = copy_ends;
    copy_ends += static_cast<size_t>(one.code->copy_slots) * static_cast<size_t>(one.lanes);
  }
  to.exchanges.assign(static_cast<size_t>(exchanges), Exchange{});
  to.copy_ends.resize(copy_ends);
}

void SimEngine::Impl::find_classes(const SimGroup& group, size_t g) {
  Group& to = groups_[g];
  to.first_class = classes_.size();
  const auto class_of = [&](const StepProgram* program) {
    size_t c = to.first_class;
    while (c < classes_.size() && classes_[c].program != program) ++c;
    return c;
  };
  for (const StepProgram* program : group.programs) {
    BGL_CHECK(program != nullptr, g);
    const size_t c = class_of(program);
    if (c == classes_.size()) classes_.push_back({.program = program, .group = g});
    ++classes_[c].members;
  }
  to.end_class = classes_.size();
  to.lanes = 0;
  for (size_t c = to.first_class; c < to.end_class; ++c) {
    Class& one = classes_[c];
    one.first = to.lanes;
    one.lanes = (one.members + kLaneBlock - 1) / kLaneBlock * kLaneBlock;
    to.lanes += one.lanes;
    one.code = one.program->code.get();
    if (one.code != nullptr) continue;
    StepCode& code = codes_[codes_used_++];
    code.compile(*one.program);
    one.code = &code;
  }
  to.in_order = to.end_class - to.first_class == 1;
  to.members.assign(static_cast<size_t>(to.lanes), 0);
  for (size_t c = to.first_class; c < to.end_class; ++c) {
    int32_t* lane = to.members.data() + classes_[c].first;
    int32_t* const end = lane + classes_[c].lanes;
    for (size_t m = 0; m < members_; ++m) {
      if (group.programs[m] == classes_[c].program) *lane++ = static_cast<int32_t>(m);
    }
    std::fill(lane, end, lane[-1]);
  }
}

void SimEngine::Impl::place_rows(const SimGroup& group, Group& to) {
  size_t cells = 0;
  bool uses_pieces = false;
  for (size_t c = to.first_class; c < to.end_class; ++c) {
    cells = std::max(cells, static_cast<size_t>(classes_[c].program->cells));
    uses_pieces |= classes_[c].code->uses_pieces;
  }
  BGL_CHECK(cells == 0 || group.rows != nullptr, "cells without rows", cells);
  to.shares.assign(cells, {.node = -1});
  to.stride = static_cast<size_t>(to.lanes);
  const int32_t* pieces = group.piece_rows == nullptr ? group.rows : group.piece_rows;
  if (to.in_order && to.stride == members_) {
    to.rows = group.rows;
    to.piece_rows = pieces;
  } else {
    const auto place = [&](const int32_t* from, std::vector<int32_t>& own) {
      own.resize(cells * to.stride);
      for (size_t cell = 0; cell < cells; ++cell) {
        for (size_t lane = 0; lane < to.stride; ++lane) {
          own[cell * to.stride + lane] =
              from[cell * members_ + static_cast<size_t>(to.members[lane])];
        }
      }
      return own.data();
    };
    to.rows = place(group.rows, to.own_rows);
    const bool apart = uses_pieces && pieces != group.rows;
    to.piece_rows = apart ? place(pieces, to.own_piece_rows) : to.rows;
  }
  for (size_t i = 0; i < cells * to.stride; ++i) BGL_CHECK(to.rows[i] >= 0, i, to.rows[i]);
}

void SimEngine::Impl::set_up_messages() {
  int32_t messages = 0;
  for (const Class& one : classes_) messages = std::max(messages, one.code->messages);
  messages_.assign(static_cast<size_t>(messages), Message{});
  message_stride_ = (members_ + kLaneBlock - 1) / kLaneBlock * kLaneBlock;
  message_ns_.assign(static_cast<size_t>(messages) * message_stride_, 0);
  channel_of_.assign(group_count_ * group_count_ * 2, -1);
  channels_used_ = 0;
  for (Channel& channel : channels_) {
    channel.orders[0] = channel.orders[1] = -1;
    channel.free_ns.assign(members_, 0);
  }
  gathered_.resize(message_stride_);
}

}  // namespace bagualu
