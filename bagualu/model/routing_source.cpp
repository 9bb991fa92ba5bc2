#include "bagualu/model/routing_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/routing_shapes.h"

namespace bagualu {
namespace {

constexpr const char* kFormat = "bagualu.routing";
constexpr int64_t kVersion = 1;
constexpr size_t kMostNumbers = 100000;

RoutingKind kind_of(const std::string& name, const std::string& where) {
  const std::vector<std::string>& kinds = routing_kinds();
  const auto found = std::find(kinds.begin(), kinds.end(), name);
  if (found == kinds.end()) {
    throw InvalidInput(where, "kind", name, fmt::format("{}", fmt::join(kinds, ", ")));
  }
  return static_cast<RoutingKind>(found - kinds.begin());
}

void check_number(double value, double low, double high, const char* field,
                  const std::string& where) {
  if (value >= low && value <= high) return;
  throw InvalidInput(where, field, fmt::format("{}", value), fmt::format("{} to {}", low, high));
}

void check_quantiles(const RoutingShape& shape, RoutingKind kind, const std::string& where) {
  const std::vector<double>& q = shape.quantiles;
  if (kind != RoutingKind::kFitted) {
    if (q.empty()) return;
    throw InvalidInput(where, "quantiles", fmt::format("{} numbers", q.size()),
                       fmt::format("none with kind {}: they are for \"fitted\"", shape.kind));
  }
  if (q.empty()) {
    throw InvalidInput(where, "quantiles", "none", "factors from 1 on, rising, with kind fitted");
  }
  for (size_t i = 0; i < q.size(); ++i) {
    const double least = i == 0 ? 1.0 : q[i - 1];
    if (q[i] >= least && q[i] <= 1e6) continue;
    throw InvalidInput(where, fmt::format("quantiles[{}]", i), fmt::format("{}", q[i]),
                       fmt::format("{} to 1000000: factors are at least 1 and rise", least));
  }
}

RoutingKind check_shape(const RoutingShape& shape, const std::string& where) {
  const RoutingKind kind = kind_of(shape.kind, where);
  check_number(shape.calm_fraction, 0, 1, "calm_fraction", where);
  check_number(shape.calm_limit, 1, 1e6, "calm_limit", where);
  check_number(shape.largest, 1, 1e6, "largest", where);
  if (shape.largest < shape.calm_limit && kind != RoutingKind::kFitted) {
    throw InvalidInput(where, "largest", fmt::format("{}", shape.largest),
                       fmt::format("at least calm_limit, {}", shape.calm_limit));
  }
  check_number(shape.autocorrelation, 0, 0.95, "autocorrelation", where);
  check_number(shape.layer_spread, 0, 1, "layer_spread", where);
  check_number(shape.rank_agreement, 0, 1, "rank_agreement", where);
  check_number(shape.microbatch_spread, 0, 1, "microbatch_spread", where);
  for (size_t i = 0; i < shape.layer_profile.size(); ++i) {
    if (shape.layer_profile[i] > 0 && shape.layer_profile[i] <= 1) continue;
    throw InvalidInput(where, fmt::format("layer_profile[{}]", i),
                       fmt::format("{}", shape.layer_profile[i]), "above 0, at most 1");
  }
  check_quantiles(shape, kind, where);
  return kind;
}

std::vector<double> numbers(JsonReader* reader, const std::string& key) {
  const Json& list = reader->raw(key);
  std::vector<double> values;
  if (list.is_null()) return values;
  const bool fits =
      list.is_array() && list.size() <= kMostNumbers &&
      std::all_of(list.begin(), list.end(), [](const Json& entry) { return entry.is_number(); });
  if (!fits) {
    throw InvalidInput(reader->where(), key, list.dump().substr(0, 60),
                       fmt::format("a list of at most {} numbers", kMostNumbers));
  }
  for (const Json& entry : list) values.push_back(entry.get<double>());
  return values;
}

}  // namespace

const std::vector<std::string>& routing_kinds() {
  static const std::vector<std::string> kinds = {
      "paper",      "balanced",      "hot-expert-set", "hot-rank",
      "spread-hot", "ragged-source", "zero-load",      "rotating-hot-spot",
      "burst",      "cold-router",   "fitted"};
  return kinds;
}

RoutingShape routing_shape_from_json(const Json& object, const std::string& where) {
  JsonReader reader(object, where);
  const std::string format = reader.string_or("format", kFormat);
  if (format != kFormat) throw InvalidInput(where, "format", format, kFormat);
  reader.int64_or("version", kVersion, kVersion, kVersion);
  RoutingShape shape;
  shape.kind = reader.string("kind");
  shape.seed = static_cast<uint64_t>(reader.int64_or("seed", 0, 0));
  shape.calm_fraction = reader.number_or("calm_fraction", shape.calm_fraction);
  shape.calm_limit = reader.number_or("calm_limit", shape.calm_limit);
  shape.largest = reader.number_or("largest", shape.largest);
  shape.autocorrelation = reader.number_or("autocorrelation", shape.autocorrelation);
  shape.layer_profile = numbers(&reader, "layer_profile");
  shape.layer_spread = reader.number_or("layer_spread", shape.layer_spread);
  shape.rank_agreement = reader.number_or("rank_agreement", shape.rank_agreement);
  shape.microbatch_spread = reader.number_or("microbatch_spread", shape.microbatch_spread);
  shape.quantiles = numbers(&reader, "quantiles");
  reader.finish();
  check_shape(shape, where);
  return shape;
}

Json to_json(const RoutingShape& shape) {
  Json json = {{"format", kFormat},
               {"version", kVersion},
               {"kind", shape.kind},
               {"seed", shape.seed},
               {"calm_fraction", shape.calm_fraction},
               {"calm_limit", shape.calm_limit},
               {"largest", shape.largest},
               {"autocorrelation", shape.autocorrelation},
               {"layer_profile", shape.layer_profile},
               {"layer_spread", shape.layer_spread},
               {"rank_agreement", shape.rank_agreement},
               {"microbatch_spread", shape.microbatch_spread}};
  if (!shape.quantiles.empty()) json["quantiles"] = shape.quantiles;
  return json;
}

std::unique_ptr<RoutingSource> make_routing_source(const RoutingShape& shape) {
  return std::make_unique<ShapeSource>(shape, check_shape(shape, "routing"));
}

}  // namespace bagualu
