// bagualu._runtime: the runtime for Python. No logic: arguments in, JSON and tensors out.
#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "bagualu/base/error.h"
#include "bagualu/runtime/deadline.h"
#include "bagualu/runtime/device_arena.h"
#include "bagualu/runtime/trainer.h"
#include "bagualu/runtime/trainer_json.h"

namespace py = pybind11;

namespace bagualu {
namespace {

Json parse(const std::string& text, const char* what) { return parse_json_object(text, what); }

py::dict to_dict(const ModelState::NamedTensors& tensors) {
  py::dict dict;
  for (const auto& [name, tensor] : tensors) dict[py::str(name)] = tensor;
  return dict;
}

// A Trainer with the calling conventions of Python: text in and out, the interpreter released.
class PyTrainer {
 public:
  PyTrainer(const std::string& spec, const std::string& options, const std::string& groups)
      : spec_(model_from_json(parse(spec, "model"), "model")),
        trainer_(std::make_unique<Trainer>(
            spec_, TrainerOptions::from_json(parse(options, "options"), "options"),
            TrainerGroups::from_json(parse(groups, "groups"), "groups"))) {}

  std::string step(const at::Tensor& tokens, int64_t step, double lr, const std::string& extras) {
    StepInput input;
    input.tokens = tokens;
    input.step = step;
    input.lr = lr;
    read_step_extras(parse(extras, "extras"), spec_, trainer_->options(), tokens.size(0), input);
    return step_to_json(*trainer_, trainer_->step(input)).dump();
  }

  Trainer& trainer() { return *trainer_; }

 private:
  ModelSpec spec_;
  std::unique_ptr<Trainer> trainer_;
};

// Sets attributes of a Python exception instance, so that callers need not parse its text.
template <class Fill>
void raise(py::handle type, const char* text, Fill&& fill) {
  py::object error = type(text);
  fill(error);
  PyErr_SetObject(type.ptr(), error.ptr());
}

void register_errors(py::module_& m) {
  static py::object invalid_input = py::reinterpret_borrow<py::object>(
      py::exception<InvalidInput>(m, "InvalidInput", PyExc_ValueError));
  static py::object infeasible = py::reinterpret_borrow<py::object>(
      py::exception<BudgetBelowFloor>(m, "Infeasible", PyExc_RuntimeError));
  static py::object over_budget = py::reinterpret_borrow<py::object>(
      py::exception<OutOfBudget>(m, "OverBudget", PyExc_MemoryError));
  static py::object peer_lost = py::reinterpret_borrow<py::object>(
      py::exception<PeerLost>(m, "PeerLost", PyExc_RuntimeError));
  static py::object deadline_exceeded = py::reinterpret_borrow<py::object>(
      py::exception<DeadlineExceeded>(m, "DeadlineExceeded", PyExc_RuntimeError));
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const InvalidInput& error) {
      raise(invalid_input, error.what(), [&](py::object& e) {
        e.attr("where") = error.where();
        e.attr("field") = error.field();
        e.attr("found") = error.found();
        e.attr("allowed") = error.allowed();
      });
    } catch (const BudgetBelowFloor& error) {
      raise(infeasible, error.what(), [&](py::object& e) {
        e.attr("budget_bytes") = error.budget_bytes;
        e.attr("floor_bytes") = error.floor_bytes;
        e.attr("missing_bytes") = error.missing_bytes();
      });
    } catch (const OutOfBudget& error) {
      raise(over_budget, error.what(), [&](py::object& e) {
        e.attr("microbatch") = error.microbatch;
        e.attr("layer") = error.layer;
        e.attr("op") = error.op;
        e.attr("wanted_bytes") = error.wanted_bytes;
        e.attr("left_bytes") = error.left_bytes;
        e.attr("budget_bytes") = error.budget_bytes;
      });
    } catch (const OverBudget& error) {  // outside any operator: set-up, checkpoints
      raise(over_budget, error.what(), [&](py::object& e) {
        e.attr("microbatch") = -1;
        e.attr("layer") = -1;
        e.attr("op") = "set-up";
        e.attr("wanted_bytes") = error.wanted_bytes();
        e.attr("left_bytes") = error.left_bytes();
        e.attr("budget_bytes") = error.budget_bytes();
      });
    } catch (const PeerLost& error) {
      PyErr_SetString(peer_lost.ptr(), error.what());
    } catch (const DeadlineExceeded& error) {
      PyErr_SetString(deadline_exceeded.ptr(), error.what());
    }
  });
}

