# Compile through ccache where it is installed, so that a second clone builds in seconds.

find_program(BAGUALU_CCACHE ccache)
if(BAGUALU_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # base_dir and no hash_dir: two clones in different folders share their entries.
  # pch_defines and time_macros: ccache's documented condition for precompiled headers.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env
      "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${BAGUALU_CCACHE})
endif()
