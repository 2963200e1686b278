# Every target first makes its own .venv; `make PYTHON=python3.12 test` picks the interpreter for it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: venv demo test slow slow-qnn lint clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "specedge needs Python 3.11 or newer, found: $$($(PYTHON) --version 2>&1); name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[export,dev]'
	@touch $@

demo: $(READY)
	$(BIN)/spec-export demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow"

slow: $(READY)
	$(BIN)/python -m pytest -m slow

# The part of it that emulates a whole model: half an hour.
slow-qnn: $(READY)
	$(BIN)/python -m pytest -m slow tests/test_smollm2_qnn.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Removes what the other targets left behind, but keeps .venv: it is large and slow to fetch.
clean:
	rm -rf build dist demo bundle *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src devices quant export runtime tests -name __pycache__ -type d -prune -exec rm -rf {} +
