#include "bagualu/provision/verify_timeline.h"

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string_view>

namespace bagualu {
namespace {

enum class Place {
  kNowhere,
  kDevice,
  kToHost,  // device bytes are still taken
  kHost,
  kToDevice,  // device bytes are taken, values are not there yet
  kEncoded,
  kDropped,
};

class Checker {
 public:
  Checker(const Graph& graph, const Timeline& timeline)
      : graph_(graph),
        timeline_(timeline),
        place_(graph.storages.size(), Place::kNowhere),
        in_pieces_(graph.storages.size(), 0) {
    for (size_t s = 0; s < in_pieces_.size(); ++s) {
      in_pieces_[s] = rebuilt_in_pieces(static_cast<int>(s)) ? 1 : 0;
    }
    for (const Action& action : timeline) {
      if (is_of_storage(action.kind) && inside(action)) in_pieces_[at(action.id)] = 0;
    }
  }

  std::vector<std::string> violations() {
    for (index_ = 0; index_ < timeline_.size(); ++index_) {
      const Action& action = timeline_[index_];
      if (!inside(action)) {
        violations_.push_back("action " + std::to_string(index_) + " names what is not there");
        continue;
      }
      is_of_storage(action.kind) ? step(action.kind, action.id) : run(action.kind, action.id);
    }
    check_end();
    return std::move(violations_);
  }

 private:
  static size_t at(int index) { return static_cast<size_t>(index); }

  static bool is_of_storage(ActionKind kind) {
    switch (kind) {
      case ActionKind::kForward:
      case ActionKind::kBackward:
      case ActionKind::kRecompute:
      case ActionKind::kGate:
      case ActionKind::kForwardEnd:
      case ActionKind::kBackwardEnd:
      case ActionKind::kInputGrad:
      case ActionKind::kWeightGrad:
        return false;
      default:
        return true;
    }
  }

  bool inside(const Action& action) const {
    const size_t size = action.kind == ActionKind::kGate ? at(graph_.layers)
                        : is_of_storage(action.kind)     ? graph_.storages.size()
                                                         : graph_.ops.size();
    return action.id >= 0 && at(action.id) < size;
  }

  bool rebuilt_in_pieces(int s) const {
    const int unit = graph_.storages[at(s)].unit;
    return unit >= 0 && graph_.units[at(unit)].rebuild == Rebuild::kInPieces;
  }

  void report(const std::string& what) {
    violations_.push_back("action " + std::to_string(index_) + " (" +
                          action_text(graph_, timeline_[index_]) + "): " + what);
  }

  void require(bool condition, std::string_view what) {
    if (!condition) report(std::string(what));
  }

  // May be given up before its last use.
  void require_free_to_go(int s) {
    const StorageSpec& spec = graph_.storages[at(s)];
    require(spec.unit >= 0, "it is not saved, so nothing brings it back");
    require(spec.unit < 0 || !graph_.units[at(spec.unit)].pinned, "it is pinned");
    require(!spec.persistent, "it is a view of persistent memory");
  }

  void step(ActionKind kind, int s) {
    Place& place = place_[at(s)];
    switch (kind) {
      case ActionKind::kFree:
        require(place != Place::kToHost, "its copy to the host is not drained");
        require(place != Place::kToDevice, "its copy to the device is under way");
        require(place == Place::kDevice || place == Place::kToHost || place == Place::kToDevice,
                "it is not on the device");
        place = Place::kNowhere;
        return;
      case ActionKind::kDrop:
        require_free_to_go(s);
        require(graph_.storages[at(s)].unit < 0 ||
                    graph_.units[at(graph_.storages[at(s)].unit)].rebuild != Rebuild::kNever,
                "it cannot be rebuilt");
        require(place != Place::kToHost, "its copy to the host is not drained");
        return move(place, Place::kDevice, Place::kDropped);
      case ActionKind::kOffload:
        require_free_to_go(s);
        return move(place, Place::kDevice, Place::kToHost);
      case ActionKind::kDrain:
        return move(place, Place::kToHost, Place::kHost);
      case ActionKind::kReload:
        return move(place, Place::kHost, Place::kToDevice);
      case ActionKind::kAwait:
        return move(place, Place::kToDevice, Place::kDevice);
      case ActionKind::kEncode:
        require_free_to_go(s);
        require(graph_.storages[at(s)].lossy_element_bytes > 0, "its values must stay exact");
        return move(place, Place::kDevice, Place::kEncoded);
      case ActionKind::kDecode:
        return move(place, Place::kEncoded, Place::kDevice);
      default:
        return;
    }
  }

  void move(Place& place, Place from, Place to) {
    if (place != from) report("it is " + std::string(place_text(place)));
    place = to;
  }

  static std::string_view place_text(Place place) {
    switch (place) {
      case Place::kNowhere:
        return "not there";
      case Place::kDevice:
        return "on the device";
      case Place::kToHost:
        return "on its way to the host";
      case Place::kHost:
        return "on the host";
      case Place::kToDevice:
        return "on its way to the device";
      case Place::kEncoded:
        return "encoded";
      case Place::kDropped:
        return "dropped";
    }
    return "";
  }

  // A storage that leaves for the host can still be read.
  void read(int s) {
    const Place place = place_[at(s)];
    if (place == Place::kDevice || place == Place::kToHost) return;
    report("it reads " + graph_.storages[at(s)].name + ", which is " +
           std::string(place_text(place)));
  }

