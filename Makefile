# Every target sets up .venv by itself; nothing has to be installed before, Python and make apart.
PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
SOURCES := $(wildcard graphcap tests benchmarks examples docs/conf.py)
MAX_LINES := 600
WORKERS := 2
COVERAGE := 90

# A contract that names modules can only run once its source module is there; the ladders always run.
CONTRACTS := layers beside \
  $(if $(wildcard graphcap/order.py),order) \
  $(if $(wildcard graphcap/hybrid/__init__.py),hybrid) \
  $(if $(wildcard graphcap/adapters/__init__.py),adapters)

# One thread per pytest worker: two workers on two cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  variables: PYTHON=$(PYTHON)  DEMO_ARGS=...  PYTEST_ARGS=...'

$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "graphcap needs Python 3.11 or newer; give one: make PYTHON=python3.12 ...")'
	@echo '== set-up: .venv with graphcap, editable, and its test, dev and docs extras (once; about 2 minutes)'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test,dev,docs]'
	@touch $@

demo: $(READY)  ## the demo job; arguments in DEMO_ARGS
	@echo '== demo: python -m graphcap demo $(DEMO_ARGS)'
	@$(BIN)/python -m graphcap demo $(DEMO_ARGS)

check: $(READY)  ## ruff, mypy --strict, import layers, file length
	@echo '== check: ruff'
	@$(BIN)/ruff check $(SOURCES)
	@echo '== check: mypy --strict graphcap/'
	@$(BIN)/mypy
	@echo '== check: layers ($(strip $(CONTRACTS)))'
	@$(BIN)/lint-imports --no-logo --no-cache $(addprefix --contract ,$(CONTRACTS))
	@echo '== check: no Python file above $(MAX_LINES) lines'
	@find $(SOURCES) -name '*.py' -exec awk 'END {if (NR > $(MAX_LINES)) print FILENAME ": " NR " lines"}' {} \; \
	  | { ! grep . || { echo 'split these files by stage or by noun' >&2; exit 1; }; }

test: check docs  ## check, docs, then the tests, with coverage
	@echo '== test: $(WORKERS) workers, coverage of graphcap/ at least $(COVERAGE) %'
	@$(PYTEST) --shares --cov --cov-report=term --cov-fail-under=$(COVERAGE)

test-all: check  ## test, and the slow ones, with fresh random examples
	@echo '== test-all: the slow ones too'
	@$(PYTEST) -m 'not gpu' --hypothesis-profile=search --cov --cov-report=term --cov-fail-under=$(COVERAGE)

docs: $(READY)  ## HTML into docs/_build/html; a warning is an error
	@echo '== docs: docs/_build/html'
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

clean:  ## remove .venv, builds and caches
	@echo '== clean: .venv, builds, caches'
	@rm -rf .venv build dist *.egg-info docs/_build htmlcov coverage.xml .coverage .coverage.* \
	  .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find graphcap tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
