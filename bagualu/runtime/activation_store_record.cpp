#include "bagualu/runtime/activation_store_record.h"

#include <fmt/core.h>

#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {

std::string_view state_name(StorageState state) {
  switch (state) {
    case StorageState::kEmpty:
      return "EMPTY";
    case StorageState::kLive:
      return "LIVE";
    case StorageState::kD2H:
      return "D2H";
    case StorageState::kHost:
      return "HOST";
    case StorageState::kH2D:
      return "H2D";
    case StorageState::kDropped:
      return "DROPPED";
    case StorageState::kRecomputed:
      return "RECOMPUTED";
    case StorageState::kEncoded:
      return "ENCODED";
    case StorageState::kLent:
      return "LENT";
    case StorageState::kReleased:
      return "RELEASED";
  }
  return "?";
}

bool is_legal(StorageState from, StorageState to) {
  switch (to) {
    case StorageState::kEmpty:
      return false;
    case StorageState::kLive:
      return from == StorageState::kEmpty || from == StorageState::kH2D ||
             from == StorageState::kEncoded || from == StorageState::kLent;
    case StorageState::kD2H:
    case StorageState::kDropped:
    case StorageState::kLent:
    case StorageState::kEncoded:
      return from == StorageState::kLive || from == StorageState::kRecomputed;
    case StorageState::kHost:
      return from == StorageState::kD2H;
    case StorageState::kH2D:
      return from == StorageState::kHost;
    case StorageState::kRecomputed:
      return from == StorageState::kDropped;
    case StorageState::kReleased:
      return from == StorageState::kLive || from == StorageState::kRecomputed ||
             from == StorageState::kHost;
  }
  return false;
}

StorageRecord::StorageRecord(int64_t step, int64_t microbatch, StorageInfo info)
    : step_(step), microbatch_(microbatch), info_(std::move(info)) {
  // The longest usual life: EMPTY LIVE D2H HOST H2D LIVE RELEASED.
  history_.reserve(8);
  history_.push_back(StorageState::kEmpty);
}

bool StorageRecord::is_live() const {
  return state() == StorageState::kLive || state() == StorageState::kRecomputed;
}

void StorageRecord::check_move(StorageState to, std::string_view verb) const {
  if (!is_legal(state(), to)) {
    throw InternalError(fmt::format("{}: illegal step {} -> {} of {}", verb, state_name(state()),
                                    state_name(to), dump()));
  }
}

void StorageRecord::move(StorageState to, std::string_view verb, uint64_t generation) {
  check_move(to, verb);
  history_.push_back(to);
  if (generation != 0) {
    generation_ = generation;
  }
}

std::string StorageRecord::key() const {
  return fmt::format("step {} microbatch {} layer {} storage {} generation {}", step_, microbatch_,
                     info_.layer, info_.name, generation_);
}

std::string StorageRecord::dump() const {
  std::string states;
  for (const StorageState each : history_) {
    states += fmt::format("{}{}", states.empty() ? "" : " > ", state_name(each));
  }
  return fmt::format("[{}; history {}]", key(), states);
}

}  // namespace bagualu
