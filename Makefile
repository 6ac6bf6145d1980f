# make test | test-all | demo | lint | bench | clean. Needs make and a Python >= 3.11 that has venv; everything else goes to
# .venv.

PYTHON ?= python3

VENV  := .venv
PY    := $(VENV)/bin/python
# Written last: an environment without it was interrupted half way, and is built again. It holds the path of the checkout,
# because a virtual environment that was copied or moved along with its checkout still points to the old one.
STAMP := $(VENV)/complete

.PHONY: test test-all pictures demo lint compiled checked bench clean

# Without bytecode each process of each test would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

# Most tests wait most of the time, so several files run at once on two cores. Files, not tests: one file shares fixtures.
# tests/running.py gives the longest out first, and all of tests/cluster to one worker.
ALL_TOGETHER := -n 6 --dist loadfile
WAITING := tests/unit tests/process tests/fleet $(wildcard tests/test_*.py)
ALL_TESTS := tests/cluster tests/torch $(WAITING)

# tests/cluster needs Debian packages; what cannot be installed is said in one line, and what cannot run in another.
test: checked
	@$(PY) -m tests.cluster install
	$(PY) -m pytest -m "not slow" $(ALL_TOGETHER) $(ALL_TESTS)

# Everything: what `make test` leaves out for its time as well; real processes once more on a machine that lacks what old
# kernels lack; and the releases of torch and Python of tests/matrix.py that can be had here.
test-all: checked
	@$(PY) -m tests.cluster install
	@$(PY) -m tests.recipes
	@$(PY) -m tests.packaged
	$(PY) -m pytest $(ALL_TOGETHER) $(ALL_TESTS)
	$(PY) tests/without.py kernel $(PY) -m pytest $(ALL_TOGETHER) tests/process
	$(PY) -m tests.matrix

# docs/pictures/, made of real runs; needs chromium.
pictures: $(STAMP)
	$(PY) -m tests.pictures

demo: $(STAMP)
	$(VENV)/bin/saferun --nproc_per_node 2 examples/train_ddp.py --epochs 3

lint: $(STAMP)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

# Collecting compiles the tests, with pytest's assertions: once, and not by every worker at the same time. What cannot be
# collected is reported by the run itself.
compiled: $(STAMP)
	@$(PY) -m pytest --collect-only -qq $(ALL_TESTS) >/dev/null 2>&1 || :

# mypy uses one core, and collecting another.
checked: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 lint compiled

# measure.py is what the benchmarks share.
bench: $(STAMP)
	@set -e; for script in $(filter-out benchmarks/measure.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$script"; $(PY) "$$script"; \
	done

clean:
	rm -rf $(VENV) .matrix build dist saferun-runs .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find saferun tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(file < $(STAMP)),$(CURDIR))
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "saferun: Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)" >&2; \
	  echo "hint: name a newer one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@if [ "$$(cat $@ 2>/dev/null)" != '$(CURDIR)' ]; then \
	  echo "building $(VENV) with $$($(PYTHON) --version) (a minute or two)"; \
	  $(PYTHON) -m venv --clear $(VENV); \
	else \
	  echo "pyproject.toml has changed: updating $(VENV)"; \
	fi
	@rm -f $@
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]'
	@# Left to pip, one core would compile it all. A package may have a file that no Python of today compiles.
	@$(PY) -m compileall -qq -j 0 $(VENV)/lib || :
	@$(PY) -m compileall -q saferun
	@printf '%s\n' '$(CURDIR)' > $@
