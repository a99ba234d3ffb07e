# Variables to override: make test PYTHON=python3.12 TORCH=torch==2.14.1 TRITON=triton==3.8.0
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install
# of a long installation, a line per package
BY_PACKAGE := 2>&1 | sed -un '/^Collecting\|^Installing\|^ERROR/p'
STAMP := $(VENV)/.installed
OLDEST := $(VENV)/triton-oldest
OLDEST_STAMP := $(OLDEST)/.installed

# With an NVIDIA driver PyTorch chooses its Triton; without one the newest supported Triton goes beside a CPU build.
HAS_DRIVER := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
ifeq ($(HAS_DRIVER),yes)
TORCH ?= torch>=2.11
TRITON ?=
else
TORCH ?= torch==2.13.0
# Triton 3.9 has no wheel for Python 3.10
TRITON ?= triton==$(if $(filter 3.10,$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')),3.8.0,3.9.0)
endif
TRITON_OLDEST ?= triton==3.6.0

DOCS_STAMP := $(VENV)/.installed-docs
DEMO_STAMP := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.installed-demo)

# between the oldest and the newest, for compile-all
TRITONS_BETWEEN ?= 3.7.0 3.7.1 3.8.0
BETWEEN := $(foreach version,$(TRITONS_BETWEEN),$(VENV)/triton-$(version))

# versions of FLA beside the newest, which is in the environment itself
FLA_OLDER := $(foreach version,0.5.0 0.5.1 0.5.2,$(VENV)/fla-$(version))

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
export FLASHDELTA_TRITON_OLDEST := $(abspath $(OLDEST))
# one thread per process: the tensors are tiny
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxschedchunk 1
TIMED := TIMEFORMAT='%0R s on the clock, %0U s + %0S s of processor time'; time

.DEFAULT_GOAL := help
.PHONY: help demo check test test-full mutants test-integrations test-newest test-oldest hub record gate compile-all gpu-test fuzz release-check lint format docs bench clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO_STAMP) ## let a small KDA model write, on this machine
	@echo "running flashdelta demo"
	@$(BIN)/flashdelta demo

check: lint $(STAMP) ## style, types and unit tests, in two minutes
	@$(TIMED) $(PYTEST) -m 'not gpu and not slow'

test: $(STAMP) $(OLDEST_STAMP) $(FLA_OLDER) ## all tests that need no GPU, but for those that passed on this very tree
	@$(TIMED) $(PYTEST) -p tests.unchanged

test-full: $(STAMP) $(OLDEST_STAMP) $(FLA_OLDER) ## the same with every case, and every kernel compiled
	@$(TIMED) env FLASHDELTA_TESTS=full $(PYTEST)
	@$(MAKE) compile-all

MUTANT_JOBS ?= 2
mutants: $(STAMP) ## break the code in each recorded way; tests must find it (ONLY="wy record" selects)
	@$(BIN)/python -m tests.mutants --jobs $(MUTANT_JOBS) $(ONLY)

# what pip has today, beside what the extra `test` pins
NEWEST := $(abspath $(VENV))/newest
WEEKLY := $(abspath $(VENV))/weekly

test-integrations: $(STAMP) ## test the integrations with the newest of what they integrate (downloads 420 MB)
	@rm -rf $(NEWEST)
	@$(PIP) install --no-deps --target $(NEWEST) transformers flash-linear-attention fla-core kernels
	@FLASHDELTA_NEWEST=$(NEWEST) FLASHDELTA_WHEELS=$(abspath $(VENV))/wheels OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -q tests/contract tests/unit/test_integrations.py

hub: ## build a kernel for the Hugging Face hub into build/hub
	@$(PYTHON) hub/build.py build/hub

test-newest: ## the newest PyTorch, Triton, FLA, transformers, vLLM and SGLang that pip finds, in a venv of their own (downloads 3 GB)
	@rm -rf $(WEEKLY)
	@$(PYTHON) -m venv $(WEEKLY)
	@echo "installing the newest of each into $(WEEKLY)"
	@$(WEEKLY)/bin/python -m pip --quiet --disable-pip-version-check install -e '.[cli]' torch triton transformers \
		flash-linear-attention fla-core 'numpy<2.4' pytest pytest-xdist filelock hypothesis matplotlib setuptools
	@$(WEEKLY)/bin/flashdelta doctor --device cpu
	@FLASHDELTA_WHEELS=$(WEEKLY)/wheels FLASHDELTA_NEWEST=$$(echo $(WEEKLY)/lib/python3*/site-packages) OMP_NUM_THREADS=1 \
		$(WEEKLY)/bin/python -m pytest -q -n auto --maxschedchunk 1 tests/unit tests/contract

