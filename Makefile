# Two commands matter: `make demo` and `make test`. Both set up .venv on first use.
PYTHON      ?= python3
VENV        ?= .venv
TORCH       ?= torch==2.13.0
TORCH_INDEX ?=
JOBS        ?= 2

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(wildcard native/*.hpp native/*.cpp)

.PHONY: help setup demo test test-fast lint types docs format check soak bench clean

help:
	@echo "make demo    set up, watch a real training job, slow one rank, print the verdict"
	@echo "make test    set up, run all tests"
	@echo "make check   linters, types, layers, docs"
	@echo "make soak    the seeded fault campaigns (hours; resumable)"
	@echo "make bench   all benchmarks, side by side with peers"
	@echo "knobs: PYTHON=$(PYTHON) TORCH=$(TORCH) TORCH_INDEX=URL VENV=$(VENV) JOBS=$(JOBS)"

setup: $(STAMP)

# torch first and pinned: a range would let the installer pick the newest build with gigabytes of CUDA.
$(STAMP): pyproject.toml CMakeLists.txt $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "keepstep needs Python 3.10 or newer; name one with make PYTHON=python3.11" >&2; exit 2; }
	@echo "$(TORCH)" > $(VENV)/constraint.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraint.txt -e ".[dev,plot]"
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not e2e and not soak"
	$(BIN)/python -m pytest -q -m "e2e and not soak"

test-fast: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not e2e and not soak"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/pyright

docs: $(STAMP)
	$(BIN)/mkdocs build --quiet --strict

check: lint types docs

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(STAMP)
	$(BIN)/python -m benchmarks.campaign --case all

bench: $(STAMP)
	for name in probe changepoint controller; do \
	  $(BIN)/python -m benchmarks.$$name --json benchmarks/results/$$name.json || exit 1; done

clean:
	rm -rf $(VENV) build site .pytest_cache .ruff_cache .hypothesis runs
