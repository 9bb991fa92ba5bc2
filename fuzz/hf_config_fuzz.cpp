// Model files: any bytes are read or refused with InvalidInput that names place and field, and what
// is read can be counted and written.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "bagualu/base/error.h"
#include "bagualu/base/json.h"
#include "bagualu/model/hf_config.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/model/parameters.h"

namespace bagualu {
namespace {

void read_and_use(std::string_view text) {
  const Json object = parse_json_object(text, "config.json");
  ModelSpec spec;
  if (object.contains("model_type")) {
    spec = read_hf_config(object, "config.json").spec;
  } else {
    spec = model_from_json(object, "config.json");
  }
  BGL_CHECK(total_parameters(spec) >= active_parameters(spec) && mtp_parameters(spec) >= 0);
  BGL_CHECK(model_from_json(to_json(spec), "written") == spec);
  // What training takes is planned as the same model.
  if (object.contains("model_type")) {
    BGL_CHECK(model_from_hf_config(object, "config.json") == spec);
  }
}

}  // namespace
}  // namespace bagualu

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    bagualu::read_and_use({reinterpret_cast<const char*>(data), size});
  } catch (const bagualu::InvalidInput& error) {
    BGL_CHECK(error.where().starts_with("config.json") && !error.field().empty(), error.what());
    BGL_CHECK(std::string_view(error.what()).find('\n') == std::string_view::npos, error.what());
  }
  return 0;
}
