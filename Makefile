.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-full test-gpu bench lint check

# The interpreter that makes .venv: Python 3.12, or a newer one.
PYTHON ?= $(shell for p in python3.12 python3 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.11.0
PY := .venv/bin/python
READY := .venv/.ready

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## make .venv: torch, the fork (editable), what tests, rollouts and lint need

# What decides about the installed metadata; patched files and modules are live in an editable install.
$(READY): pyproject.toml patches/build-metadata.patch patches/upstream.txt megatron/core/LOCAL_VERSION
	@test -n "$(PYTHON)" || { echo "no Python 3.12 or newer on PATH: name one, make setup PYTHON=…"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q $(TORCH)
	$(PY) -m pip install -q -e '.[test,rollout,lint]'
	@touch $@

# Ranks, and how they share the model: make quickstart NPROC=2 TP=2, or NPROC=2 PP=2. ARGS goes to the program.
NPROC ?= 1
TP ?= 1
PP ?= 1
quickstart: $(READY) ## the main job: an RL loop end to end, on whatever is here (NPROC=2 TP=2 or PP=2)
	$(PY) -m patchset materialise
	$(PY) -m examples.quickstart --ranks=$(NPROC) --tp=$(TP) --pp=$(PP) $(ARGS)

test: $(READY) ## the tests that need no GPU: patches, cpu, dist
	$(PY) -m patchset materialise
	$(PY) -m pytest tests/patches tests/cpu tests/unit_tests tests/dist

test-full: $(READY) ## the same, with longer random searches and every export layout (TEST_FULL=1)
	$(PY) -m patchset materialise
	TEST_FULL=1 $(PY) -m pytest tests/patches tests/cpu tests/unit_tests tests/dist

test-gpu: $(READY) ## the tests that need CUDA devices
	$(PY) -m patchset materialise
	$(PY) -m pytest tests/gpu

bench: $(READY) ## every benchmark; results go to benchmarks/results
	$(PY) -m patchset materialise
	set -e; for file in benchmarks/bench_*.py; do $(PY) $$file; done

lint: $(READY) ## ruff
	$(PY) -m ruff check .

check: $(READY) ## prove that the patch queue is in order
	$(PY) -m patchset check
