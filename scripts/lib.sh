# shellcheck shell=bash
# Shared by the scripts beside it: sourced, not run. Everything runs in the root of the tree.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
readonly ROOT=$PWD
# Not the first on PATH: a cmake from another place could reconfigure a build folder on every run.
CMAKE=$(test -x /usr/bin/cmake && echo /usr/bin/cmake || echo cmake)
CTEST=$(test -x /usr/bin/ctest && echo /usr/bin/ctest || echo ctest)
readonly CMAKE CTEST
readonly VENV=$ROOT/.venv
readonly VENV_PYTHON=$VENV/bin/python3

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# jobs_for CORE_MB: parallel compilers that the cores and the free memory allow.
jobs_for() {
  local cores free_mb by_memory
  cores=$(nproc)
  free_mb=$(awk '/^MemAvailable:/ {print int($2 / 1024)}' /proc/meminfo)
  by_memory=$((free_mb / $1))
  ((by_memory >= 1)) || by_memory=1
  echo $((by_memory < cores ? by_memory : cores))
}

# run_ctest FOLDER ARGUMENTS...: prints what failed and the closing lines, not hundreds of passes.
run_ctest() {
  local folder=$1
  shift
  say "ctest in $folder"
  "$CTEST" --test-dir "$folder" --output-on-failure "$@" |
    { grep -vE '^ +Start |\.\. +Passed +[0-9.]+ sec$' || true; }
}

# Newest supported Python: prints its path. pyenv's shims exist without their Python: run each.
find_python() {
  local name path
  for name in python3.13 python3.12 python3.11 python3; do
    path=$(command -v "$name") || continue
    if path=$("$path" -c 'import sys
assert (3, 11) <= sys.version_info[:2] <= (3, 13)
print(sys.executable)' 2>/dev/null); then
      echo "$path"
      return
    fi
  done
  die "no Python 3.11, 3.12 or 3.13 on PATH (python3 is $(python3 --version 2>&1 || true));
Debian 12 and Ubuntu 24.04 have it: apt-get install -y python3"
}
