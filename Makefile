# make install | demo | test | test-all | lint | wheel | clean        PYTHON=python3.12 picks another interpreter

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPES := build/types
PYTEST := $(BIN)/python -m pytest

# The tests' models are tiny: a second thread per process only fights with the other processes.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint types wheel clean

help:
	@echo "make install   a virtual environment in $(VENV) with everything, tests included"
	@echo "make demo      install, then the whole loop on this machine: engines, router, worker, trainer, dashboard"
	@echo "make test      install, lint, and all tests that take seconds"
	@echo "make test-all  install, lint, and all tests"
	@echo "make lint      ruff, mypy and the layers of .importlinter"
	@echo "make wheel     dist/samplestore-*.whl"
	@echo "make clean     remove what was built (not $(VENV))"

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
	$(PYTEST) -m "not slow"

test-all: install lint
	$(PYTEST)

# samplestore.workers lives in workers/, and so on: checkers see the package as it is installed through links.
types:
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/samplestore
	@for entry in samplestore/* workers dashboard examples; do ln -s "../../../$$entry" $(TYPES)/samplestore/; done
	@ln -s ../../tests $(TYPES)/tests

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
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
