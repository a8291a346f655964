# Everything runs from .venv, which is created on first use. A second call installs nothing.
# Standard output belongs to the programs (`make demo` ends with one JSON line), so pip writes to standard error.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# `make test TORCH=2.14.1` uses that release of torch instead of the one in constraints.txt, and an environment of its
# own. It runs no linters: torch's types differ between releases.
TORCH ?=
VENV := .venv$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/)constraints.txt
# Python compiles what is imported when it is imported; pip would compile all of torch.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-build-isolation \
  -c $(CONSTRAINTS)

# Half as many test processes again as cores, because many tests wait for a process that they start. More than
# eight would wait for the disk.
PARALLEL := --numprocesses $(shell cores=$$(nproc || echo 2); echo $$((cores + (cores + 1) / 2))) --maxprocesses 8

# Hundreds of test processes import Hubring. Each would compile it again if this were set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-full test-all campaign gpu lint bench docs dist clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo.stamp
	@$(BIN)/ps-compare run slow-worker

# TESTS='tests/contract tests/ps' runs only these.
TESTS ?=
test: $(if $(TORCH),$(VENV)/test.stamp,lint)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not full and not packages" $(TESTS)

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

# A release in dist/: the source distribution, and the wheel that pip would build from it. The wheel must be the one
# that this clone gives. It then trains in an environment of its own, outside of the clone.
dist: $(VENV)/dist.stamp
	@rm -rf dist build/dist
	@$(BIN)/python -m build --no-isolation >&2
	@$(BIN)/python -m build --no-isolation --wheel --outdir build/dist >&2
	@cmp dist/*.whl build/dist/*.whl
	@$(BIN)/twine check --strict dist/* >&2
	@$(BIN)/python -m tests.deploy.release dist/*.whl
	@"$(PYTHON)" -m venv build/dist/venv
	@build/dist/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl >&2
	@PATH="$$PWD/build/dist/venv/bin:$$PATH" && cd "$$(mktemp -d)" && python -c "import hubring; hubring.init" \
	  && ps-server --help >/dev/null && ps-run --help >/dev/null \
	  && ps-run -np 2 -m hubring.workers.examples.char_lm --epochs 1 --batch-size 512
	@ls dist/*

clean:
	@rm -rf .venv .venv-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first, because its version determines the versions of other packages. The other two build Hubring.
$(VENV)/torch.stamp: constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Hubring needs Python 3.11 or later: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Creating $(VENV) and installing the packages; this happens once" >&2
	@"$(PYTHON)" -m venv --clear $(VENV) >&2
	@$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS))
	@$(INSTALL) torch hatchling editables >&2
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	@$(INSTALL) -e '.[demo]' >&2
	@touch $@

$(VENV)/bench.stamp: $(VENV)/demo.stamp
	@$(INSTALL) -e '.[demo,fast,bench]' >&2
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	@$(INSTALL) -e '.[demo,fast,test]' >&2
	@touch $@

$(VENV)/dist.stamp: $(VENV)/demo.stamp
	@$(INSTALL) -e '.[demo,fast,dist]' >&2
	@touch $@

$(VENV)/docs.stamp: $(VENV)/demo.stamp
	@$(INSTALL) -e '.[demo,fast,docs]' >&2
	@touch $@
