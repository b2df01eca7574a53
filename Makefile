# Each target is one command; every one that needs packages sets .venv up first.
# Options: ACCELERATOR=auto|cpu|cuda|cuda12|tpu  PYTHON=python3.13  WORKERS=4  ARGS="further arguments"

ACCELERATOR ?= auto
PYTHON ?=
WORKERS ?= auto
ARGS ?=
export ACCELERATOR PYTHON

python = .venv/bin/python
setup := ./.ci/setup
# On the processor alone even where an accelerator's packages are installed.
platform := $(if $(filter cpu,$(ACCELERATOR)),JAX_PLATFORMS=cpu)
# A test process is one of several: it keeps to one compute thread, and takes of a GPU only the memory that it uses.
pytest = $(platform) NPROC=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 XLA_PYTHON_CLIENT_PREALLOCATE=false \
	$(python) -m pytest -n $(WORKERS) --maxprocesses=8 --dist=worksteal

.PHONY: help setup quickstart test test-all test-jax-latest lint format bench docs build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

quickstart: ## train a small language model on real text, about seven minutes on two cores
	@$(setup)
	$(platform) $(python) -m experiments.quickstart $(ARGS)

test: ## run the tests, on the oldest JAX that is supported
	@$(setup) test
	$(pytest) -m "not slow" $(ARGS)

test-all: ## run the tests, the slow ones too
	@$(setup) test
	$(pytest) $(ARGS)

test-jax-latest: python = .venv-latest/bin/python
test-jax-latest: ## run the tests on the newest JAX, in .venv-latest; ARGS="-m core" a part of them
	@$(setup) --latest test
	@$(python) -c "import flax, jax; print('jax', jax.__version__, 'flax', flax.__version__)"
	$(pytest) -m "not slow" $(ARGS)

lint: ## check style and types
	@$(setup) dev
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

format: ## rewrite the sources in the checked style
	@$(setup) dev
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

bench: ## time the implementations of a mixer on this machine
	@$(setup)
	$(platform) $(python) -m experiments.bench $(ARGS)

docs: ## make the documentation in docs/_build and the table of mixers in the README
	@$(setup) docs
	JAX_PLATFORMS=cpu $(python) docs/pages.py
	$(python) -m sphinx -q -W --keep-going -b html docs docs/_build

build: ## make the wheel and the source archive in dist/
	@$(setup) dev
	$(python) -m build --outdir dist .

setup: ## make .venv and install everything that developing needs
	@$(setup) dev test

clean: ## remove what was built; .venv and runs stay
	rm -rf build dist docs/_build .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find configs docs experiments linattn_jax pallas_kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +
