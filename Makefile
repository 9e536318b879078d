# Everything sets itself up: a virtual environment in .venv, made with nothing but python3 and its venv module.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-long check clean

# The main job: make a tiny checkpoint, decode it eagerly and with graph segments, compare bit for bit.
demo: $(READY)
	$(BIN)/ds41rt demo

# Lint, types, tests.
test: check
	$(BIN)/pytest

check: $(READY)
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/mypy

# Everything, the tests that take minutes included (some need a C compiler).
test-long: $(READY)
	$(BIN)/pytest -m "long or not long"

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("ds41rt needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
