// save-all: everything stays in device memory; dies when that does not fit.
#include <memory>

#include "bagualu/provision/planning_policy.h"

namespace bagualu {
namespace {

class SaveAll final : public PlanningPolicy {
 public:
  explicit SaveAll(const ProvisionContext& context)
      : PlanningPolicy(context), plan_(uniform_plan(graph_, kSave)) {}

  std::string_view name() const override { return "save-all"; }
  Decision decide(const GateInput& input) override { return describe(input, plan_); }

 private:
  const Plan plan_;
};

}  // namespace

std::unique_ptr<Policy> make_save_all(const ProvisionContext& context) {
  return std::make_unique<SaveAll>(context);
}

}  // namespace bagualu
