# The build needs Python 3.11, make, gcc and a package registry. `make help` lists the targets.
PYTHON ?= python3.11
VENV := .venv
READY := $(VENV)/.ready
# Use a CPU build of torch: from pip's configured find-links (uv does not read them), else from torch's own CPU index.
FIND_LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
TORCH := $(if $(FIND_LINKS),,--torch-backend cpu)
# Compile packages once, at installation. Where PYTHONDONTWRITEBYTECODE is set, each process that imports vLLM would
# otherwise compile vLLM again and take three times as long to start.
UV := $(if $(FIND_LINKS),UV_FIND_LINKS="$(FIND_LINKS)") $(VENV)/bin/uv
# Use one thread a process: the processes of a run share the cores, and small tensors gain nothing from more threads.
export OMP_NUM_THREADS ?= 1

# These tests run last and alone. A storm has more processes than there are cores, and fails if a role stalls. The
# upgrade tests accept no stall at all. Ranks of vLLM spin while they run: on two cores a broker would stall for a
# minute next to them.
STORM := tests/chaos/test_storm.py
ALONE := $(STORM) tests/upgrade/test_nodes.py tests/upgrade/test_rolling.py tests/integration/test_lender_ranks.py
# Tests mostly wait for brokers and processes, so six files run at once, the long ones (chaos) first. PYTEST='-m "not slow"'.
PARALLEL := -n 6 --dist loadfile --no-loadscope-reorder

# Compile the packages before the tests. Where PYTHONDONTWRITEBYTECODE is set, each test process would otherwise compile
# them again.
OWN := pipeline schemas topics workers

# Triton has a folder of its own: vLLM looks for the package, and is tested without the package on a CPU.
TRITON := $(VENV)/triton

# These extras name other versions than vLLM of packages that both need, so each has an environment of its own.
APART := openenv verifiers
EXTRAS = $(shell $(PYTHON) -c 'import tomllib; print(*("--extra " + name for name in tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"] if name not in "$(APART)".split()))')

# Image builder with its flags, and registry prefix of the images. deploy/images documents the build arguments.
BUILD ?= docker build
REPOSITORY ?= rose
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: help setup demo test test-long test-triton test-adapters lint requirements wheel images
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv, once

$(READY): requirements.txt pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet 'uv>=0.13,<1'
	$(UV) pip install --quiet --compile-bytecode --python $(VENV)/bin/python $(TORCH) --no-deps -r requirements.txt
	$(UV) pip install --quiet --python $(VENV)/bin/python --no-deps --editable .
	touch $@

demo: $(READY) ## train a small policy with all roles on this machine, in a few minutes
	$(VENV)/bin/rose demo

test: $(READY) ## run all tests, with KAFKA_HOME set also on Apache Kafka; PYTEST='-m "not slow"' runs the quick tests
	$(VENV)/bin/python -m compileall -q $(OWN)
	$(VENV)/bin/python -m pytest $(PARALLEL) --ignore $(STORM) $(PYTEST)
	$(VENV)/bin/python -m pytest $(STORM) $(PYTEST) || [ $$? -eq 5 ]  # 5: no test was selected

test-long: $(READY) ## run the tests that take minutes each: long storms, servers under load, upgrades
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m long $(ALONE:%=--ignore %) $(PYTEST)
	$(VENV)/bin/python -m pytest -m long $(ALONE) $(PYTEST) || [ $$? -eq 5 ]

test-triton: $(READY) ## test the codec's GPU kernels in Triton's interpreter; downloads Triton (0.7 GB installed)
	test -d $(TRITON) || $(VENV)/bin/python -m pip install --quiet --no-deps --target $(TRITON) triton==3.7.1
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(VENV)/bin/python -m pytest \
		tests/unit/test_weights_triton.py tests/unit/test_weights_gpu_changes.py $(PYTEST)

test-adapters: $(READY) $(APART:%=$(VENV)/%/.ready) ## test the adapters whose packages need environments of their own
	$(VENV)/bin/python -m pytest $(APART:%=tests/integration/test_%.py) $(PYTEST)

$(VENV)/%/.ready: pyproject.toml | $(READY)
	test -x $(VENV)/$*/bin/python || $(VENV)/bin/uv venv --quiet --python $(PYTHON) $(VENV)/$*
	$(UV) pip install --quiet --python $(VENV)/$*/bin/python --editable '.[$*]'
	touch $@

lint: $(READY) ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

wheel: ## build the wheel into dist/, after emptying it
	test -x $(VENV)/bin/uv || { $(PYTHON) -m venv $(VENV) && $(VENV)/bin/python -m pip install --quiet 'uv>=0.13,<1'; }
	rm -rf dist
	$(UV) build --quiet --wheel --out-dir dist .

images: wheel ## build the images light, engine and trainer; BUILD='buildah bud' uses another builder
	for family in light engine trainer; do \
		$(BUILD) --file deploy/images/$$family.Containerfile --tag $(REPOSITORY)-$$family:$(VERSION) \
			--build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) . || exit 1; \
	done

requirements: ## compile requirements.txt from pyproject.toml
	test -x $(VENV)/bin/uv || { $(PYTHON) -m venv $(VENV) && $(VENV)/bin/python -m pip install --quiet 'uv>=0.13,<1'; }
	$(UV) pip compile pyproject.toml --quiet --upgrade $(EXTRAS) --python-version 3.11 $(TORCH) \
		--no-emit-find-links --no-emit-index-url --no-annotate --no-header --output-file requirements.txt
