# What people type. Everything happens in .venv; PYTHON says which interpreter makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPED := build/typed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: client native help demo test test-rest test-all test-shapes check lint types format proto docs constraints bench dist clean

help:  ## say what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/memlm models pull smollm2 || echo "without smollm2 (98 MB), tests marked real_model are skipped"
	@touch $@

demo: $(STAMP)  ## run the main job on a pretrained model and show the result (two to five minutes)
	$(BIN)/memlm demo --out build/demo --overwrite

# Four processes: on two cores, tests of servers wait for half of their time. The tests of one file stay together as long
# as all have work (worksteal), so that what a module's tests share is made once.
PYTEST := PYTHONUTF8=1 $(BIN)/pytest -n 4 --dist worksteal

test: $(STAMP)  ## run the unit and the server tests (about fifteen minutes on two idle cores)
	@echo "This takes about fifteen minutes on two idle cores. The end lists what was skipped, and why."
	$(PYTEST) -m "not (crash or packaging or exhaustive or slow or cluster or benchmarks)"

test-rest: $(STAMP)  ## run the crash and the packaging tests
	$(PYTEST) -m "(crash or packaging) and not (exhaustive or slow or cluster)"

test-all: $(STAMP)  ## run every test, the exhaustive grid, the slow ones and those of benchmarks/ included
	$(PYTEST)

SHAPED := memlm.index,memlm.model,memlm.retrieval,memlm.zoo.shapes
test-shapes: $(STAMP)  ## run the unit tests, and check types and shapes in every call (twice as slow)
	$(PYTEST) -m unit --jaxtyping-packages=$(SHAPED),shapes.typechecked

check: lint types docs test test-rest  ## all that CI checks

lint: $(STAMP)  ## lint and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## types, on the package as it installs and on benchmarks/
	rm -rf $(TYPED) build/lib  # setuptools keeps the modules of earlier builds there
	$(PIP) install --quiet --no-deps --constraint constraints.txt --target $(TYPED) .
	cp -r benchmarks $(TYPED)
	cd $(TYPED) && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p memlm -p benchmarks

format: $(STAMP)  ## rewrite the code as the formatter likes it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

OUT := proto
# The contract imports protos of the package googleapis-common-protos, which has operations.proto by another name.
GOOGLEAPIS = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
proto: $(STAMP)  ## generate the code of proto/ with the oldest toolchain that the bounds allow
	$(BIN)/python -m grpc_tools.protoc -Iproto -I$(GOOGLEAPIS) \
		-Igoogle/longrunning/operations.proto=$(GOOGLEAPIS)/google/longrunning/operations_proto.proto \
		--python_out=$(OUT) --pyi_out=$(OUT) --grpc_python_out=$(OUT) \
		--include_imports --descriptor_set_out=$(OUT)/memlm.binpb proto/memlm/v1/*.proto

native: $(STAMP)  ## build the native kernels, after a change of memlm/model/kernels/csrc
	$(PIP) install --quiet --no-deps --editable .

client: $(STAMP)  ## generate the synchronous client from the asynchronous one
	$(BIN)/python tools/generate_sync.py

docs: $(STAMP)  ## build the documentation site into build/site
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

constraints: $(STAMP)  ## pin what the bounds of pyproject.toml need and is not pinned yet
	$(PIP) install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --no-annotate --output-file constraints.txt

bench: $(STAMP)  ## measure speed and memory
	$(BIN)/memlm bench build
	$(BIN)/memlm bench generate
	$(BIN)/memlm bench serve
	$(BIN)/memlm bench model

dist: $(STAMP)  ## build the wheel and the source distribution
	$(BIN)/python -m build

clean:  ## remove what was made, the environment included
	rm -rf build dist $(VENV) *.egg-info
