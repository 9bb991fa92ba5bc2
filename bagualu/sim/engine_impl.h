// Inside of the engine. A class is the members of a group that share a program; it runs until it
// awaits what is not over, and is woken when it is. What a class computes depends on the ends of
// transfers alone, so the order in which classes run does not matter.
#pragma once

#include <string>
#include <vector>

#include "bagualu/sim/engine.h"
#include "bagualu/sim/exchange_time.h"
#include "bagualu/sim/lane_math.h"
#include "bagualu/sim/step_code.h"

namespace bagualu {

class SimEngine::Impl {
 public:
  explicit Impl(const SimLinks& links) : links_(links), math_(lane_math()) {}
  SimReplicaResult run(const std::vector<SimGroup>& groups, std::vector<SimTrace>* traces);

 private:
  /// Lanes of a group: those of a class lie together, with copies of the last behind it up to a
  /// whole block.
  struct Class {
    const StepProgram* program = nullptr;
    const StepCode* code = nullptr;
    size_t group = 0;
    int first = 0;  ///< lane
    int members = 0;
    int lanes = 0;
    size_t copy_ends = 0;  ///< in Group::copy_ends
    // State.
    size_t at = 0;         ///< in the code's time ops
    int64_t ahead_ns = 0;  ///< to be added to the clocks
    int32_t messages = 0;  ///< issued
    bool blocked = false;
    bool finished = false;
  };

  struct Exchange {
    int64_t issued_ns = 0;  ///< by the last so far
    int64_t start_ns = 0;
    int64_t end_ns = 0;
    int64_t bytes = 0;
    int64_t bytes_per_row = 0;
    int32_t cell = -1;
    int32_t members = 0;  ///< that have issued it
    bool over = false;
  };

  struct Group {
    size_t first_class = 0;
    size_t end_class = 0;
    int lanes = 0;
    bool in_order = false;          ///< lane m is member m
    std::vector<int32_t> members;   ///< by lane
    const int32_t* rows = nullptr;  ///< [cell * stride + lane]
    const int32_t* piece_rows = nullptr;
    size_t stride = 0;
    std::vector<int32_t> own_rows, own_piece_rows;
    std::vector<ExchangeShares> shares;  ///< by cell; node -1: not yet known
    std::vector<Exchange> exchanges;
    size_t exchanges_over = 0;
    int64_t comm_free_ns = 0, comm_busy_ns = 0, send_busy_ns = 0, receive_busy_ns = 0;
    std::vector<int64_t> last_message_ns;                         ///< by member
    std::vector<int64_t> clock, comm_wait, copy_wait, own, peak;  ///< by lane
    std::vector<int64_t> copy_free[2], copy_busy[2];              ///< to the host, to the device
    std::vector<int64_t> copy_ends;
  };

  struct MessageEnd {
    int64_t bytes = 0;
    int32_t group = -1;
    int32_t members = 0;  ///< that have issued it
    int32_t order = -1;   ///< which of the group's messages
    bool gradient = false;
  };
  struct Message {
    MessageEnd ends[2];  ///< sender, receiver
    int64_t duration_ns = 0;
    bool over = false;
  };
  struct Channel {
    int32_t orders[2] = {-1, -1};
    std::vector<int64_t> free_ns;  ///< by member
  };

  // engine_setup.cpp
  void set_up(const std::vector<SimGroup>& groups);
  void set_up_group(const SimGroup& group, size_t g);
  void find_classes(const SimGroup& group, size_t g);
  void place_rows(const SimGroup& group, Group& to);
  void set_up_messages();

  // engine.cpp
  void advance(size_t c);
  bool step(Class& one, Group& group, const TimeOp& op);
  void issue_exchange(Class& one, Group& group, const TimeOp& op);
  void finish_exchange(Group& group, Exchange& exchange);
  void issue_message(Class& one, Group& group, const TimeOp& op);
  void finish_message(size_t id);
  void await_message(Class& one, Group& group, const TimeOp& op);
  void issue_copy(Class& one, Group& group, const TimeOp& op);
  void wake(const Group& group);
  void run_memory(const Class& one, Group& group);
  void report_stall() const;
  std::string waits_for(const Class& one) const;

  // engine_trace.cpp
  class TraceWalk;
  void trace(SimTrace& to) const;
  SimReplicaResult result() const;
  SimMemberResult member_result(const Class& one, const Group& group, int lane) const;

  int64_t* message_ns(size_t id) { return message_ns_.data() + id * message_stride_; }
  const int64_t* message_ns(size_t id) const { return message_ns_.data() + id * message_stride_; }


  SimLinks links_;
  const LaneMath& math_;
  size_t members_ = 0;
  std::vector<Class> classes_;
  std::vector<Group> groups_;  // as many as the largest run had
  size_t group_count_ = 0;
  std::vector<StepCode> codes_;  // of programs that have none
  size_t codes_used_ = 0;
  std::vector<size_t> queue_;
  std::vector<Message> messages_;
  std::vector<int64_t> message_ns_;  // by message and member: issued by the later end, then over
  size_t message_stride_ = 0;
  std::vector<int32_t> channel_of_;  // by sender, receiver, gradient; -1: none yet
  std::vector<Channel> channels_;
  int32_t channels_used_ = 0;
  std::vector<int64_t> gathered_;   // ends of a message by lane
  std::vector<int32_t> by_member_;  // rows of a cell
};

}  // namespace bagualu
