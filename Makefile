# Everything runs from .venv, which is made on first use; a second call installs nothing.
# Standard output is the programs' own (`make demo` ends in one JSON line), so pip talks to standard error.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# As many tests at once as there are cores; more than eight would rather wait for the disk.
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 8

.PHONY: demo test test-full test-all gpu lint bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo.stamp
	@$(BIN)/ps-compare run

test: lint
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not full and not packages"

# What `make test` leaves out, but for what .ci/run installs packages for.
test-full: $(VENV)/test.stamp
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "full and not packages"

test-all: test
	@$(MAKE) test-full

# All that needs a GPU, in one table. Exits with 1 if a part failed, and with 69 where torch finds no CUDA device
# (make itself then exits with 2, as ever).
gpu: $(VENV)/test.stamp
	@$(BIN)/python -m tests.gpu

lint: $(VENV)/test.stamp
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python -m hubring.protos.generate --check

bench: $(VENV)/bench.stamp
	@$(BIN)/ps-worker bench

clean:
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone: its version decides what the rest resolves to.
$(VENV)/torch.stamp: constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Hubring needs Python 3.11 or later: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Making $(VENV) and installing into it; this happens once" >&2
	@"$(PYTHON)" -m venv --clear $(VENV) >&2
	@$(INSTALL) torch >&2
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	@$(INSTALL) -e '.[demo,fast]' >&2
	@touch $@

$(VENV)/bench.stamp: $(VENV)/demo.stamp
	@$(INSTALL) -e '.[demo,fast,bench]' >&2
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	@$(INSTALL) -e '.[demo,fast,test]' >&2
	@touch $@
