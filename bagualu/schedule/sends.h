// What a rank does around each pass so that activations and gradients reach the next stage, and
// where it may wait for its own sends without ever waiting for more than bytes in flight.
//
// A send completes only once its receive is posted (rendezvous: Gloo, and NCCL above its buffers).
// A rank that awaits a send too early waits for a neighbour that may be waiting for it. So the plan
// uses logical time alone: a rank awaits a send where the order itself proves that the receive has
// been posted, whatever the ranks' speeds.
#pragma once

#include <vector>

#include "bagualu/schedule/overlap_order.h"

namespace bagualu {

/// A tensor [tokens, hidden] that one stage hands to its neighbour on another rank: an activation
/// (between two forwards) or a gradient (between two whole backwards or input gradients).
struct StageMessage {
  PipelinePass from;
  PipelinePass to;
  int from_rank = 0;
  int to_rank = 0;
  bool is_gradient() const { return from.kind != PassKind::kForward; }
  bool operator==(const StageMessage&) const = default;
};

/// What a rank does around one pass or slot, in this order:
///   post the receives, await the receives that it needs, await sends, run it, issue its sends.
/// Numbers are those of SendPlan::messages.
struct PassTraffic {
  std::vector<int> post;
  std::vector<int> receive;
  std::vector<int> await_sent;
  std::vector<int> send;
};

struct SendPlan {
  /// The place is the message's number, the same on every rank: it may serve as its tag.
  std::vector<StageMessage> messages;
  /// By rank and pass; that of a slot stands at its first pass, its second has nothing.
  std::vector<std::vector<PassTraffic>> at;
  /// By rank: sends that nothing in its list proves posted. They are awaited after the last pass,
  /// when no rank needs this one to go on.
  std::vector<std::vector<int>> await_at_end;
};

/// Facts used. A pass starts after the pass before it on its rank, and after the passes that sent
/// its inputs, have ended; each of those the same in turn. Let P(x) be all that so precedes x.
///   Post     the receive of pass x before the pass y that stands before x on its rank, so that
///            bytes travel while y runs; but before x itself if y is in P(sender of x): the sender
///            then cannot be done before y, and a buffer would be held for nothing.
///   Await    a send before the first pass z of the sender's rank whose P(z) has the pass before
///            which its receive is posted: that pass has ended, so the receive was posted. (Who
///            awaits it before the inputs of z waits for passes that z waits for anyway: as safe.)
/// Ensures:  every message is posted, received, sent and awaited once; an await of a send at `at` is
///           for bytes in flight alone, and no rank waits for ever. Of one channel (from_rank,
///           to_rank, activation or gradient) receives are posted in the order of the sends, for
///           every order that make_overlap_order() makes: a library that matches by order needs a
///           communicator per channel, one that matches by tag needs one.
/// Requires: order_fault(order) has nothing to say.
/// Throws:   InternalError as simulate()
/// Cost:     O(passes * ranks)
/// Source:   ours; docs/design.md, Sends between stages
SendPlan send_plan(const OverlapOrder& order);

/// Largest number of sends of each rank that are issued and not yet awaited: buffers that it keeps.
std::vector<int> most_unawaited_sends(const SendPlan& plan);

}  // namespace bagualu
