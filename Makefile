# Every target builds its prerequisites from a fresh clone; you only need Python >= 3.11 and make.
# A stamp file per set of packages records that it is installed, so a second call starts at once and needs no network.
#
#   make demo     run notebooks/quickstart.ipynb on 2 CPU engines, or on one per GPU
#   make lab      open the quick start in JupyterLab
#   make docs     build the documentation site, build/docs/index.html
#   make test     run everything that CI runs: linters, prose, types, import contracts, tests, notebooks, browser tests
#   make unit     run the checks and the tests that start no cluster: the inner loop of development
#   make soak     run the tests that take long: random walks, stress, many seeds, every number of replicas, make colab,
#                 make front-ends, make bench-guard
#   make colab    run the notebooks, tests of the kernel and of Keras, with the versions of Colab's and Kaggle's kernels
#   make front-ends  run the browser tests with the next versions of JupyterLab and Notebook
#   make bench    run the benchmarks against their peers (see benchmarks/)
#   make bench-guard  run the benchmarks' short forms in ten minutes: fails if a ratio is worse than is known
#   make gpu      compare timings with plain torch and run tests/gpu, on a machine with a GPU and without network; it
#                 installs the wheels in .wheels, and uses the torch of PYTHON
#   make gpu-wheels  download the packages for `make gpu` into .wheels, on a machine with a network
#   make extension  rebuild the JupyterLab extension after a change in extension/ (needs npm)
#
# Variables: PYTHON (the interpreter), TORCH_INDEX (a package index for torch alone, for example PyTorch's own index of
# CPU wheels; by default pip's usual index), ARGS (more arguments for pytest or the demo), WORKERS (the number of
# processes that run the tests).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
KERAS := $(shell sed -n 's/^keras==/keras==/p' constraints.txt)
KERAS_NIGHTLY := keras-nightly==3.16.0.dev2026102704
TENSORFLOW := tensorflow-cpu==2.21.0
FRONT_ENDS := jupyterlab==4.7.0a2 notebook==7.7.0a2
RAY_TRAIN := pyarrow==26.0.1 tensorboardX==2.6.5
COLAB := $(VENV)/colab
COLAB_PYTHON ?= $(BIN)/python
COLAB_TORCH ?= $(if $(TORCH_INDEX),torch==2.11.*,$(TORCH))
WORKERS ?= 3
INSTALL := $(PIP) install -qq -c constraints.txt

