PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests wait a good deal, so more of them run at once than there are cores.
WORKERS ?= 4
SOURCES := $(wildcard CMakeLists.txt stretto/kernels/*.?pp)
# With TORCH, a version or "newest", it and what it depends on are not the pinned ones.
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# The second and third pin what the native kernels are built with, for pip from 25.3 on and before.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
export PIP_BUILD_CONSTRAINT := $(CURDIR)/$(CONSTRAINTS)
export PIP_CONSTRAINT := $(CURDIR)/$(CONSTRAINTS)
QUICK := tests/test_recipe.py tests/test_codec_state.py tests/codecs tests/kernels tests/training/test_equivalence.py \
  tests/training/test_recipes.py tests/test_torch_names.py tests/simulator/test_sample_counts.py tests/test_end_to_end.py
# Python and torch of the environments of test-versions.
VERSIONS ?= python3.11:2.5.0 python3.12:2.13.0 python3.13:2.13.0 python3.13:newest

.PHONY: help install demo test test-long test-gpu test-engines test-trainers test-quick test-versions check bench bench-gpu docs clean

help:               ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/'

$(VENV)/constraints.txt: constraints.txt
	@mkdir -p $(VENV)
	grep -Ev "^(torch|numpy|sympy|networkx|setuptools|filelock|fsspec|mpmath)==" constraints.txt > $@
	@[ "$(TORCH)" = newest ] || echo "torch==$(TORCH)" >> $@

$(READY): pyproject.toml $(CONSTRAINTS) $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit("stretto needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[demo,dev]"
	@touch $(READY)

install: $(READY)   ## make the virtual environment

demo: $(READY)      ## compare three recipes with one machine on the digits, and simulate a network on which four workers pay
	$(BIN)/stretto compare -n 4 --recipe allreduce --recipe "local_sgd(every=16)" --recipe "diloco(every=50)" --target "test_accuracy>=0.95" examples/digits.py
	@echo; echo "The digits take this machine seconds. If a step took 20 ms and each of four workers had a machine on a network of 1 Gbit/s (simulated):"
	$(BIN)/stretto simulate --sweep workers=1,4 --recipe "local_sgd(every=4)" --lr-scale linear --network "1Gbit/s 1ms" --step-time 20ms --target "test_accuracy>=0.95" examples/digits.py --epochs 10

# Compiled files are kept, whatever the environment asks for: the processes of the tests would compile all modules again.
test test-long test-gpu: export PYTHONDONTWRITEBYTECODE :=

test: $(READY)      ## the test suite
	$(BIN)/python -m pytest -n $(WORKERS)

test-long: $(READY) ## the test suite with forty times the examples of property tests, and its slow tests
	$(BIN)/python -m pytest -n $(WORKERS) -m "" --hypothesis-profile=long

# Without a GPU these two do nothing: the bodies of the tests run on the CPU in `make test` and `make test-long`.
GPU = $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'

test-gpu: $(READY)  ## the tests that need a GPU, or several
	@if $(GPU); then $(BIN)/python -m pytest -m gpu tests/gpu; else echo "skipped: no GPU"; fi

test-engines: $(READY) ## the tests that need a cluster engine (Slurm: apt-get install slurmctld slurmd slurm-client munge)
	$(PIP) kubernetes-validate "ray>=2.40" "pyspark>=4.0" "pandas<3"
	$(BIN)/python -m pytest -m engine tests/engines

test-trainers: $(READY) ## the tests of transformers.Trainer, TRL, PEFT, Lightning and Accelerate, which it installs
	$(PIP) -e ".[hf,lightning]"
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 -m trainers tests/trainers

test-quick: $(READY) ## a part of the test suite: recipes, codecs, kernels, training in threads, a live run
	$(BIN)/python -m pytest -n $(WORKERS) $(QUICK)

test-versions:      ## the same with other versions of Python and torch, each in an environment of its own
	@for version in $(VERSIONS); do \
	  echo "== $$version"; \
	  $(MAKE) --no-print-directory test-quick PYTHON=$${version%:*} TORCH=$${version#*:} VENV=build/versions/$$(echo $$version | tr : -) || exit 1; \
	done

check: $(READY)     ## style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench-gpu: $(READY) ## speed, codecs, overhead and memory on GPUs, beside torch's DistributedDataParallel
	$(BIN)/python -m benchmarks.gpu

bench: $(READY)     ## the figures of docs/figures.md
	$(BIN)/python -m benchmarks

DOCS = $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')

$(VENV)/.docs: $(READY)
	$(PIP) $(DOCS)
	@touch $@

docs: $(VENV)/.docs ## the site of the documentation, in build/site
	$(BIN)/python docs/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # --quiet would hide warnings from --strict
	@echo build/site/index.html

clean:              ## remove what make made
	rm -rf $(VENV) build *.egg-info stretto/kernels/_native*.so