void register_arena(py::module_& m) {
  m.def(
      "arena_install",
      [](int64_t device_budget_bytes) { DeviceArena::install(device_budget_bytes); },
      py::arg("device_budget_bytes") = 0,
      "Count every CPU tensor byte of this process from now on; 0 = no limit.");
  m.def("arena_set_budget", [](int64_t n) { DeviceArena::install(n).set_budget(n); });
  m.def("arena_reset_peak", [] {
    if (DeviceArena* arena = DeviceArena::installed()) arena->reset_peak();
  });
  m.def("arena_stats", [] {
    const DeviceArena* arena = DeviceArena::installed();
    py::dict stats;
    stats["installed"] = arena != nullptr;
    stats["live_bytes"] = arena ? arena->live_bytes() : 0;
    stats["peak_bytes"] = arena ? arena->peak_bytes() : 0;
    stats["budget_bytes"] = arena ? arena->budget_bytes() : 0;
    return stats;
  });
}

void register_trainer(py::module_& m) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<PyTrainer>(m, "Trainer")
      .def(py::init<const std::string&, const std::string&, const std::string&>(),
           py::arg("spec_json"), py::arg("options_json"), py::arg("groups_json") = "{}", released)
      .def("step", &PyTrainer::step, py::arg("tokens"), py::arg("step"), py::arg("lr"),
           py::arg("extras_json") = "{}", released)
      .def(
          "evaluate",
          [](PyTrainer& t, const at::Tensor& tokens) { return t.trainer().evaluate(tokens); },
          released)
      .def(
          "logits",
          [](PyTrainer& t, const at::Tensor& tokens) { return t.trainer().log_probs(tokens); },
          released)
      .def("parameters", [](PyTrainer& t) { return to_dict(t.trainer().model().parameters()); })
      .def("gradients", [](PyTrainer& t) { return to_dict(t.trainer().model().gradients()); })
      .def("optimizer_state",
           [](PyTrainer& t) { return to_dict(t.trainer().model().optimizer_state()); })
      .def("buffers", [](PyTrainer& t) { return to_dict(t.trainer().model().buffers()); })
      .def("init_parameters",
           [](PyTrainer& t, uint64_t seed) {
             const TrainerOptions& o = t.trainer().options();
             t.trainer().model().init_parameters(seed, o.layout.ep_rank(o.rank));
           })
      .def("parameters_changed", [](PyTrainer& t) { t.trainer().model().refresh_working_copies(); })
      .def("plan_json", [](PyTrainer& t) { return t.trainer().plan_json().dump(); })
      .def("units_json", [](PyTrainer& t) { return units_to_json(t.trainer()).dump(); })
      .def("floor_json", [](PyTrainer& t) { return to_json(t.trainer().forecast()).dump(); })
      .def("start_json", [](PyTrainer& t) { return start_to_json(t.trainer()).dump(); })
      .def("profile_json", [](PyTrainer& t) { return t.trainer().profile().dump(); })
      .def(
          "set_policy",
          [](PyTrainer& t, const std::string& name, const std::string& args, int64_t budget) {
            t.trainer().set_policy(
                name, policy_options_from_json(parse(args, "policy_args"), "policy_args"), budget);
          },
          py::arg("name"), py::arg("policy_args_json") = "{}", py::arg("budget_bytes") = 0);
  m.def(
      "memory_forecast",
      [](const std::string& spec, const std::string& options) {
        return to_json(
                   memory_forecast(model_from_json(parse(spec, "model"), "model"),
                                   TrainerOptions::from_json(parse(options, "options"), "options")))
            .dump();
      },
      released, "Static, floor and calm bytes of a rank, before anything is allocated.");
}

}  // namespace
}  // namespace bagualu

PYBIND11_MODULE(_runtime, m) {
  m.doc() = "Runtime of bagualu: arenas, operators, decisions and the trainer.";
  m.attr("version") = BAGUALU_VERSION;
  bagualu::register_errors(m);
  bagualu::register_arena(m);
  bagualu::register_trainer(m);
}
