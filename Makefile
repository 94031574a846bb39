# A fresh machine needs only Python (3.11 or newer), git and make.
#
#   make demo        train a small GPT on real text, with and without offloading, and compare
#   make test        everything that continuous integration runs
#   make quick       what to run before each commit: under a minute
#   make simulated   what needs an accelerator, on the simulated one: a minute or two (a part of `make test`)
#   make bench       the benchmarks of the CPU, with peers (about an hour; needs a quiet machine)
#   make gpu         the suite for a machine with an accelerator (uses PYTHON as it is, no environment, no network)
#   make gpu-wheels  what such a machine may lack, into the folder .gpu-wheels, to be carried there with the clone
#   make options     the class `Options` and the entries of docs/configuration.md, after a change of an option
#   make docs        the documentation's pages, in build/site (a part of `make test`)
#   make newest      the tests of frameworks on the newest release of each; writes what broke (6 GB; goes on where it was
#                    stopped in the same week)
#   make versions    tests on several releases of PyTorch and Python, each installed by pip (25 GB, an hour)
#
# PYTHON      the interpreter that makes the environment, and that `make gpu` runs
# PIP_ARGS    more arguments for pip and uv, e.g. the index of PyTorch's CPU builds, which saves gigabytes
# DEMO_ARGS   arguments for `actoffload demo`;  PYTEST_ARGS, SIMULATED_ARGS  for pytest;  GPU_ARGS  for benchmarks.gpu
# VERSIONS    pairs for `make versions`, e.g. 2.15:3.11

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
DEMO_ARGS ?=
# Each file stays with one worker: fixtures that launch processes, and compiled models, are made once. The order of the
# files stays too, so that the short ones of tests/unit come last and both workers end together. One thread computes in
# each: there are as many workers as processors.
PYTEST_ARGS ?= -n auto --dist loadscope --no-loadscope-reorder --durations=30
SIMULATED_ARGS ?=
GPU_ARGS ?=
# What a machine with PyTorch, Transformers, Accelerate, PEFT and pytest lacks.
GPU_WHEELS ?= trl datasets dill multiprocess psutil expecttest pytest-timeout \
  rich markdown-it-py mdurl pygments typer click shellingham annotated-doc pydantic pydantic-core annotated-types \
  typing-inspection msgspec

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
# uv installs the same in a tenth of pip's time. It reads none of pip's settings, so these are passed on.
setting = $(shell $(BIN)/python -m pip config list | sed -n "s/^[^=]*\.$(1)='\(.*\)'$$/\1/p" | head -1)
settings = $(foreach name,index-url extra-index-url find-links constraint, \
  $(foreach value,$(call setting,$(name)),--$(name) $(value)))
UV = SSL_CERT_FILE=$(call setting,cert) $(BIN)/uv pip install --quiet --python $(BIN)/python \
  --index-strategy unsafe-best-match $(settings) $(PIP_ARGS) -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

# One test or more of every kind that guards gradients, and what changes most often breaks; tests/unit has a test that
# all of them exist. In order: floors and sizes, CONTRIBUTING, config errors, graphs (twice, in parts, dropped, changed in
# place), whole steps, faults of engines, engines, plans; and on the simulated device the order of copies.
QUICK := tests/unit/test_architecture.py tests/unit/test_contributing.py tests/unit/test_readme.py \
  tests/unit/test_config.py \
  tests/parity/test_graphs.py tests/parity/test_training.py::test_loop \
  tests/faults/test_offloader_faults.py::test_writes_that_fail \
  tests/faults/test_offloader_faults.py::test_a_failed_read_of_the_only_copy_fails_the_step_and_no_other \
  tests/conformance/test_engines.py::TestPosix \
  tests/property/test_planners_property.py::test_half_of_the_bandwidth_frees_memory_at_no_loss \
  tests/property/test_planners_property.py::test_profiles_that_hypothesis_finds

QUICK_SIMULATED := tests/unit/test_ordering.py::test_gradients_survive_every_adversary

.PHONY: options demo test quick bench gpu gpu-wheels newest versions docs lint format types tiny tests simulated clean

demo: $(VENV)/.installed
	$(BIN)/actoffload demo $(DEMO_ARGS)

# The types, the simulated device and the pages are looked at beside the tests: alone they keep one processor idle.
test: lint
	+$(MAKE) --no-print-directory --jobs=2 tests types docs simulated

quick: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadscope $(QUICK)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --simulated $(QUICK_SIMULATED)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

options: $(VENV)/.installed-test
	$(BIN)/python -m tests.options

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-test
	$(BIN)/mypy --strict

# The suite of `make gpu` on the simulated device, with tiny sizes; a test runs a case of it, and looks at what it says.
tiny: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.gpu --tiny --budget-s 3600 $(GPU_ARGS)

tests: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

# What needs an accelerator, on the simulated one, in a process of its own; with SIMULATED_ARGS=--thorough all of it.
simulated: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --simulated tests/unit tests/parity tests/gpu $(SIMULATED_ARGS)

# A warning is an error, and so is a cell of the tutorial that raises.
docs: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/site

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.micro
	$(BIN)/python -m benchmarks.steps_cpu --part e2e
	$(BIN)/python -m benchmarks.steps_cpu --part peers
	$(BIN)/python -m benchmarks.planner

gpu:
	PYTHONPATH=$(CURDIR)/.gpu-wheels $(PYTHON) -m benchmarks.gpu $(GPU_ARGS)

# Unpacked, for Python 3.12 on Linux x86-64, without PyTorch and what else such a machine has: some megabytes.
gpu-wheels: $(VENV)/bin/uv
	rm -rf .gpu-wheels
	$(PIP) --target .gpu-wheels --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 \
	  --abi abi3 --abi none --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any $(GPU_WHEELS)
	test "$$(du -sm .gpu-wheels | cut -f1)" -le 50

versions: $(VENV)/.installed-test
	$(BIN)/python -m tests.versions $(VERSIONS)

newest: $(VENV)/.installed-test
	$(BIN)/python -m tests.versions newest:3

clean:
	rm -rf $(VENV) .versions .gpu-wheels build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/uv:
	$(PYTHON) -m venv $(VENV)
	$(PIP) uv

# Stamps, so that a second run starts at once.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/uv
	$(UV) -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/uv
	$(UV) -e ".[test,docs]"
	touch $@ $(VENV)/.installed