  void run(ActionKind kind, int id) {
    const OpSpec* op = kind == ActionKind::kGate ? nullptr : &graph_.ops[at(id)];
    switch (kind) {
      case ActionKind::kForward:
        require(id == next_forward_, "its turn is another");
        next_forward_ = id + 1;
        issue(*op, id, /*backward=*/false);
        for (int s : op->reads) read(s);
        for (int s : op->creates) create(s);
        return;
      case ActionKind::kForwardEnd:
        return end(*op, id, {&op->reads});
      case ActionKind::kBackward:
      case ActionKind::kInputGrad:
        return backward(*op, id, kind == ActionKind::kInputGrad);
      case ActionKind::kBackwardEnd:
        return end(*op, id, {&op->bwd_saved, &op->bwd_reads});
      case ActionKind::kWeightGrad:
        return weight_grad(*op, id);
      case ActionKind::kRecompute:
        return recompute(graph_.ops[at(id)]);
      default:
        gate(id);
    }
  }

  // Operators without a backward are passed over; others are not.
  void skip_to(int id) {
    for (int i = next_backward_ - 1; i > id; --i) {
      require(!graph_.ops[at(i)].has_backward, "the backward before it is missing");
    }
    next_backward_ = id;
  }

  void create(int s) {
    if (in_pieces_[at(s)]) return;
    if (place_[at(s)] != Place::kNowhere) {
      report("it creates " + graph_.storages[at(s)].name + ", which is there");
    }
    place_[at(s)] = Place::kDevice;
  }

  // What a communication makes is there once it ended; what it reads must be there until then.
  void issue(const OpSpec& op, int id, bool backward) {
    require(issued_ < 0, "the communication before it is not awaited");
    if (op.stream != Stream::kComm) return;
    // Nothing in the micro-batch itself waits for a send to another stage.
    const bool sends = op.kind == (backward ? OpKind::kStageRecv : OpKind::kStageSend);
    require(!sends || sent_ < 0, "the send before it is not awaited");
    (sends ? sent_ : issued_) = id;
  }

  void end(const OpSpec& op, int id, std::initializer_list<const std::vector<int>*> reads) {
    require(issued_ == id || sent_ == id, "it was not issued");
    (issued_ == id ? issued_ : sent_) = -1;
    for (const auto* list : reads) {
      for (int s : *list) read(s);
    }
    require(op.stream == Stream::kComm, "it is no communication");
  }

  void weight_grad(const OpSpec& op, int id) {
    const auto found = std::find(weight_grads_.begin(), weight_grads_.end(), id);
    require(found != weight_grads_.end(), "its input gradient has not run");
    if (found != weight_grads_.end()) weight_grads_.erase(found);
    for (int s : op.wgrad_saved) read(s);
    for (int s : op.wgrad_reads) read(s);
  }

  void backward(const OpSpec& op, int id, bool split) {
    require(next_forward_ == static_cast<int>(graph_.ops.size()), "the forward is not over");
    require(id < next_backward_, "its turn is another");
    skip_to(id);
    issue(op, id, /*backward=*/true);
    if (split) {
      require(op.has_wgrad, "it has no weight gradient");
      weight_grads_.push_back(id);
    }
    for (int s : op.bwd_saved) {
      const bool pieces =
          in_pieces_[at(s)] || (rebuilt_in_pieces(s) && place_[at(s)] == Place::kDropped);
      if (!pieces) read(s);
    }
    for (int s : op.bwd_reads) {
      const bool own =
          std::find(op.bwd_creates.begin(), op.bwd_creates.end(), s) != op.bwd_creates.end();
      if (!own) read(s);
    }
    for (int s : op.bwd_creates) {
      if (split || !graph_.storages[at(s)].deferred_only) create(s);
    }
  }

  void recompute(const OpSpec& op) {
    require(op.stream != Stream::kComm, "it would repeat a collective");
    for (int s : op.reads) read(s);
    for (int s : op.creates) {
      const int unit = graph_.storages[at(s)].unit;
      require(unit < 0 || !graph_.units[at(unit)].pinned, "it would make pinned routing again");
      const bool wanted =
          place_[at(s)] == Place::kDropped || (unit < 0 && place_[at(s)] == Place::kNowhere);
      if (wanted && !in_pieces_[at(s)]) place_[at(s)] = Place::kDevice;
    }
  }

  void gate(int layer) {
    for (const GateSpec& spec : graph_.gates) {
      if (spec.layer == layer) require(spec.op < next_forward_, "its router has not run");
    }
  }

  void check_end() {
    const int ops = static_cast<int>(graph_.ops.size());
    bool complete = next_forward_ == ops;
    for (int i = 0; i < next_backward_ && i < ops; ++i) {
      complete = complete && !graph_.ops[at(i)].has_backward;
    }
    complete = complete && weight_grads_.empty() && issued_ < 0 && sent_ < 0;
    if (!complete) violations_.push_back("operators are missing at the end");
    for (size_t s = 0; s < place_.size(); ++s) {
      const bool pieces = rebuilt_in_pieces(static_cast<int>(s)) && place_[s] == Place::kDropped;
      if (place_[s] == Place::kNowhere || pieces) continue;
      violations_.push_back(graph_.storages[s].name + " is " + std::string(place_text(place_[s])) +
                            " at the end");
    }
  }

  const Graph& graph_;
  const Timeline& timeline_;
  std::vector<Place> place_;
  std::vector<char> in_pieces_;  ///< by storage: never whole
  std::vector<std::string> violations_;
  size_t index_ = 0;
  int next_forward_ = 0;
  int issued_ = -1;                ///< communication that is not awaited
  int sent_ = -1;                  ///< send to another stage that is not awaited
  std::vector<int> weight_grads_;  ///< ops that still owe theirs
  int next_backward_ = static_cast<int>(graph_.ops.size());
};

}  // namespace

std::vector<std::string> verify_timeline(const Graph& graph, const Timeline& timeline) {
  return Checker(graph, timeline).violations();
}

}  // namespace bagualu
