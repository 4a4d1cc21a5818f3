# Every target sets up what it needs: a Python 3.11+ with venv is all that must be there.
PYTHON ?= python3
# With TORCH=2.11.0, the oldest that is supported, every target runs in an environment that has it.
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.autopar-installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check chromium edge-table pytest nightly turn oldest-torch fuzz plans format bench clean

help:
	@echo "make demo    plan, then train a small GPT-2 on four processes, and compare with one"
	@echo "make test    static checks, then the tests"
	@echo "make check   static checks only: ruff, pyright, import contracts, file sizes, names, words, private torch APIs, prose"
	@echo "make pytest  tests only (PYTEST_ARGS='-k rules' narrows them)"
	@echo "make nightly what takes hours: tests marked nightly, 1000 random models (SLICE=3/24: a part)"
	@echo "make turn    the slice of them whose turn it is after so many commits"
	@echo "make oldest-torch  tests that meet torch, with the oldest that is supported"
	@echo "make fuzz    200 random models on three meshes each (FUZZ_MODELS, FUZZ_FIRST)"
	@echo "make plans   check the project's golden plans (PLANS_ARGS=--update writes those that differ)"
	@echo "make format  let ruff format and fix"
	@echo "make bench   plan-time benchmarks"
	@echo "make clean   remove the virtual environment and what the tools leave behind"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("autopar needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; say: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[hf,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: check pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/check_file_size.py
	$(BIN)/python tools/check_names.py
	$(BIN)/python tools/check_words.py
	$(BIN)/python tools/check_torch_private.py
	$(BIN)/python tools/check_prose.py
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

# The tests of pages and traces look at them in a browser; without one they are skipped.
chromium:
	@tools/get_chromium.sh

# Without a restart: xdist's loadfile may wait for ever on a worker that replaces a dead one.
pytest: $(STAMP) chromium
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0 $(PYTEST_ARGS)

# What is marked has no limit of time. SLICE=3/24 is one of 24 parts (tests/slicing.py), RECORD=1 writes
# what each test took.
nightly: $(STAMP) chromium
	$(BIN)/python -m pytest -m nightly -n $(WORKERS) --dist worksteal --max-worker-restart 0 --timeout 0 \
		$(if $(SLICE),--slice $(SLICE)) $(if $(RECORD),--record-seconds) $(PYTEST_ARGS)

# Consecutive commits take consecutive turns: one slice after the other, then the oldest torch in two.
SLICES ?= 24
OLDEST_TORCH := 2.11.0
turn:
	@commits=$$(git rev-list --count HEAD); turn=$$((1 + commits % ($(SLICES) + 2))); \
	if [ $$turn -gt $(SLICES) ]; then \
		part=$$((turn - $(SLICES)))/2; \
		echo "commit $$commits: the turn of torch $(OLDEST_TORCH), part $$part"; \
		exec $(MAKE) --no-print-directory oldest-torch SLICE=$$part; \
	else \
		echo "commit $$commits: the turn of slice $$turn/$(SLICES) of the nightly tests"; \
		exec $(MAKE) --no-print-directory nightly SLICE=$$turn/$(SLICES); \
	fi

OLDEST_TORCH_TESTS := $(wildcard tests/*/test_torch_private.py) tests/tracer tests/runtime
oldest-torch:
	$(MAKE) --no-print-directory pytest TORCH=$(OLDEST_TORCH) \
		PYTEST_ARGS="$(if $(SLICE),--slice $(SLICE)) $(OLDEST_TORCH_TESTS)"

FUZZ_MODELS ?= 200
FUZZ_FIRST ?= 0

# What fails is made as small as it can be, which may take minutes.
fuzz: $(STAMP)
	FUZZ_MODELS=$(FUZZ_MODELS) FUZZ_FIRST=$(FUZZ_FIRST) $(BIN)/python -m pytest tests/fuzz -v \
		-n $(WORKERS) --dist worksteal --max-worker-restart 0 --timeout 0 $(PYTEST_ARGS)

# Of ops on tensors in shards: some minutes. It is an error if the table changes.
edge-table: $(STAMP)
	$(BIN)/python -m tests.edge.table

plans: $(STAMP)
	$(BIN)/autopar check plans examples/ci_gate/plans $(PLANS_ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv* build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
