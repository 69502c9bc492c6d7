PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help install demo test check bench clean

help:               ## this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("stretto needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,dev]"
	@touch $(READY)

install: $(READY)   ## make the virtual environment

demo: $(READY)      ## compare three recipes with one machine on the digits
	$(BIN)/stretto compare examples/digits.py -n 4 --recipe allreduce --recipe "local_sgd(every=16)" --recipe "diloco(every=50)" --target "test_accuracy>=0.95"

test: $(READY)      ## the laws
	$(BIN)/python -m pytest

check: $(READY)     ## style, types and the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)     ## the figures of docs/figures.md
	$(BIN)/python -m benchmarks

clean:              ## remove what make made
	rm -rf $(VENV) build *.egg-info
