# What a checkout can do. It needs Python 3.11 or newer, make and bash; everything else goes into .venv.
#
#   make demo        a 70B plan, its files, and a small model that really trains on this machine
#   make test        linters and tests, fast enough for every change
#   make test-full   the same, and the tests that take long
#   make docs        the site of docs/, in build/site
#
# PYTHON=python3.12 takes another interpreter for .venv, TORCH=... another build of PyTorch, PYTEST_ARGS='-k plan'
# a part of the tests.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
# The build that the tests ran with, installed before anything that asks for a torch of any version.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=

bin := .venv/bin
pip := DS_BUILD_OPS=0 $(bin)/python -m pip --disable-pip-version-check install --quiet
# Two at a time, a file's tests after one another: some files start a cluster, or trainings of two processes.
# Long files first: tests/real stands before tests/unit, and files are handed out in order.
pytest := $(bin)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-full lint docs wheel clean

help:
	@sed -n '/^# [^ ]/d; s/^#   \(make .*\)/\1/p' Makefile

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is not Python 3.11 or newer. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.runtime: .venv/.created pyproject.toml Makefile
	@echo 'make: installing dslaunch, PyTorch and DeepSpeed into .venv; the first time takes minutes'
	$(pip) '$(TORCH)'
	$(pip) --editable '.[runtime]'
	@touch $@

.venv/.test: .venv/.runtime
	@echo 'make: installing what the tests need into .venv'
	$(pip) --editable '.[runtime,test,dev,docs]'
	@touch $@

demo: .venv/.runtime
	@echo; echo '== A plan: dslaunch plan recipe=vla70b cluster=64xA100'; echo
	@$(bin)/dslaunch plan recipe=vla70b cluster=64xA100
	@echo; echo '== Its files: dslaunch render recipe=vla70b cluster=64xA100 -o runs/demo'; echo
	@$(bin)/dslaunch render recipe=vla70b cluster=64xA100 -o runs/demo
	@echo; echo '-- runs/demo/ds_config.llm.json'; cat runs/demo/ds_config.llm.json
	@echo; echo '-- runs/demo/job.sbatch'; cat runs/demo/job.sbatch
	@echo; echo '== A training: dslaunch recipe=vla_tiny cluster=local'; echo
	@$(bin)/dslaunch recipe=vla_tiny cluster=local

test: lint
	$(pytest) -m 'not slow' $(PYTEST_ARGS)

# What was interrupted, or failed, goes on where it was: build/chaos.jsonl has the faults that were tried.
test-full: lint
	DSLAUNCH_CHAOS_TABLE=build/chaos.jsonl $(pytest) $(PYTEST_ARGS)
	rm -f build/chaos.jsonl

lint: .venv/.test
	$(bin)/ruff check .
	$(bin)/mypy
	$(bin)/lint-imports

.venv/.docs: .venv/.created pyproject.toml
	$(pip) --editable '.[docs]'
	@touch $@

# Strict: a broken link, or a page that stands in no menu, is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict --quiet
	@echo 'make: build/site/index.html'

wheel: .venv/.test
	rm -rf dist
	$(bin)/python -m build --no-isolation --outdir dist

clean:
	rm -rf .venv build dist runs/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