.PHONY: help demo lab docs test unit check lint style types imports tests soak colab front-ends bench bench-guard gpu gpu-wheels extension hooks clean

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/.made: constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "distnb needs Python 3.11 or newer; found: $$(python3 --version 2>&1). Install one, or name it: make PYTHON=/path/to/python3.12 …" >&2; exit 1; }
	@echo "Making $(VENV) with $(PYTHON) …"
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) -m venv failed (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@echo "Installing $(TORCH) (the largest part, once) …"
	@$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@touch $@

# distnb itself is installed editable, with one extra per purpose.
$(VENV)/.made-%: $(VENV)/.made pyproject.toml extension/labextension/package.json
	@echo "Installing distnb[$*] …"
	@$(INSTALL) -e ".[$*]"
	@touch $@

# Keras's next version, next to the installed one: tests that need it put its folder first. The index removes a nightly
# build some day; these tests then skip with that reason.
$(VENV)/.made-keras-nightly: $(VENV)/.made constraints.txt
	@echo "Installing $(KERAS_NIGHTLY) beside Keras …"
	@rm -rf $(VENV)/keras-nightly
	@$(PIP) install -qq --no-deps --target $(VENV)/keras-nightly "$(KERAS_NIGHTLY)" || echo "$(KERAS_NIGHTLY) is not available." >&2
	@touch $@

# What Ray Train imports in addition, next to the installed packages, because pandas stores its texts in pyarrow's arrays
# as soon as that is installed.
$(VENV)/.made-ray-train: $(VENV)/.made
	@echo "Installing $(RAY_TRAIN) beside Ray …"
	@rm -rf $(VENV)/ray-train
	@$(PIP) install -qq --no-deps --target $(VENV)/ray-train $(RAY_TRAIN)
	@touch $@

# TensorFlow, in a separate environment: a peer of benchmarks/keras_fit.py and benchmarks/parameter_servers.
$(VENV)/.made-tensorflow: $(VENV)/.made
	@echo "Installing $(TENSORFLOW) into $(VENV)/tensorflow …"
	@$(BIN)/python -m venv --clear $(VENV)/tensorflow
	@$(VENV)/tensorflow/bin/python -m pip --disable-pip-version-check install -qq "$(TENSORFLOW)" $(KERAS)
	@touch $@

demo: $(VENV)/.made-demo
	@$(BIN)/python notebooks/demo.py $(ARGS)

lab: $(VENV)/.made-lab $(VENV)/.made-demo
	@$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/quickstart.ipynb $(ARGS)

# The site shows notebooks as they were saved; `make test` runs them and compares their outputs.
docs: $(VENV)/.made-docs
	@$(BIN)/python -m sphinx -E -q -W --keep-going -b html -c docs . build/docs $(ARGS)
	@echo "The site is in build/docs: open build/docs/index.html."

# The checks run beside the tests; their output follows the tests'.
test: $(VENV)/.made-test
	@checked=$$(mktemp); $(MAKE) --no-print-directory check > $$checked 2>&1 & checks=$$!; failed=; \
	$(MAKE) --no-print-directory tests || failed="$$failed tests"; \
	wait $$checks || failed="$$failed check"; \
	cat $$checked; rm $$checked; [ -z "$$failed" ] || { echo "Failed:$$failed" >&2; exit 1; }

unit: check
	$(PYTEST) -m "not processes and not soak" $(ARGS)

check: lint style imports types

lint: $(VENV)/.made-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check

style: $(VENV)/.made-test
	$(BIN)/python -m tests.style

types: $(VENV)/.made-test
	$(BIN)/mypy

imports: $(VENV)/.made-test
	$(BIN)/lint-imports

# Each file's tests run in one worker, those that start processes first. A worker that dies ends the run: with loadfile,
# pytest-xdist would wait forever for the tests that it had.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

tests: $(VENV)/.made-test $(VENV)/.made-keras-nightly
	$(PYTEST) $(ARGS)

soak: $(VENV)/.made-test $(VENV)/.made-keras-nightly $(VENV)/.made-ray-train $(VENV)/.made-colab
	$(PYTEST) -m soak $(ARGS)
	[ -n "$(ARGS)" ] || $(MAKE) --no-print-directory front-ends bench-guard

colab: $(VENV)/.made-test $(VENV)/.made-colab
	$(BIN)/python -m pytest -m soak tests/notebooks/test_colab.py $(ARGS)

# Colab's versions, in a separate environment; of other packages, the lowest versions that pyproject.toml allows. Without
# TORCH_INDEX it has our torch, since Colab's own comes with gigabytes of CUDA: for that and its Python,
# `make colab COLAB_PYTHON=python3.13 COLAB_TORCH=torch==2.11.0`. Installing distnb into Colab's versions fails if it
# would change one of them.
$(VENV)/.made-colab: $(VENV)/.made-test pyproject.toml constraints-colab.txt
	@echo "Installing Colab's versions into $(COLAB) …"
	@$(BIN)/uv venv -q --clear --python $(COLAB_PYTHON) $(COLAB)
	@$(PIP) --python $(COLAB)/bin/python install -qq $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(COLAB_TORCH)"
	@$(BIN)/uv pip install -q --python $(COLAB)/bin/python -r constraints-colab.txt
	@$(BIN)/uv pip install -q --python $(COLAB)/bin/python --resolution lowest-direct -c constraints-colab.txt \
		--only-binary :all: --no-binary distnb -e ".[demo,keras]"
	@$(BIN)/uv pip install -q --python $(COLAB)/bin/python -c constraints.txt pytest pytest-timeout
	@touch $@

front-ends: $(VENV)/.made-test $(VENV)/.made-front-ends
	FRONT_ENDS=$(CURDIR)/$(VENV)/front-ends $(PYTEST) -m browser tests/browser $(ARGS)

# The next versions of JupyterLab and Notebook, in a separate environment. Its servers run kernels of our environment. If
# the index does not have these versions any more, the tests skip with that reason.
$(VENV)/.made-front-ends: $(VENV)/.made-test
	@echo "Installing $(FRONT_ENDS) into $(VENV)/front-ends …"
	@$(BIN)/uv venv -q --clear --python $(BIN)/python $(VENV)/front-ends
	@$(BIN)/uv pip install -q --compile-bytecode --python $(VENV)/front-ends/bin/python $(FRONT_ENDS) \
		$(shell grep -E '^(anywidget|jupyterlab_widgets)==' constraints.txt) || echo "$(FRONT_ENDS) is not available." >&2
	@touch $@

bench: $(VENV)/.made-test $(VENV)/.made-bench $(VENV)/.made-keras-nightly $(VENV)/.made-ray-train $(VENV)/.made-tensorflow
	@$(BIN)/python -m benchmarks.guard --whole $(ARGS)

bench-guard: $(VENV)/.made-test $(VENV)/.made-bench $(VENV)/.made-keras-nightly $(VENV)/.made-ray-train
	@$(BIN)/python -m benchmarks.guard $(ARGS)

# Python 3.12 on x86-64, unless WHEELS_FOR says otherwise.
WHEELS := .wheels
WHEELS_FOR ?= --python-version 3.12 --implementation cp $(foreach glibc,2_34 2_31 2_28 2_27 2_24 2_17,--platform manylinux_$(glibc)_x86_64) \
	--platform manylinux2014_x86_64 --platform manylinux1_x86_64
gpu-wheels: $(VENV)/.made
	@rm -rf $(WHEELS)
	@$(PIP) download -qq --no-deps --only-binary=:all: $(WHEELS_FOR) -d $(WHEELS) -c constraints.txt -r benchmarks/gpu_wheels.txt
	@du -sh $(WHEELS)

# Not a separate environment, because it would not see the torch of PYTHON's environment.
GPU_SITE := build/gpu
gpu:
	@[ -d $(WHEELS) ] || { echo "$(WHEELS) is missing: run make gpu-wheels where there is a network, and copy it here." >&2; exit 1; }
	@rm -rf $(GPU_SITE)
	@$(PYTHON) -m pip --disable-pip-version-check install -qq --no-index --no-deps --no-compile --target $(GPU_SITE) $(WHEELS)/*.whl
	@export PYTHONPATH="$(CURDIR)/$(GPU_SITE):$(CURDIR)"; failed=; \
	timeout 240 $(PYTHON) -m benchmarks.gpu $(ARGS) || failed="$$failed the table ($$?)"; \
	timeout 330 $(PYTHON) -m pytest -q -p no:cacheprovider -n 4 --dist loadfile tests/gpu || failed="$$failed tests/gpu ($$?)"; \
	[ -z "$$failed" ] || { echo "Failed, with its exit status (124: it took too long):$$failed" >&2; exit 1; }

# Needed, with npm, only after a change in extension/: the built files are in the repository.
extension: $(VENV)/.made-lab
	cd extension && npm ci && rm -rf labextension/static && PATH="$(CURDIR)/$(BIN):$$PATH" npm run build
	cd extension && sha256sum src/* style/* schema/* *.json .npmrc > labextension.sha256

hooks: $(VENV)/.made-test
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
