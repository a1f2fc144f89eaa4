# `make train` and `make test` work on a fresh machine with Python >= 3.11 and nothing else typed.
PYTHON ?= python3
BIN := .venv/bin
# Without compiling every module of torch and transformers, which takes longer than a short run: a run imports few of them.
PIP := python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: install develop train test tests test-slurm test-grid test-oldest try lint docs clean

# Stamps of their own: training does not wait for what only tests and benches import, and these install all of it at once.
install: .venv/compiled

develop: .venv/developed .venv/torchao.installed .venv/triton.installed

.PRECIOUS: %/bin/python
%/bin/python:
	$(PYTHON) -m venv $*

.venv/installed: pyproject.toml | $(BIN)/python
	$(BIN)/$(PIP) --editable .
	touch $@

.venv/developed: pyproject.toml | $(BIN)/python
	$(BIN)/$(PIP) --editable '.[dev,bench]'
	touch .venv/installed $@

# tests/torchao_folder.py says why there.
%/torchao.installed: pyproject.toml | %/bin/python
	$*/bin/$(PIP) --upgrade --no-deps --target $*/torchao 'torchao>=0.15,<0.19'
	touch $@

# tests/interpreted_triton.py says why there. Torch for CUDA brings its own.
.venv/triton.installed: pyproject.toml | $(BIN)/python
	$(BIN)/$(PIP) --upgrade --no-deps --target .venv/triton 'triton>=3.5,<4'
	touch $@

# What commands import is compiled by one process when it is installed, not by the first command that is typed, nor by every rank at
# once, nor by each anew where the environment forbids Python to keep what it has compiled.
.venv/compiled: .venv/installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m compileall -q framework
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import framework.commands.train, framework.launch.agent, framework.train.rank, framework.commands.trained_model, framework.model.generate, framework.track.summary, matplotlib.pyplot"
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "from transformers import LlamaForCausalLM, PreTrainedTokenizerFast"
	touch $@

train: install
	$(BIN)/meshwright train experiment=quickstart

lint: develop
	$(BIN)/ruff check framework tests scripts
	$(BIN)/ruff format --check framework tests scripts
	$(BIN)/mypy

# WORKERS=3: so many tests at a time on two cores, since ranks wait for one another half of the time; each worker imports and collects
# for itself, and has a pool of ranks. A file's tests stay on one worker, which its fixtures are made for. Files that mostly sleep
# (marked `waits`) come first, then all in the order of their names, in which the many small ones come last and even out. What is
# imported is compiled once and kept, also where the environment forbids Python to: tests start hundreds of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS ?= 3
SPREAD := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# Lint and types beside the tests, whose ranks wait for one another and leave a part of two cores idle; and before them the two
# installations beside each other.
test:
	$(MAKE) --no-print-directory --jobs 2 lint tests

# tests/browser opens pages in Chromium where there is one (scripts/install_browser.sh); REQUIRE_BROWSER=1: none is a failure.
tests: develop
	$(PYTEST) $(SPREAD) -m "not grid" --ignore tests/slurm

# On a real SLURM cluster of this machine (scripts/local_cluster.sh install); REQUIRE_SLURM=1: a skipped test is a failure. PART=0
# to 27, or today: what runs each day, and a part of the rest, as in CI.
test-slurm: develop
	$(PYTEST) tests/slurm $(if $(PART),--grid-part $(PART))

# More families, ranks and ties of what `make test` shows, and dear files of one mechanism. PART=0 to 27, or today: a part of them, as
# CI runs each day.
test-grid: develop
	$(PYTEST) $(SPREAD) -m grid --ignore tests/slurm $(if $(PART),--grid-part $(PART))

# On the oldest torch and transformers that pyproject.toml allows, which GPU machines have: in a venv of its own of some 8 GB, for
# PyPI's torch is the build for CUDA, which runs on CPUs. TORCH=2.12: that one, in a venv of its own. With a newer NumPy the Triton of
# torch 2.11 cannot interpret a loop.
OLDEST := build/oldest$(TORCH)

$(OLDEST)/installed: pyproject.toml $(OLDEST)/torchao.installed
	$(OLDEST)/bin/$(PIP) --editable '.[dev]' 'torch==$(or $(TORCH),2.11).*' 'transformers==5.17.*' 'numpy<2.4'
	touch $@

test-oldest: $(OLDEST)/installed
	$(subst $(BIN),$(OLDEST)/bin,$(PYTEST)) $(SPREAD) -m "not grid" tests/unit tests/ranks tests/laws

# Each option of each command, typed as a new user does, with what must be seen; ARGS=--all: also those that train or take long.
try: install
	$(BIN)/python scripts/try_as_user.py $(ARGS)

# docs/ as a site in build/site, which opens from the disk: build/site/index.html. A broken link ends it.
docs: develop
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:
	rm -rf .venv build *.egg-info
