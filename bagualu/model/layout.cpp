#include "bagualu/model/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

void at_least_one(const char* field, int64_t value, int64_t max, const std::string& where) {
  if (value >= 1 && value <= max) return;
  throw InvalidInput(where, field, fmt::format("{}", value),
                     fmt::format("an integer from 1 to {}", max));
}

}  // namespace

int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

std::string_view dtype_name(Dtype dtype) { return dtype == Dtype::kFp32 ? "fp32" : "bf16"; }

Dtype parse_dtype(std::string_view text, const std::string& where, const std::string& field) {
  if (text == "fp32") return Dtype::kFp32;
  if (text == "bf16") return Dtype::kBf16;
  throw InvalidInput(where, field, fmt::format("\"{}\"", text), "fp32 or bf16");
}

int64_t max_rows(const ModelSpec& spec, const TrainShape& shape, const ParallelLayout& layout) {
  return layout.ep_size * shape.tokens() * std::min(spec.top_k, layout.experts_local(spec));
}

void validate(const ModelSpec& spec, const TrainShape& shape, const ParallelLayout& layout,
              const std::string& where) {
  constexpr int64_t kMaxSize = int64_t{1} << 24;
  at_least_one("micro_batch_size", shape.micro_batch_size, kMaxSize, where);
  at_least_one("seq", shape.seq, kMaxSize, where);
  at_least_one("microbatches", shape.microbatches, kMaxSize, where);
  at_least_one("world_size", layout.world_size, kMaxSize, where);
  at_least_one("ep", layout.ep_size, kMaxSize, where);
  if (spec.experts % layout.ep_size != 0) {
    throw InvalidInput(where, "ep", fmt::format("{}", layout.ep_size),
                       fmt::format("a divisor of experts = {}", spec.experts));
  }
  if (layout.world_size % layout.ep_size != 0) {
    throw InvalidInput(where, "ep", fmt::format("{}", layout.ep_size),
                       fmt::format("a divisor of world_size = {}", layout.world_size));
  }
  const double rows = static_cast<double>(layout.ep_size) * static_cast<double>(shape.tokens()) *
                      static_cast<double>(spec.top_k);
  if (rows > static_cast<double>(std::numeric_limits<int32_t>::max())) {
    throw InvalidInput(where, "micro_batch_size * seq", fmt::format("{}", shape.tokens()),
                       "at most 2^31 routed rows per expert-parallel group (tokens * ep * top_k)");
  }
}

void check_world_size(const ParallelLayout& layout, int64_t launched, const std::string& where) {
  if (layout.world_size == launched) return;
  throw InvalidInput(where, "world_size", fmt::format("{} launched ranks", launched),
                     fmt::format("{}, as the layout says", layout.world_size));
}

}  // namespace bagualu
