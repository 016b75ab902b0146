# Everything a fresh machine needs: `make run` to see it work, `make test` to trust it.
# Only `make lint` needs something installed (ruff and mypy, for developers).

.DEFAULT_GOAL := help
SECONDS = 60
.PHONY: help run test check lint lint-ruff lint-mypy bench simulate torture fuzz mutants clean

# An interpreter counts only if it runs: version managers leave names on PATH that exist and then refuse.
CANDIDATES := python3.12 python3.13 python3.14 python3.11 python3 python
PROBE := import sys, sqlite3; sys.exit(sys.version_info < (3, 11) or sqlite3.sqlite_version_info < (3, 38))
FOUND = $(shell for p in $(if $(PYTHON),"$(PYTHON)",$(CANDIDATES)); do \
	if "$$p" -c '$(PROBE)' </dev/null >/dev/null 2>&1; then echo "$$p"; break; fi; done)
NONE = $(if $(PYTHON),PYTHON=$(PYTHON) does not run or is older than Python 3.11 with SQLite 3.38: name another \
	one,no Python 3.11+ with SQLite 3.38+ runs here (tried $(CANDIDATES)): install one or name it with \
	make PYTHON=/path/to/python3)
# Looked for once, and only by a target that needs it.
PY = $(eval PY := $(FOUND))$(or $(PY),$(error $(NONE)))

ifdef LINT_PYTHON
RUFF ?= "$(LINT_PYTHON)" -m ruff
MYPY ?= "$(LINT_PYTHON)" -m mypy
else
RUFF ?= ruff
MYPY ?= mypy
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=/path/to/python3 chooses the interpreter, ARGS=... is passed on to what a target runs"

run: ## queue a few dozen varied jobs in a temporary file, work them off, show the table
	@"$(PY)" -m tests.demo $(ARGS)

test: ## run the tests
	"$(PY)" -m unittest discover $(ARGS)

check: ## the whole gate, on all CPUs: every file compiles, no test fails or leaks; needs nothing installed
	@"$(PY)" -c 'import sys; print("checking with Python", sys.version.split()[0], "at", sys.executable)'
	"$(PY)" -W error -c 'import pathlib; [compile(path.read_bytes(), str(path), "exec") \
		for top in ("jobqueue", "tests") for path in sorted(pathlib.Path(top).rglob("*.py"))]'
	"$(PY)" -W error::ResourceWarning -m tests.parallel $(ARGS)

lint: lint-ruff lint-mypy ## ruff and mypy --strict, from PATH or LINT_PYTHON=/path/to/python3 (developer tools)

lint-ruff:
	$(RUFF) check jobqueue tests

lint-mypy:
	$(MYPY) --strict jobqueue

bench: ## measure speed on this machine
	@"$(PY)" -m tests.bench $(ARGS)

simulate: ## SECONDS=60 of seeded histories of many processes, checked after every step against a model
	@"$(PY)" -m tests.simulation --seconds $(SECONDS) $(ARGS)

torture: ## SECONDS=60 of real processes that are killed, stopped and continued under load
	@"$(PY)" -m tests.torture --seconds $(SECONDS) $(ARGS)

fuzz: ## SECONDS=60 of random input through every command and face
	@"$(PY)" -m tests.fuzz --seconds $(SECONDS) $(ARGS)

mutants: ## break the package on purpose, a rule at a time; exit 1 if no test notices
	@"$(PY)" -m tests.mutants $(ARGS)

clean: ## remove what Python, builds and linters left behind
	find jobqueue tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache
