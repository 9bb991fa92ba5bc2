# Targets for the libtorch inside the wheel of BAGUALU_PYTHON:
#   bagualu_torch         ATen, c10, c10d         (bagualu/runtime and its tests)
#   bagualu_torch_python  the same + libtorch_python, Python and pybind11 headers (the module)
#
# Not find_package(Torch): with a CUDA wheel its config file wants the whole CUDA toolkit on the
# machine, while nothing here includes a CUDA header (device code goes through c10 interfaces).
# pybind11 is the copy inside torch: two versions in one module would not share their registries.

if(NOT EXISTS "${BAGUALU_PYTHON}")
  message(FATAL_ERROR "BAGUALU_PYTHON=${BAGUALU_PYTHON} does not exist; run 'make build', or pass "
                      "-DBAGUALU_PYTHON=<a Python that has torch>, or -DBAGUALU_TORCH=OFF")
endif()
set(_query [[
import importlib.util, os, sysconfig
spec = importlib.util.find_spec("torch")
root = os.path.dirname(spec.origin) if spec else ""
print(";".join((root, sysconfig.get_paths()["include"], sysconfig.get_config_var("EXT_SUFFIX"))))
]])
execute_process(COMMAND "${BAGUALU_PYTHON}" -c "${_query}" OUTPUT_VARIABLE _answer
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
list(GET _answer 0 BAGUALU_TORCH_ROOT)
list(GET _answer 1 BAGUALU_PYTHON_INCLUDE)
list(GET _answer 2 BAGUALU_PYTHON_SUFFIX)
if(NOT EXISTS "${BAGUALU_TORCH_ROOT}/include/ATen/ATen.h")
  message(FATAL_ERROR "${BAGUALU_PYTHON} has no torch with headers "
                      "(pip install -r requirements.txt), or pass -DBAGUALU_TORCH=OFF")
endif()
if(NOT EXISTS "${BAGUALU_PYTHON_INCLUDE}/Python.h")
  message(FATAL_ERROR "no Python.h in ${BAGUALU_PYTHON_INCLUDE}: install the python3-dev package")
endif()
message(STATUS "torch: ${BAGUALU_TORCH_ROOT}")

set(_lib "${BAGUALU_TORCH_ROOT}/lib")
add_library(bagualu_torch INTERFACE)
# -idirafter: the wheel also carries headers of other libraries (fmt among them, in another version
# than the system library that the core rooms link), so the system's come first.
target_compile_options(bagualu_torch INTERFACE
                       "SHELL:-idirafter ${BAGUALU_TORCH_ROOT}/include"
                       "SHELL:-idirafter ${BAGUALU_TORCH_ROOT}/include/torch/csrc/api/include")
# Without it the c10d headers are empty.
target_compile_definitions(bagualu_torch INTERFACE USE_DISTRIBUTED)
target_link_libraries(bagualu_torch INTERFACE "${_lib}/libtorch_cpu.so" "${_lib}/libc10.so"
                      Threads::Threads)
# at::parallel_for is serial without OpenMP. The wheel's own libgomp, not the compiler's: with two
# of them in a process, torch.set_num_threads would reach one only.
file(GLOB _gomp "${_lib}/libgomp*.so*" "${BAGUALU_TORCH_ROOT}/../torch.libs/libgomp*.so*")
target_compile_options(bagualu_torch INTERFACE -fopenmp)
if(_gomp)
  list(GET _gomp 0 _gomp)
  target_link_libraries(bagualu_torch INTERFACE "${_gomp}")
else()
  target_link_options(bagualu_torch INTERFACE -fopenmp)
endif()
# The wheel's libraries find their own dependencies (OpenMP, CUDA) through their run path; the
# linker need not.
target_link_options(bagualu_torch INTERFACE "LINKER:-rpath,${_lib}" "LINKER:--allow-shlib-undefined")

add_library(bagualu_torch_python INTERFACE)
# ... except pybind11, which has to be the wheel's.
file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/torch_pybind11")
file(CREATE_LINK "${BAGUALU_TORCH_ROOT}/include/pybind11"
     "${CMAKE_BINARY_DIR}/torch_pybind11/pybind11" SYMBOLIC)
target_include_directories(bagualu_torch_python SYSTEM INTERFACE
                           "${CMAKE_BINARY_DIR}/torch_pybind11" "${BAGUALU_PYTHON_INCLUDE}")
target_link_libraries(bagualu_torch_python INTERFACE bagualu_torch "${_lib}/libtorch_python.so")
