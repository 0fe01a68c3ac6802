# Everything a fresh machine needs: `make demo`, `make test`.
VENV   := .venv
PYTHON := $(VENV)/bin/python
RUNS   := $(VENV)/.runs
READY  := $(VENV)/.ready
# The site is built from the sources as text: its environment needs no torch.
SITE_VENV := .venv-site
SITE      := $(SITE_VENV)/.ready
SHELL  := bash
# Workers and the processes that tests start load bytecode, where the environment forbids to write it too.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test unit test-all zoo bench docs site lint format clean

demo: $(RUNS)  ## Handwritten digits with and without conditioning, at tuned and small rates; writes pathcond-demo.html
	$(PYTHON) -m pathcond demo

test: $(READY)  ## Linters, type checker, unit and model tests
	$(MAKE) --no-print-directory --jobs 2 lint unit

# beside the linters, which keep one core busy
unit: $(READY)
	$(PYTHON) -m pytest -n 2 --dist worksteal -m "not zoo and not slow" --durations=30

test-all: $(READY) lint  ## The same with the whole model collection
	PATHCOND_TEST_ALL=1 $(PYTHON) -m pytest -n 2 --dist worksteal

DEVICE ?= cpu
zoo: $(READY)  ## Every model of the collection that was examined with an older library; writes docs/zoo.md (DEVICE=cuda is quicker)
	$(PYTHON) -m tests.zoo --device $(DEVICE) --rows results/zoo.jsonl --write docs/zoo.md

bench: $(READY)  ## Speed and memory beside naive implementations; writes benchmarks/*.json
	$(PYTHON) -m benchmarks.symmetry
	$(PYTHON) -m benchmarks.energy
	$(PYTHON) -m benchmarks.solvers
	$(PYTHON) -m benchmarks.whole
	$(PYTHON) -m benchmarks.steps
	$(PYTHON) -m benchmarks.growth
	$(PYTHON) -m benchmarks.conditioning
	$(PYTHON) -m benchmarks.teleport --steps 4 --epochs 2

docs: $(READY)  ## The pages that are generated from the code
	$(PYTHON) -m pathcond.rules.document docs/supported-operations.md
	$(PYTHON) -m pathcond_paper.document results/paper docs/reproduction.md
	$(PYTHON) -m pathcond report results/paper

site: $(SITE)  ## The documentation site, in site/; a broken link or an unknown name is an error
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/python -m mkdocs build --strict

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# torch first and pinned, so that no other package pulls a different build; torchvision and timm come without
# their dependencies for the same reason.
$(RUNS): pyproject.toml constraints.txt Makefile
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet -c constraints.txt torch
	$(PYTHON) -m pip install --quiet -c constraints.txt -e ".[demo]"
	touch $@

$(READY): $(RUNS)
	$(PYTHON) -m pip install --quiet -c constraints.txt -e ".[dev]" -e "./paper[ray,tensorboard]"
	$(PYTHON) -m pip install --quiet -c constraints.txt --no-deps torchvision timm
	$(PYTHON) -m pip install --quiet -c constraints.txt pillow pyyaml
	touch $@

$(SITE): pyproject.toml constraints.txt Makefile
	test -x $(SITE_VENV)/bin/python || python3 -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install --quiet -c constraints.txt mkdocs-material "mkdocstrings[python]" ruff
	touch $@

clean:
	rm -rf $(VENV) $(SITE_VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
