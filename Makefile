# Every target sets up what it needs by itself (see scripts/setup). Run 'make help'.
.DEFAULT_GOAL := help
.PHONY: help demo test test-core build bench bench-full coverage asan tsan fuzz format clean

# Optional: another package index for torch, see requirements.txt.
TORCH_INDEX ?=
export BAGUALU_TORCH_INDEX := $(TORCH_INDEX)

help:  ## Show this text
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo:  ## Set up, build, then train under a budget through routing spikes (4 minutes after set-up)
	@scripts/build torch
	@test -x scripts/demo || { echo "scripts/demo is missing from this tree" >&2; exit 1; }
	@scripts/demo

test:  ## Set up, build and run every test
	@scripts/test all

test-core:  ## The tests that need no torch (under two minutes)
	@scripts/test core

build:  ## Set up and build: build/bin/bagualu and the Python module
	@scripts/build torch

bench:  ## Benchmarks, quick set (five minutes at most)
	@scripts/bench quick

bench-full:  ## Benchmarks, everything
	@scripts/bench full

coverage:  ## Line coverage of the core rooms; fails under 90 %
	@scripts/coverage

asan:  ## Core tests under AddressSanitizer and UBSan
	@scripts/sanitize asan

tsan:  ## Transfer engine and activation store under ThreadSanitizer
	@scripts/sanitize tsan

fuzz:  ## Fuzz the readers of files, a minute each (needs clang)
	@for target in fuzz/*_fuzz.cpp; do \
	  scripts/fuzz "$$(basename "$${target%_fuzz.cpp}")" || exit 1; done

format:  ## Format our C++ with clang-format
	@scripts/format

clean:  ## Remove build folders and the virtual environment
	rm -rf build build-core build-asan build-tsan build-coverage build-clang build-fuzz build-wheel .venv
	rm -f python/bagualu/_runtime*.so
