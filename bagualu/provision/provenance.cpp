#include "bagualu/provision/provenance.h"

#include <set>
#include <string_view>

namespace bagualu {
namespace {

class Provenance {
 public:
  explicit Provenance(const Graph& graph) : graph_(graph) {}

  std::vector<std::string> violations() {
    check_indices();
    if (!found_.empty()) return std::move(found_);
    check_names();
    check_creators();
    check_units();
    check_origins();
    return std::move(found_);
  }

 private:
  void report(const std::string& subject, const std::string& what) {
    found_.push_back(subject + " " + what);
  }

  void check_list(const std::vector<int>& storages, const std::string& owner) {
    for (int s : storages) {
      if (s >= 0 && s < static_cast<int>(graph_.storages.size())) continue;
      report(owner, "names storage " + std::to_string(s) + ", which is not there");
    }
  }

  void check_indices() {
    const auto inside = [](int index, size_t size) {
      return index >= -1 && index < static_cast<int>(size);
    };
    for (const StorageSpec& spec : graph_.storages) {
      if (!inside(spec.unit, graph_.units.size()))
        report(spec.name, "names a unit that is not there");
      const bool activation = spec.kind == StorageKind::kActivation;
      if (!inside(spec.producer, graph_.ops.size()) || (activation && spec.producer < 0)) {
        report(spec.name, "has no producer");
      }
      if (!inside(spec.derived_from, graph_.storages.size())) {
        report(spec.name, "is derived from a storage that is not there");
      }
      if (!inside(spec.layer, static_cast<size_t>(graph_.layers))) {
        report(spec.name, "is in a layer that is not there");
      }
    }
    for (const UnitSpec& unit : graph_.units) check_list(unit.storages, unit.name);
    for (const OpSpec& op : graph_.ops) {
      for (const auto* list :
           {&op.reads, &op.creates, &op.bwd_saved, &op.bwd_reads, &op.bwd_creates}) {
        check_list(*list, op.name);
      }
      if (!inside(op.layer, static_cast<size_t>(graph_.layers))) {
        report(op.name, "is in a layer that is not there");
      }
    }
  }

  void check_names() {
    std::set<std::string_view> names;
    for (const StorageSpec& spec : graph_.storages) {
      if (!names.insert(spec.name).second) report(spec.name, "is the name of two storages");
    }
  }

  void check_creators() {
    std::vector<int> creators(graph_.storages.size(), 0);
    std::vector<char> exists(graph_.storages.size(), 0);
    for (const OpSpec& op : graph_.ops) {
      for (int s : op.reads) {
        if (!exists[at(s)]) report(op.name, "reads " + name(s) + " before it is there");
      }
      for (int s : op.creates) {
        exists[at(s)] = 1;
        ++creators[at(s)];
        if (graph_.ops.data() + graph_.storages[at(s)].producer != &op) {
          report(name(s), "is created by " + op.name + ", which is not its producer");
        }
      }
    }
    for (const OpSpec& op : graph_.ops) {
      for (int s : op.bwd_creates) ++creators[at(s)];
    }
    for (size_t s = 0; s < creators.size(); ++s) {
      if (creators[s] == 1) continue;
      report(graph_.storages[s].name,
             "is created by " + std::to_string(creators[s]) + " operators");
    }
  }

  void check_units() {
    std::vector<int> owners(graph_.storages.size(), 0);
    for (size_t u = 0; u < graph_.units.size(); ++u) {
      for (int s : graph_.units[u].storages) {
        ++owners[at(s)];
        const StorageSpec& spec = graph_.storages[at(s)];
        if (spec.unit != static_cast<int>(u) && spec.unit >= 0) {
          report(spec.name, "belongs to " + graph_.units[at(spec.unit)].name +
                                " and is listed by " + graph_.units[u].name);
        }
        if (!spec.persistent) continue;
        if (!graph_.units[u].pinned) {
          report(spec.name, "is a view of persistent memory in a unit that may be given up");
        }
        if (spec.bytes != ByteFormula{}) {
          report(spec.name, "is a view of persistent memory, whose bytes are counted there");
        }
      }
    }
    for (size_t s = 0; s < owners.size(); ++s) {
      if (owners[s] == (graph_.storages[s].unit >= 0 ? 1 : 0)) continue;
      report(graph_.storages[s].name, "is counted in " + std::to_string(owners[s]) + " units");
    }
  }

  void check_origins() {
    for (size_t s = 0; s < graph_.storages.size(); ++s) {
      const StorageSpec& spec = graph_.storages[s];
      if (spec.derived_from < 0) continue;
      const StorageSpec& origin = graph_.storages[at(spec.derived_from)];
      if (origin.producer >= spec.producer) {
        report(spec.name, "is derived from " + origin.name + ", which is newer");
      }
      if (origin.derived_from == static_cast<int>(s)) {
        report(spec.name, "and " + origin.name + " are derived from each other");
      }
    }
  }

  static size_t at(int index) { return static_cast<size_t>(index); }
  const std::string& name(int s) const { return graph_.storages[at(s)].name; }

  const Graph& graph_;
  std::vector<std::string> found_;
};

}  // namespace

std::vector<std::string> provenance_violations(const Graph& graph) {
  return Provenance(graph).violations();
}

}  // namespace bagualu
