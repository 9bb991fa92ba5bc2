#include "bagualu/cost/measured_operators.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using Table = std::vector<MeasuredOperator>;

constexpr std::array<std::pair<const char*, Table MeasuredOperators::*>, 5> kTables = {
    {{"gemm", &MeasuredOperators::gemm},
     {"grouped_gemm", &MeasuredOperators::grouped_gemm},
     {"attention_forward", &MeasuredOperators::attention_forward},
     {"attention_backward", &MeasuredOperators::attention_backward},
     {"memory", &MeasuredOperators::memory}}};

Table read_table(const Json& list, const std::string& where, const char* name) {
  constexpr const char* kAllowed = "[[work, ns], ...], both > 0, work rising";
  if (!list.is_array()) throw InvalidInput(where, name, list.dump(), kAllowed);
  Table table;
  for (const Json& point : list) {
    const bool pair =
        point.is_array() && point.size() == 2 && point[0].is_number() && point[1].is_number();
    const MeasuredOperator entry =
        pair ? MeasuredOperator{point[0].get<double>(), point[1].get<double>()}
             : MeasuredOperator{};
    const bool rises = table.empty() || entry.work > table.back().work;
    if (!(entry.work > 0) || !(entry.ns > 0) || !rises) {
      throw InvalidInput(where, name, point.dump(), kAllowed);
    }
    table.push_back(entry);
  }
  return table;
}

}  // namespace

double measured_ns(const std::vector<MeasuredOperator>& table, double work) {
  const auto slope = [](const MeasuredOperator& entry) { return entry.ns / entry.work; };
  const auto above =
      std::lower_bound(table.begin(), table.end(), work,
                       [](const MeasuredOperator& entry, double w) { return entry.work < w; });
  if (above == table.end()) return work * slope(table.back());
  if (above == table.begin()) return work * slope(table.front());
  const auto below = above - 1;
  const double part = std::log(work / below->work) / std::log(above->work / below->work);
  return work * (slope(*below) + part * (slope(*above) - slope(*below)));
}

MeasuredOperators measured_operators_from_json(const Json& object, const std::string& where) {
  JsonReader reader(object, where);
  MeasuredOperators operators;
  for (const auto& [name, table] : kTables) {
    if (reader.has(name)) operators.*table = read_table(reader.raw(name), where, name);
  }
  reader.finish();
  return operators;
}

Json to_json(const MeasuredOperators& operators) {
  Json json = Json::object();
  for (const auto& [name, table] : kTables) {
    for (const MeasuredOperator& entry : operators.*table) {
      json[name].push_back({entry.work, entry.ns});
    }
  }
  return json;
}

}  // namespace bagualu
