# `make demo` sets up and runs the main job; `make test` sets up and passes the tests.
# Each installs into .venv on its first call only: the stamp files remember what is there.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Processes that share the tests, file by file.
JOBS   ?= 2
# Modules are compiled when they are first imported: of the libraries, most never are.
INSTALL := $(BIN)/python -m pip install -q --no-compile
PYTEST  := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
# What these markers name takes minutes; of each, the tests marked `smoke` run in `make test` all the same.
SLOW    := tower or ray or browser or process or docs
export PYTHONDONTWRITEBYTECODE =
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-all test-rest test-others test-lowest lint types unit coverage fetch docs clean

demo: $(VENV)/.demo-ready
	$(BIN)/react-clip demo

# Minutes. `test-rest` is what it leaves out, and `test-all` is both.
test: lint types unit

test-all: test test-rest

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test-ready
	$(BIN)/mypy

unit: $(VENV)/.test-ready
	$(PYTEST) -m "smoke or not ($(SLOW) or others)"

test-rest: $(VENV)/.test-ready fetch
	$(PYTEST) -m "not smoke and not others and ($(SLOW))"

# Tests that install other packages into environments of their own, from the network.
test-others: $(VENV)/.test-ready
	$(PYTEST) -m others

# The tests of `make test` with the lowest version of every dependency that pyproject.toml allows.
test-lowest: $(BIN)/python
	$(INSTALL) uv
	$(BIN)/uv venv -q --clear --seed build/lowest
	$(BIN)/uv pip install -q --python build/lowest/bin/python --resolution lowest-direct -e '.[test]'
	build/lowest/bin/python -m pytest -n $(JOBS) --dist loadfile -m "smoke or not ($(SLOW) or others)"

# The tests of `make test` with what they cover; tracing takes longer.
coverage: $(VENV)/.test-ready
	$(PYTEST) -m "smoke or not ($(SLOW) or others)" --cov --cov-report=term

# Pages are tested in a real Chromium, alerts by a real Prometheus. As root in a Debian container we fetch them; elsewhere
# those tests use what is installed, or skip and say so.
fetch:
	@for program in chromium prometheus; do \
	  command -v $$program >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq $$program; } >/dev/null 2>&1 || \
	  echo "$$program could not be installed; the tests that need it will skip"; \
	done

# The documentation site, in build/docs. A broken link or anchor fails.
docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site is build/docs; look at it with: $(BIN)/mkdocs serve"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A changed pyproject.toml installs again; everything else is picked up by the editable install.
$(VENV)/.demo-ready: pyproject.toml | $(BIN)/python
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.test-ready: pyproject.toml | $(BIN)/python
	$(INSTALL) -e '.[test]'
	touch $@ $(VENV)/.demo-ready $(VENV)/.docs-ready

$(VENV)/.docs-ready: pyproject.toml | $(BIN)/python
	$(INSTALL) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage dist build
