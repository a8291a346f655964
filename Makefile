# Everything runs from .venv, which is created on first use. A second call installs nothing.
# Standard output belongs to the programs (`make demo` ends with one JSON line), so pip writes to standard error.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Half as many test processes again as cores, because many tests wait for a process that they start. More than
# eight would wait for the disk.
PARALLEL := --numprocesses $(shell cores=$$(nproc || echo 2); echo $$((cores + (cores + 1) / 2))) --maxprocesses 8

# Hundreds of test processes import Hubring. Each would compile it again if this were set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-full test-all campaign gpu lint bench docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo.stamp
	@$(BIN)/ps-compare run

test: lint
	@$(BIN)/python -m pytest $(PARALLEL) -m "not full and not packages"

# The tests that `make test` skips, except for those that need the packages of .ci/run.
test-full: $(VENV)/test.stamp
	@$(BIN)/python -m pytest $(PARALLEL) -m "full and not packages"

test-all: test
	@$(MAKE) test-full

# Seeded faults in real jobs: tests/campaign/README.md. Exits with an error if a run violates an invariant.
RUNS ?= 100
SEED ?= 1
LANES ?= 1
campaign: $(VENV)/test.stamp
	@$(BIN)/python -m tests.campaign --runs $(RUNS) --seed $(SEED) --lanes $(LANES)

# All tests that need a GPU, in one table. The program exits with 1 if a part fails, and with 69 if torch finds no
# CUDA device. make itself then exits with 2.
gpu: $(VENV)/test.stamp
	@$(BIN)/python -m tests.gpu

lint: $(VENV)/test.stamp
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python -m hubring.protos.generate --check

bench: $(VENV)/bench.stamp
	@$(BIN)/ps-worker bench

# The documentation site, into build/site. A warning, such as a broken link, is an error.
docs: $(VENV)/docs.stamp
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean:
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first, because its version determines the versions of other packages.
$(VENV)/torch.stamp: constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Hubring needs Python 3.11 or later: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Creating $(VENV) and installing the packages; this happens once" >&2
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

$(VENV)/docs.stamp: $(VENV)/demo.stamp
	@$(INSTALL) -e '.[demo,fast,docs]' >&2
	@touch $@
