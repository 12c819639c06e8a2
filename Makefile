# make demo | test | test-slow | test-all | fuzz | contract | style | quality | clean. Pass PYTHON=python3.12 or PIP_FLAGS='--extra-index-url ...' if you need to.
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin

SUITE := build/transformers

MINUTES ?= 20

# Two test processes, each with one thread and fixtures of its own.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

.PHONY: demo test test-slow test-all fuzz contract style quality clean

demo: .venv/installed
	$(BIN)/d2l-bert pretrain --output_dir d2l-bert-demo --overwrite_output_dir

test: .venv/with-tests
	$(PYTEST)

# What `make test` leaves out: tests that compile, export, install, or start several processes.
test-slow: .venv/with-tests
	$(PYTEST) -m slow

test-all: .venv/with-tests
	$(PYTEST) -m ""

# New examples for every property test, for so many minutes.
fuzz: .venv/with-tests
	$(BIN)/python tests/fuzz.py $(MINUTES)

# Transformers' own common model tests over our classes; they are in its source distribution only.
contract: .venv/with-tests
	rm -rf $(SUITE)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest $(SUITE) \
	    transformers==$$($(BIN)/python -c 'import transformers; print(transformers.__version__)')
	tar xzf $(SUITE)/*.tar.gz -C $(SUITE) --strip-components 1
	TRANSFORMERS_TESTS=$(SUITE)/tests RUN_SLOW=1 $(BIN)/python -m pytest -o addopts= -q tests/test_transformers_suite.py

style: .venv/with-tests
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

quality: .venv/with-tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

clean:
	rm -rf .venv build d2l-bert-demo

# What running needs.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable .
	touch $@

# What tests and linter need, too.
.venv/with-tests: .venv/installed
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	touch $@
