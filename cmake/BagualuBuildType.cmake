# Language level, optimisation, warnings and sanitizers of our own targets (see bagualu_options).

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# The rooms' static libraries are linked into the Python module.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# -g1: line tables for stack traces at a tenth of -g's size. No -DNDEBUG: a failed assert in a
# header of ours or a library's is a bug that has to show in release too (BGL_CHECK is on anyway).
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1")

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_library(bagualu_options INTERFACE)
target_include_directories(bagualu_options INTERFACE "${CMAKE_SOURCE_DIR}")
target_compile_definitions(bagualu_options INTERFACE BAGUALU_VERSION="${PROJECT_VERSION}")
target_compile_options(bagualu_options INTERFACE -Wall -Wextra -Werror=return-type
                       -fdiagnostics-color=auto)
if(BAGUALU_SANITIZE)
  target_compile_options(bagualu_options INTERFACE
                         -fsanitize=${BAGUALU_SANITIZE} -fno-omit-frame-pointer
                         -fno-sanitize-recover=all)
  target_link_options(bagualu_options INTERFACE -fsanitize=${BAGUALU_SANITIZE})
endif()
if(BAGUALU_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "BAGUALU_FUZZ needs clang (libFuzzer), found ${CMAKE_CXX_COMPILER_ID}")
  endif()
  target_compile_options(bagualu_options INTERFACE -fsanitize=fuzzer-no-link)
endif()
if(BAGUALU_COVERAGE)
  # Atomic counters: transfer engine tests run on several threads.
  target_compile_options(bagualu_options INTERFACE --coverage -O0 -fprofile-update=atomic)
  target_link_options(bagualu_options INTERFACE --coverage)
endif()
