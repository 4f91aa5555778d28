# Python 3.11, make, gcc and a package registry are all that is needed; `make help` says what there is to do.
PYTHON ?= python3.11
VENV := .venv
READY := $(VENV)/.ready
# A CPU build of torch: from the wheels that pip is told of (uv does not look there), else from torch's own CPU builds.
FIND_LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
TORCH := $(if $(FIND_LINKS),,--torch-backend cpu)
# Packages are compiled once, here: where PYTHONDONTWRITEBYTECODE is set, each process that imports vLLM would else compile
# it anew, which takes it three times as long to start.
UV := $(if $(FIND_LINKS),UV_FIND_LINKS="$(FIND_LINKS)") $(VENV)/bin/uv
# One thread a process: the processes of a run share the cores, and small tensors gain nothing from more.
export OMP_NUM_THREADS ?= 1

# A storm has more processes than there are cores, and its roles may not stand still: it comes last, alone. So do those
# of upgrades, of which nothing excuses a stall. Ranks of vLLM spin for as long as they live: beside them, on two cores,
# a broker stands still for a minute.
STORM := tests/chaos/test_storm.py
ALONE := $(STORM) tests/upgrade/test_nodes.py tests/upgrade/test_rolling.py tests/integration/test_lender_ranks.py
# Tests mostly wait for brokers and processes: six files at once, the long ones (chaos) first. PYTEST='-m "not slow"'.
PARALLEL := -n 6 --dist loadfile --no-loadscope-reorder

# Compiled before the tests: where PYTHONDONTWRITEBYTECODE is set, each of their processes would else do it anew.
OWN := pipeline schemas topics workers

# What builds images, with its flags, and the registry that they are for; deploy/images says what arguments they take.
BUILD ?= docker build
REPOSITORY ?= rose
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: help setup demo test test-long lint requirements wheel images
.DEFAULT_GOAL := help

help: ## what there is to do
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv, once

$(READY): requirements.txt pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet 'uv>=0.13,<1'
	$(UV) pip install --quiet --compile-bytecode --python $(VENV)/bin/python $(TORCH) --no-deps -r requirements.txt
	$(UV) pip install --quiet --python $(VENV)/bin/python --no-deps --editable .
	touch $@

demo: $(READY) ## run the whole loop on this machine: a policy that learns, in a few minutes
	$(VENV)/bin/rose demo

test: $(READY) ## run every test; with KAFKA_HOME set, on Apache Kafka too; PYTEST='-m "not slow"' runs the quick ones
	$(VENV)/bin/python -m compileall -q $(OWN)
	$(VENV)/bin/python -m pytest $(PARALLEL) --ignore $(STORM) $(PYTEST)
	$(VENV)/bin/python -m pytest $(STORM) $(PYTEST) || [ $$? -eq 5 ]  # 5: none of these was asked for

test-long: $(READY) ## run the tests that take minutes each: long storms, servers under traffic, upgrades
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m long $(ALONE:%=--ignore %) $(PYTEST)
	$(VENV)/bin/python -m pytest -m long $(ALONE) $(PYTEST) || [ $$? -eq 5 ]

lint: $(READY) ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

wheel: ## build the wheel into dist/, alone there
	test -x $(VENV)/bin/uv || { $(PYTHON) -m venv $(VENV) && $(VENV)/bin/python -m pip install --quiet 'uv>=0.13,<1'; }
	rm -rf dist
	$(UV) build --quiet --wheel --out-dir dist .

images: wheel ## build the images light, engine and trainer; BUILD='buildah bud' with another builder
	for family in light engine trainer; do \
		$(BUILD) --file deploy/images/$$family.Containerfile --tag $(REPOSITORY)-$$family:$(VERSION) \
			--build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) . || exit 1; \
	done

requirements: ## compile requirements.txt from pyproject.toml again
	test -x $(VENV)/bin/uv || { $(PYTHON) -m venv $(VENV) && $(VENV)/bin/python -m pip install --quiet 'uv>=0.13,<1'; }
	$(UV) pip compile pyproject.toml --quiet --upgrade --all-extras --python-version 3.11 $(TORCH) \
		--no-emit-find-links --no-emit-index-url --no-annotate --no-header --output-file requirements.txt
