# Variables to override: make test PYTHON=python3.12 TORCH=torch==2.14.1 TRITON=triton==3.8.0
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
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
TRITON ?= triton==3.9.0
endif
TRITON_OLDEST ?= triton==3.6.0

.DEFAULT_GOAL := help
.PHONY: help demo test gpu-test lint format bench clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## let a small KDA model write, on this machine
	@$(BIN)/flashdelta demo

test: $(STAMP) $(OLDEST_STAMP) ## run all tests that need no GPU, in parallel
	@FLASHDELTA_TRITON_OLDEST=$(abspath $(OLDEST)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxschedchunk 1

gpu-test: $(STAMP) ## run the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest -q -m gpu

lint: $(STAMP) ## check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP) ## apply what lint asks for
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP) ## measure prefill beside FLA (needs an NVIDIA GPU)
	@$(PIP) install -e '.[bench]'
	@$(BIN)/flashdelta bench prefill

clean: ## remove the virtual environment
	rm -rf $(VENV)

$(STAMP): pyproject.toml
	@echo "installing into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install '$(TORCH)'
	@$(PIP) install -e '.[cli,test]'
	@$(if $(TRITON),$(PIP) install '$(TRITON)')
	@touch $@

# a second Triton beside the first, for the tests that compile every kernel on both
$(OLDEST_STAMP): $(STAMP)
	@$(PIP) install --no-deps --upgrade --target $(OLDEST) '$(TRITON_OLDEST)'
	@touch $@
