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

demo: $(STAMP)  ## run the main job on real text and show the result (four to fourteen minutes)
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

OUT := proto
proto: $(STAMP)  ## generate the code of proto/ with the oldest toolchain that the bounds allow
	mkdir -p build/protos/google/longrunning  # its package ships operations.proto under another name
	cp $$($(BIN)/python -c "import google.longrunning.operations_pb2 as m; print(m.__file__.replace('_pb2.py', '_proto.proto'))") \
		build/protos/google/longrunning/operations.proto
	$(BIN)/python -m grpc_tools.protoc -Iproto -Ibuild/protos -I$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
		--python_out=$(OUT) --pyi_out=$(OUT) --grpc_python_out=$(OUT) proto/memlm/v1/*.proto

bench: $(STAMP)  ## measure speed and memory
	$(BIN)/memlm bench build
	$(BIN)/memlm bench generate
	$(BIN)/memlm bench serve
	$(BIN)/memlm bench model

dist: $(STAMP)  ## build the wheel and the source distribution
	$(BIN)/python -m build

clean:  ## remove what was made, the environment included
	rm -rf build dist $(VENV) *.egg-info
