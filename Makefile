# make install | demo | test | test-all | sglang | test-sglang | bench | lint | wheel | clean        PYTHON=python3.12 picks another interpreter

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPES := build/types
PYTEST := $(BIN)/python -m pytest

# Tests that run side by side; those of a file stay together. Much of their time is waiting for processes.
JOBS ?= 2

# SGLang releases, separated by commas; "all" are those of workers/sglang/releases.py.
SGLANG_RELEASES ?= newest,oldest

# The tests' models are tiny: a second thread per process only fights with the other processes.
export OMP_NUM_THREADS ?= 1

# Tests start hundreds of processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-nightly test-crash sglang test-sglang bench lint types wheel clean

help:
	@echo "make install   a virtual environment in $(VENV) with everything, tests included"
	@echo "make demo      install, then the whole loop on this machine: engines, router, worker, trainer, dashboard"
	@echo "make test      install, lint, and the tests of every day: in ten minutes"
	@echo "make test-all  install, lint, and all tests but those on SGLang"
	@echo "make test-nightly  10,000 random examples of all verbs against the model, on both databases; hours"
	@echo "make test-crash  1,000 kills of workers, trainers, engines and the database, and 100 of whole stacks; an hour"
	@echo "make sglang    install SGLang beside, in .sglang: newest and oldest release, or SGLANG_RELEASES=0.5.18 | all"
	@echo "make test-sglang  the tests on real SGLang, on the same releases"
	@echo "make bench     speed of the store against the plain drivers, a quick look; benchmarks/store.md has the long one"
	@echo "make lint      ruff, mypy and the layers of .importlinter"
	@echo "make wheel     dist/samplestore-*.whl"
	@echo "make clean     remove what was built (not $(VENV), not .sglang)"

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "samplestore needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name a newer one: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); echo "No virtual environment could be made. On Debian: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@

demo: install
	$(BIN)/samplestore demo --db demo/rollouts.db

test: install lint
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not slow and not sglang"

test-all: install lint
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not sglang and not short"

# A failing example is printed with the line that repeats it.
MODEL_EXAMPLES ?= 10000

test-nightly: install
	SAMPLESTORE_MODEL_EXAMPLES=$(MODEL_EXAMPLES) $(PYTEST) tests/model --timeout 0

# Prints its seeds and progress, and at the end how often each named point was hit: CRASH_HITS times at the least.
CRASH_KILLS ?= 1000
CRASH_HITS ?= 10
CRASH_STACK_KILLS ?= 100
CRASH_SEED ?= $(shell date +%s)

test-crash: install
	$(BIN)/python -m tests.crash --seed $(CRASH_SEED) --kills $(CRASH_KILLS) --each 80 --hits $(CRASH_HITS)
	$(BIN)/python -m tests.crash --level full --seed $(CRASH_SEED) --kills $(CRASH_STACK_KILLS) --each 35 --prompts 60

sglang: install
	$(BIN)/samplestore sglang install --release $(SGLANG_RELEASES)

test-sglang: sglang
	SAMPLESTORE_TEST_SGLANG=$(SGLANG_RELEASES) $(PYTEST) -m sglang

bench: install
	$(BIN)/python benchmarks/store_speed.py --quick

# samplestore.workers lives in workers/, and so on: checkers see the package as it is installed through links.
types:
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/samplestore
	@for entry in samplestore/* workers dashboard examples; do \
	  ln -sfn "../../../$$entry" "$(TYPES)/samplestore/$${entry##*/}"; done
	@ln -sfn ../../tests $(TYPES)/tests

lint: install types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(TYPES) $(BIN)/mypy -p samplestore -p tests.support
	cd $(TYPES) && PYTHONPATH=. ../../$(BIN)/lint-imports --no-logo --no-cache ../../.importlinter

# build/lib would bring files that were deleted meanwhile into the wheel.
wheel: install
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m build --wheel

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . \( -path ./$(VENV) -o -path ./.sglang \) -prune -o -name __pycache__ -type d -exec rm -rf {} +
