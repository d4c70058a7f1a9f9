# What people type. Everything happens in .venv; PYTHON says which interpreter makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPED := build/typed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check lint types format proto bench dist clean

help:  ## say what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## run the main job on real text and show the result (about four minutes)
	$(BIN)/memlm demo --out build/demo --overwrite

test: $(STAMP)  ## run every test but the slow ones
	$(BIN)/pytest -m "not slow"

test-slow: $(STAMP)  ## run the slow tests
	$(BIN)/pytest -m slow

check: lint types test  ## all that CI checks

lint: $(STAMP)  ## lint and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## types, on the package as it installs
	rm -rf $(TYPED)
	$(PIP) install --quiet --no-deps --constraint constraints.txt --target $(TYPED) .
	cd $(TYPED) && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p memlm

format: $(STAMP)  ## rewrite the code as the formatter likes it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP)  ## generate the code of proto/ with the oldest toolchain that the bounds allow
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto --grpc_python_out=proto proto/memlm/v1/*.proto

bench: $(STAMP)  ## measure speed and memory
	$(BIN)/memlm bench build
	$(BIN)/memlm bench generate
	$(BIN)/memlm bench serve
	$(BIN)/memlm bench model

dist: $(STAMP)  ## build the wheel and the source distribution
	$(BIN)/python -m build

clean:  ## remove what was made, the environment included
	rm -rf build dist $(VENV) *.egg-info