test-oldest: ## the unit tests on the oldest PyTorch and Triton that run, in a venv of their own (downloads 3 GB)
	@rm -rf $(WEEKLY)
	@$(PYTHON) -m venv $(WEEKLY)
	@echo "installing PyTorch 2.11.0 and Triton 3.6.0 into $(WEEKLY)"
	@$(WEEKLY)/bin/python -m pip --quiet --disable-pip-version-check install -e '.[test]' torch==2.11.0 triton==3.6.0
	@OMP_NUM_THREADS=1 $(WEEKLY)/bin/python -m pytest -q -n auto --maxschedchunk 1 tests/unit

record: $(STAMP) $(OLDEST_STAMP) ## record machine code and launches of what changed
	@$(BIN)/python -m tests.compile record

BASE ?= HEAD
gate: $(STAMP) $(OLDEST_STAMP) ## list machine code and launches that differ from git revision BASE
	@$(BIN)/python -m tests.compile gate --base $(BASE)

compile-all: $(STAMP) $(OLDEST_STAMP) $(BETWEEN) ## compile everything from nothing, with every supported Triton
	@$(BIN)/python -m tests.compile all $(BETWEEN)

gpu-test: $(STAMP) ## run the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest -q -m gpu

SECONDS ?= 60
SEED ?= 0
JOBS ?= 4
fuzz: $(STAMP) ## random and mutated calls from SEED for SECONDS, on the GPU if there is one
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED) --jobs $(JOBS)

BENCHES := prefill decode train layer ranks
release-check: gpu-test ## a release's evidence from two GPUs: the GPU tier, the fuzzer, all benchmarks, their tables
	@$(BIN)/python -m tests.fuzz --seconds 3600 --cases 10000 --seed $(SEED) --jobs $(JOBS)
	@$(PIP) install -e '.[bench]'
	@for name in $(BENCHES); do $(BIN)/python -m benchmarks.$$name || exit 1; done
	@$(BIN)/python -m benchmarks.tables

lint: $(STAMP) ## check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## fix style and formatting
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(DOCS_STAMP) ## build the site into build/site; a warning or a link that leads nowhere fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP) ## measure prefill beside FLA (needs an NVIDIA GPU)
	@$(PIP) install -e '.[bench]'
	@$(BIN)/python -m benchmarks.prefill

clean: ## remove the virtual environment
	rm -rf $(VENV)

$(STAMP): pyproject.toml
	@echo "installing into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) '$(TORCH)' $(BY_PACKAGE)
	@$(INSTALL) -e '.[cli,test]' $(BY_PACKAGE)
	@$(if $(TRITON),$(PIP) install '$(TRITON)')
	@touch $@

# what the demo needs, and no more; another target installs the rest beside it
$(VENV)/.installed-demo: pyproject.toml
	@echo "1/3 making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/3 installing $(TORCH) ($(if $(HAS_DRIVER),3 GB with CUDA,200 MB where pip has a build for CPUs, else 3 GB with CUDA), once)"
	@$(INSTALL) '$(TORCH)' $(BY_PACKAGE)
	@echo "3/3 installing flashdelta$(if $(TRITON), and $(TRITON)) (200 MB, once)"
	@$(INSTALL) -e '.[cli]' $(if $(TRITON),'$(TRITON)') $(BY_PACKAGE)
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@$(PIP) install -e '.[docs]'
	@touch $@

# a second Triton beside the first, for the tests that compile kernels on both
$(OLDEST_STAMP): $(STAMP)
	@$(PIP) install --no-deps --upgrade --target $(OLDEST) '$(TRITON_OLDEST)'
	@touch $@

$(BETWEEN): $(VENV)/triton-%: $(STAMP)
	@$(PIP) install --no-deps --upgrade --target $@ 'triton==$*'

$(FLA_OLDER): $(VENV)/fla-%: $(STAMP)
	@$(PIP) install --no-deps --upgrade --target $@ 'fla-core==$*' 'flash-linear-attention==$*'
