# `make demo` sets up and runs the main job; `make test` sets up and passes the tests.
# Each installs into .venv on its first call only: the stamp files remember what is there.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Processes that share the tests, file by file.
JOBS   ?= 2
# Modules are compiled when they are first imported: of the libraries, most never are.
INSTALL := $(BIN)/python -m pip install -q --no-compile
export PYTHONDONTWRITEBYTECODE =
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test lint types unit coverage browser prometheus docs clean

demo: $(VENV)/.demo-ready
	$(BIN)/react-clip demo

test: lint types unit

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test-ready
	$(BIN)/mypy

unit: $(VENV)/.test-ready browser prometheus
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST)

# The same with what the tests cover; tracing takes longer.
coverage:
	$(MAKE) unit PYTEST="--cov --cov-report=term"

# The pages are tested in a real Chromium. In a Debian container we fetch one; elsewhere those tests use what is
# installed, or skip and say so.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || [ "$$(id -u)" != 0 ] || \
	  ! command -v apt-get >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 || \
	  echo "chromium could not be installed; the tests that need a browser will skip"

# The alerts are tested by a real Prometheus, likewise.
prometheus:
	@command -v prometheus >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus; } >/dev/null 2>&1 || \
	  echo "prometheus could not be installed; the tests that need it will skip"

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
