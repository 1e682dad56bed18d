# Everything works on a fresh clone with Python >= 3.11, pip and a C compiler: the first target that needs them
# makes .venv and installs the tried versions; later ones install nothing until pyproject.toml or constraints.txt change.
#
#   make demo    a model planned, proved and run on four processes of this machine
#   make test    every rule, technique, schedule, mode and refusal once; make test-all: each of them in all its cases
#   make test-slow  thousands of combinations of these, in an hour or two
#   make lint    format, lint, types, layers, private imports
#   make gpu     what a CUDA device shows, with an installed torch and no network: build/gpu/gpu.md and gpu.json
#   make docs    the documentation site, into site/
#   make k8s-test  the operator on a real API server, which is built once from Debian's sources
#   make bench   the benchmarks; make zoo: Hugging Face architectures; make clean: remove .venv and caches

PYTHON ?= python3
BIN     = .venv/bin
READY   = .venv/.installed
DOCS    = build/docs-venv
JOBS   ?= 2

.PHONY: demo test test-rest test-all test-slow k8s-test lint format bench gpu zoo docs clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/meshwright run --nproc 4 examples/demo.py

# Tests that start processes mostly wait for them, so that more workers than cores keep these busy (tests/conftest.py
# spreads such tests). Ranks start faster from compiled files.
# What fails is repeated alone, once, and both outcomes are printed: a job that was starved by its neighbours passes
# then, a fault stays. Exit status 5 is "no test was selected", which is no failure.
unexport PYTHONDONTWRITEBYTECODE
define PASS
	$(BIN)/python -m pytest -n $$(($(JOBS) + 3)) --dist worksteal -m "not slow and not gpu and $(1)" $(ARGS) || [ $$? -eq 5 ] \
	    || $(BIN)/python -m pytest -x --last-failed --last-failed-no-failures none $(ARGS)
endef

test: $(READY)
	$(call PASS,not full)

test-rest: $(READY)
	$(call PASS,full)

test-all: test test-rest

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow and not procs and not gpu" --ignore tests/k8s $(ARGS) || [ $$? -eq 5 ]

# Some fifteen minutes the first time: the control plane goes into ~/.cache/meshwright/k8s. With KUBECONFIG and
# K8S_TEST_IMAGE, an image that its nodes can pull, the tests run in that cluster.
k8s-test: $(READY)
	[ -n "$$K8S_TEST_IMAGE" ] || tools/build_kubernetes.sh
	$(BIN)/python -m pytest -m slow tests/k8s $(ARGS)
	cat build/k8s.json

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/check_torch_imports.py
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m bench $(ARGS)

# Not after $(READY): it installs nothing. A PYTHON that was given goes before .venv, and .venv before python3.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
gpu:
	$(GPU_PYTHON) -m bench.gpu $(ARGS)

zoo: $(READY)
	$(BIN)/python -m pytest -m zoo $(ARGS)

docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build --strict --site-dir site

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone: resolved together with the rest, pip may prefer a build with gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Meshwright needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,lint]'
	@touch $@

# An environment of its own: the site is built from sources, so it needs the extra's packages but not torch.
$(DOCS)/.installed: pyproject.toml constraints.txt
	[ -x $(DOCS)/bin/python ] || $(PYTHON) -m venv $(DOCS)
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	    > $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt -r $(DOCS)/requirements.txt
	@touch $@
