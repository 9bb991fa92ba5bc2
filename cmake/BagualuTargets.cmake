# One function per kind of target, so that a room's CMakeLists.txt is a list of sources.

# bagualu_add_room(<room> SOURCES a.cpp b.cpp LINK bagualu_base ... [TORCH])
# Static library bagualu_<room>; an interface library while the room has no sources. TORCH: its
# sources are compiled with the precompiled ATen header.
function(bagualu_add_room room)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;LINK" ${ARGN})
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "bagualu_add_room(${room}): unknown ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if(ARG_SOURCES)
    add_library(bagualu_${room} STATIC ${ARG_SOURCES})
    target_link_libraries(bagualu_${room} PUBLIC bagualu_options ${ARG_LINK})
    if(ARG_TORCH)
      bagualu_use_torch_pch(bagualu_${room})
    endif()
  else()
    add_library(bagualu_${room} INTERFACE)
    target_link_libraries(bagualu_${room} INTERFACE bagualu_options ${ARG_LINK})
  endif()
endfunction()

# bagualu_add_test(<room> a_test.cpp b_test.cpp [NAME name] [LABELS unit golden torch slow tsan]
#                  [LINK targets])
# Executable bagualu_<room>[_<name>]_test on GoogleTest, linked to bagualu_<room>; label unit
# unless said otherwise, tsan for what 'make tsan' runs. BAGUALU_SOURCE_DIR is the root of the tree. A test labelled torch is one
# ctest entry (loading libtorch for every case costs more than the cases); others are one per case.
function(bagualu_add_test room)
  cmake_parse_arguments(ARG "" "NAME" "LABELS;LINK" ${ARGN})
  if(NOT BAGUALU_TESTS OR NOT ARG_UNPARSED_ARGUMENTS)
    return()
  endif()
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT BAGUALU_CORE_TESTS AND NOT "torch" IN_LIST ARG_LABELS)
    return()
  endif()
  set(target bagualu_${room}_test)
  if(ARG_NAME)
    set(target bagualu_${room}_${ARG_NAME}_test)
  endif()
  add_executable(${target} ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${target} PRIVATE GTest::gmock GTest::gtest GTest::gtest_main ${ARG_LINK})
  if(TARGET bagualu_${room})
    target_link_libraries(${target} PRIVATE bagualu_${room})
  endif()
  target_compile_definitions(${target} PRIVATE BAGUALU_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  set_target_properties(${target} PROPERTIES
                        RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin/tests")
  if("tsan" IN_LIST ARG_LABELS)
    add_dependencies(tsan_tests ${target})
  endif()
  if("torch" IN_LIST ARG_LABELS)
    # -fPIC instead of an executable's -fPIE: GCC takes a precompiled header only with equal flags.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
    bagualu_use_torch_pch(${target})
    add_test(NAME ${target} COMMAND ${target})
    set_tests_properties(${target} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 600)
  else()
    include(GoogleTest)
    # PRE_TEST: a sanitized program cannot always run where it is built (see scripts/sanitize).
    gtest_discover_tests(${target} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                         PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 300)
  endif()
endfunction()

# bagualu_add_bench(<name> SOURCES a_bench.cpp LINK targets)
# Google Benchmark executable build/bin/bench/<name>; built by the target 'benches' only.
function(bagualu_add_bench name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  if(NOT ARG_SOURCES OR NOT benchmark_FOUND)
    return()
  endif()
  add_executable(${name} EXCLUDE_FROM_ALL ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE bagualu_options benchmark::benchmark_main ${ARG_LINK})
  target_compile_definitions(${name} PRIVATE BAGUALU_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  set_target_properties(${name} PROPERTIES
                        RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin/bench")
  add_dependencies(benches ${name})
endfunction()
