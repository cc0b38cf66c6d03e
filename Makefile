# Each target makes the environment it needs first; when it is there, that takes a moment.
# EXTRA=cpu or EXTRA=gpu overrides what the machine suggests; PYTHON=..., VENV=... choose the interpreter and the place.

SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
SEED ?= 0
ONLY ?=
MINUTES ?= 30
ARGS ?=
export VENV EXTRA PYTHON
# A process that shares its core with others loses a factor of 30 when OpenMP threads spin.
export OMP_NUM_THREADS ?= 1
SETUP = python3 .ci/setup.py

.PHONY: help setup demo test test-operate check bench gpu chaos soak lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

setup:  ## the environment alone, with all extras
	@$(SETUP) dev gym

demo:  ## train a model on two-digit sums and show what it learned (SEED=0; ARGS=--random_rewards is the control)
	@start=$$(date +%s); $(SETUP) || exit; \
	 WINNOW_SETUP_SECONDS=$$(($$(date +%s) - start)) exec $(PY) -m cluster.demo --seed $(SEED) $(ARGS)

test:  ## the whole test suite (ARGS="-k name" for a part)
	@$(SETUP) dev gym
	@$(PY) -m pytest $(ARGS)

test-operate:  ## what needs minutes or more than Python: runs submitted to a Ray head, Prometheus, a browser, a sweep
	@$(SETUP) dev gym
	@$(PY) -m pytest tests/operate $(ARGS)

check:  ## lint and types
	@$(SETUP) dev gym
	@$(PY) -m ruff check rollout verifier learner cluster tests .ci
	@$(PY) -m mypy rollout verifier learner cluster tests .ci/setup.py

bench:  ## ours against a peer and the machine's limit (ONLY=name for one, ARGS=--list for the names)
	@$(SETUP) bench
	@$(PY) -m tests.bench $(if $(ONLY),--only $(ONLY)) $(ARGS)

gpu:  ## the learner's numbers on one GPU, 8 minutes at most (without one: small sizes on the CPU)
	@$(SETUP) dev
	@$(PY) -m tests.gpu.run $(ARGS)

chaos:  ## a training under 20 faults of every kind against the same one undisturbed (SEED=0)
	@$(SETUP) dev
	@$(PY) -m tests.chaos --seed $(SEED) $(ARGS)

soak:  ## the long tests: hostile responses, every kind of fault, a resume on the real engine, and MINUTES=30 of training whose memory stays flat
	@$(SETUP) dev gym
	@WINNOW_FUZZ=20000 WINNOW_LONG=1 $(PY) -m pytest -s --timeout 0 tests/verifier/test_fuzz.py tests/e2e/test_faults.py tests/e2e/test_stop_and_resume.py
	@$(PY) -m tests.chaos.soak --minutes $(MINUTES) --seed $(SEED)

lock:  ## write the exact versions in .ci/lock anew (ARGS=package moves one to its newest)
	@$(SETUP)
	@$(PY) .ci/lock.py $(ARGS)

clean:  ## remove the environment and the caches (runs stay)
	rm -rf $(VENV) .bench .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find rollout verifier learner cluster tests -name __pycache__ -type d -prune -exec rm -rf {} +
