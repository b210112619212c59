# make setup | demo | test | test-full | lint | format | clean. Needs python3 (3.11 or 3.12) with venv, and make.
#   TORCH_INDEX=URL   index to take torch from, for example PyTorch's own index of CPU wheels
#   TORCH=torch==X    another torch version (2.11 or newer)
#   PYTHON=python3.12 the interpreter that makes the environment

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell grep '^torch==' constraints.txt)
TORCH_INDEX ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_OUT := build/demo/results.jsonl

.PHONY: setup demo test test-full lint format clean

setup: $(STAMP)

# torch goes in first and alone: resolved as a dependency it may become a CUDA build of several GB.
# Its installation is not quiet, so that such a download is seen.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	  "python3 is %d.%d; DeepInfer needs 3.11 or 3.12: make PYTHON=python3.12" % v[:2])'
	@test -n "$(TORCH_INDEX)" || echo "installing $(TORCH); if this begins to download several GB," \
	  "stop and name an index of CPU wheels: make TORCH_INDEX=URL"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	{ grep -v '^torch==' constraints.txt; echo '$(TORCH)'; } > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c $(VENV)/constraints.txt
	touch $(STAMP)

demo: $(STAMP)
	mkdir -p $(dir $(DEMO_OUT))
	$(BIN)/deepinfer batch run -i examples/demo.jsonl -o $(DEMO_OUT) --overwrite --print

test: $(STAMP)
	$(BIN)/python -m pytest --hypothesis-profile=ci

test-full: $(STAMP)
	$(BIN)/python -m pytest --hypothesis-profile=ci --runslow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
