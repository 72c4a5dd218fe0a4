# make demo | make test: each does all set-up that it needs on a machine with Python 3.11 and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: demo test lint types install help clean

help:
	@echo "make demo     train a small Llama on several meshes, equal to the unsharded model; measured beside predicted"
	@echo "make test     run the tests (ARGS='-k mesh' to choose)"
	@echo "make lint     ruff"
	@echo "make types    mypy --strict"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf,report,dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/train_llama.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache
