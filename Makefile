# All set-up happens here: `make demo`, `make check`, `make test` and `make bench` make .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export PIP_NO_WARN_SCRIPT_LOCATION = 1

.PHONY: demo check test search search-proof engines bench lint clean slurm-packages container-packages browser-packages

demo: $(VENV)/.demo
	$(BIN)/phalanx run --nproc 2 examples/digits/train.py

check: lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

test: lint slurm-packages container-packages browser-packages engines
	$(BIN)/python -m pytest -m "not gpu" --durations=15 --durations-min=10

# Random small trainings against a loop by hand, for as long as one likes: make search MINUTES=30
MINUTES ?= 10
search: engines
	$(BIN)/python -W ignore -m tests.search --minutes $(MINUTES)

# Takes one fix after the other back, and fails unless the search finds each fault.
search-proof: engines
	$(BIN)/python -W ignore -m tests.search.proof

# A real Slurm cluster runs inside the tests, where it can: as root on Debian. Elsewhere those tests say that they were skipped.
slurm-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  [ -z "$$(bash tests/slurm/cluster missing --db --mpi)" ] || bash tests/slurm/cluster install --db --mpi; \
	else echo "no real Slurm cluster for the tests: that needs root on Debian"; fi

# DeepSpeed, Ray and Horovod for the tests. Horovod is built from source once a machine; where it can't be, its tests are
# skipped and say so.
engines: $(VENV)/.engines

$(VENV)/.engines: $(VENV)/.dev tools/engines.py
	$(PIP) -e '.[deepspeed,ray]'
	$(BIN)/python tools/engines.py
	@touch $@

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/run.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "phalanx needs Python 3.10 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get -qq update && apt-get -qq install -y python3-venv; \
	  else echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; fi; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo

# The real Apptainer, from Debian's newest release, in a folder of its own.
container-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  command -v apptainer >/dev/null || [ -x /opt/apptainer/usr/bin/apptainer ] || { \
	    apt-get -qq update; apt-get -qq install -y --no-install-recommends patchelf squashfs-tools >/dev/null; \
	    bash tests/containers/apptainer-install || echo "Apptainer could not be installed: tests in containers will be skipped"; }; \
	else echo "no real Apptainer for the tests: its set-up needs root on Debian"; fi

# The browser in which the report's page is tested.
browser-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
	    apt-get -qq update; apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null \
	      || echo "Chromium could not be installed: tests of the report's page will be skipped"; }; \
	else echo "no Chromium for the tests, unless it is there: its set-up needs root on Debian"; fi

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
