# Every target prepares .venv by itself: a fresh clone needs Python and make alone.
#
# TORCH=2.15.0 takes that torch instead of the pinned one, TORCH=newest the newest, and
# PYTHON=python3.12 that interpreter; each combination has a .venv-* of its own.

PYTHON ?= python3
TORCH ?=
# What decides the random draws of the tests: nothing in the gate, the date at night.
SEED ?=
# Of soak, the rows that each test has in the gate.
ROWS ?= 2
VENV := .venv$(addprefix -,$(subst /,-,$(filter-out python3,$(PYTHON))))$(addprefix -torch,$(TORCH))
BIN := $(VENV)/bin
# Newer than what it was installed from exactly when .venv is up to date.
STAMP := $(VENV)/.installed
FRAMEWORKS := $(VENV)/.frameworks
CUDA_OFFLINE := $(VENV)/.cuda-offline
DOCS := $(VENV)/.docs
# Resolved with Python 3.11. Others get the same versions, which have wheels for 3.12 and
# 3.13 too; what these may need beside them is not pinned, as are TORCH's own requirements.
CONSTRAINTS := $(if $(TORCH),$(VENV).txt,constraints.txt)

# As wide as the site shows code.
SHOWN := $(wildcard *.md docs/*.md docs/reference/*.md docs/notebooks/*.ipynb) \
	$(wildcard examples/rules/*.py) examples/own_rule.py examples/sharded.py \
	examples/trainers/transformers_callbacks.py examples/trainers/lightning_schedule_free.py
NARROW := --line-length 76 $(SHOWN)

CPP := $(wildcard optimi_func/execution/cpp/*.cpp)

DEVICE ?=
# Of a GPU one question is asked, in minutes, and nowhere else.
QUESTIONS := $(if $(filter cuda,$(DEVICE)),gpu,step_time host_cost turns \
	peers cold_start rules_per_byte torch_classes release accumulation train_step \
	population storage plan soap lbfgs replicas)

.DEFAULT_GOAL := help
.PHONY: help install train test test-full test-all soak cuda-offline nightly bench docs docs-serve docs-test lint format clean

help:
	@echo "make train   train a small GPT five ways and compare the optimizers (4 minutes)"
	@echo "make test    run the fast tests, mostly without compiling (5 minutes)"
	@echo "make test-full  run the slow tests: more kernels, processes, trainers (15 minutes)"
	@echo "make test-all   both, as before a merge"
	@echo "make soak    run two rows of each of the widest tables; ROWS=9: more of them"
	@echo "make cuda-offline  assemble and interpret the CUDA kernels, without a GPU (minutes)"
	@echo "make nightly  run all tests and all of soak with other random draws each day (hours)"
	@echo "make nightly SEED=2026-11-29 PARTS=soak  repeat a part of one of them"
	@echo "make install  prepare .venv with everything that the targets above need"
	@echo "make bench   ask every question of benchmarks/ (minutes); ARGS=--quick: seconds each"
	@echo "make bench DEVICE=cuda  the step on a GPU, against torch's and a copy (minutes)"
	@echo "make docs    build the documentation into site/, warnings as errors, check its links"
	@echo "make docs-serve  show it while it is written"
	@echo "make docs-test   read the built site in a browser, run the notebooks (minutes)"
	@echo "make lint    check format, style and types"
	@echo "make format  format and apply the safe fixes"
	@echo "make clean   remove .venv, .venv-*, caches and outputs"
	@echo "Pick the interpreter with PYTHON=...; it has to be 3.11 or newer. TORCH=2.15.0 picks"
	@echo "another torch. Each of them has its own .venv-*."

$(VENV).txt: constraints.txt
	@sed 's/^torch==.*/torch$(if $(filter-out newest,$(TORCH)),==$(TORCH))/' $< > $@

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || \
		{ echo "error: $(PYTHON) not found; name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version 2>&1) is too old: optimi_func needs" \
		"Python 3.11 or newer; name one with make PYTHON=..." >&2; exit 1; }
	@echo "Preparing $(VENV): pip downloads torch and the rest of the tools, for a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[test,lint,examples]' -c $(CONSTRAINTS)
	@touch $@

# The frameworks that the tests train with are half of everything: for the tests alone.
$(FRAMEWORKS): $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[frameworks]' -c $(CONSTRAINTS)
	@touch $@

# CUDA builds of torch have brought the triton that they take, which is not to be replaced.
$(CUDA_OFFLINE): $(STAMP)
	$(BIN)/python -c 'import triton' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet -e '.[cuda-offline]' -c $(CONSTRAINTS)
	@touch $@

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[docs]' -c $(CONSTRAINTS)
	@touch $@

install: $(STAMP) $(FRAMEWORKS) $(CUDA_OFFLINE) $(DOCS)

train: $(STAMP)
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Two at a time, a file by one of them: what it compiles, it compiles once. In order: the
# files with the fewest tests would come last, and take the longest.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder \
	$(if $(SEED),--seed $(SEED))
# Sets are iterated in an order that depends on it.
export PYTHONHASHSEED := $(if $(SEED),$(firstword $(shell printf %s '$(SEED)' | cksum)),0)

test: $(STAMP)
	$(PYTEST) $(ARGS)

test-full: $(STAMP) $(FRAMEWORKS)
	$(PYTEST) -m "full and not soak and not night" $(ARGS)

test-all: test test-full

# The CUDA kernels are soak, too, and have a target of their own.
CUDA_TESTS := tests/integration/test_cuda_offline.py

soak: $(STAMP) $(FRAMEWORKS)
	$(PYTEST) -m "soak and not night" --rows $(ROWS) $(addprefix --ignore=,$(CUDA_TESTS)) $(ARGS)

cuda-offline: $(STAMP) $(CUDA_OFFLINE)
	$(PYTEST) -m soak $(CUDA_TESTS) $(ARGS)

nightly:
	.ci/night

bench: $(STAMP)
	for question in $(QUESTIONS); do \
		$(BIN)/python benchmarks/$$question.py $(ARGS) || exit 1; done

# Pages of optimizers and tables of numbers are written first; then nothing is fetched.
docs: $(DOCS)
	$(BIN)/python docs/_build/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	$(BIN)/python -m pytest -q docs/_tests

docs-serve: $(DOCS)
	$(BIN)/python docs/_build/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --no-strict $(ARGS)

docs-test: docs
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "" --nbmake docs/_tests docs/notebooks

lint: $(STAMP)
	$(BIN)/ruff format --check . docs/_build
	$(BIN)/ruff format --check $(NARROW)
	$(BIN)/ruff check . docs/_build
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff format . docs/_build
	$(BIN)/ruff format $(NARROW)
	$(BIN)/ruff check --fix . docs/_build
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf .venv .venv-* outputs site build dist *.egg-info .cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
