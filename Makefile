# Two commands set everything up on a machine that has Python 3.11 to 3.13: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SEED ?= 1
PROMPT ?= Tell me a story.

.PHONY: demo test lint bench clean

demo: $(VENV)/.installed
	$(BIN)/g4 build tiny-31b --output build/tiny-31b
	OMP_NUM_THREADS=1 $(BIN)/g4 run build/tiny-31b "$(PROMPT)" --temperature 0.7 --top-k 40 --seed $(SEED) --max-new-tokens 120

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(VENV)/.developer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.developer
	$(BIN)/python tools/bench_quantizer.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

# The oracles of the tests (transformers, hqq, executorch) come with the `dev` extra.
$(VENV)/.developer: $(VENV)/.installed
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
