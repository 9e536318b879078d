# Everything sets itself up: a virtual environment in .venv, made with nothing but python3 and its venv module.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PTX_READY := $(VENV)/.ready-ptx
# The interpreter for test-gpu; another one than ours must have the packages already.
GPU_PYTHON ?= $(BIN)/python

.PHONY: demo test test-long test-gpu check ptx ptx-check clean

# The main job: make a tiny checkpoint, decode it eagerly and with graph segments, compare bit for bit.
demo: $(READY)
	$(BIN)/ds41rt demo

# Lint, types, tests.
test: check
	$(BIN)/pytest -n 2

check: $(READY)
	$(BIN)/ruff check src tests tools examples
	$(BIN)/ruff format --check src tests tools examples
	$(BIN)/mypy

# Everything, the tests that take minutes included (some need a C compiler).
test-long: $(READY)
	$(BIN)/pytest -n 2 -m "long or not long" $(ARGS)

# Everything on a real GPU; a machine without one fails here instead of skipping.
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))
	DS41RT_REQUIRE_GPU=1 $(GPU_PYTHON) -m pytest --backend cuda

# Compile the kernels to the PTX that is committed and shipped; no GPU needed.
ptx: $(PTX_READY)
	$(BIN)/python tools/build_ptx.py

# Rebuild and compare byte for byte, compare entries with declarations, assemble for every target.
ptx-check: $(PTX_READY)
	$(BIN)/python tools/build_ptx.py --check

$(PTX_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,ptx]'
	touch $(PTX_READY)

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("ds41rt needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
