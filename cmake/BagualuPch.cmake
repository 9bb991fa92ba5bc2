# Precompiled headers, which take most of a build's time away: standard containers, fmt and JSON for
# the rooms; GoogleTest on top for their tests; ATen for bagualu/runtime (20 s a file without).
# BAGUALU_PCH=OFF (preset 'asan') shows whether every file includes what it uses.

# -O1 for test code (not for what it tests): a quarter less compile time.
function(bagualu_compile_fast target)
  if(NOT BAGUALU_COVERAGE)
    target_compile_options(${target} PRIVATE -O1)
  endif()
endfunction()

# bagualu_make_pch(<name> LINK targets HEADERS headers)
# An object library that owns a precompiled header.
function(bagualu_make_pch name)
  cmake_parse_arguments(ARG "" "" "LINK;HEADERS" ${ARGN})
  if(NOT EXISTS "${CMAKE_BINARY_DIR}/${name}.cpp")
    file(WRITE "${CMAKE_BINARY_DIR}/${name}.cpp" "")
  endif()
  add_library(${name} OBJECT "${CMAKE_BINARY_DIR}/${name}.cpp")
  target_link_libraries(${name} PRIVATE bagualu_options ${ARG_LINK})
  target_precompile_headers(${name} PRIVATE ${ARG_HEADERS})
endfunction()

# bagualu_use_pch(<target> core|test|torch)
function(bagualu_use_pch target kind)
  if(NOT BAGUALU_PCH)
    return()
  endif()
  set(pch bagualu_${kind}_pch)
  set(core_headers <algorithm> <cstdint> <functional> <map> <memory> <optional> <sstream> <string>
      <vector> <fmt/format.h> <nlohmann/json.hpp>)
  if(NOT TARGET ${pch})
    if(kind STREQUAL core)
      bagualu_make_pch(${pch} LINK fmt::fmt nlohmann_json::nlohmann_json HEADERS ${core_headers})
    elseif(kind STREQUAL test)
      bagualu_make_pch(${pch} LINK fmt::fmt nlohmann_json::nlohmann_json GTest::gmock GTest::gtest
                       HEADERS ${core_headers} <gmock/gmock.h> <gtest/gtest.h>)
      bagualu_compile_fast(${pch})
    else()
      bagualu_make_pch(${pch} LINK bagualu_torch HEADERS <ATen/ATen.h>)
    endif()
  endif()
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)
    # Not CMake's -fPIE: GCC takes a precompiled header only where the flags are equal.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_precompile_headers(${target} REUSE_FROM ${pch})
endfunction()
