# make install | demo | release | test | test-slow | test-all | fuzz | contract | style | quality | types
#      site | links | notebooks | browsers | dist | older | clean
# Settings: PYTHON (the interpreter of .venv), PIP_FLAGS (such as '--extra-index-url ...'), MINUTES (of `make fuzz`);
# of `make release`: MODEL, the folder of each text that the model needs (BOOKS, ...), TASK (of a fine-tuning), and
# FLAGS (such as --record).
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin

MINUTES ?= 20

# Where `make contract` unpacks the source distribution of Transformers.
SUITE := build/transformers

# Two test processes, each with its own fixtures. tests/conftest.py limits each process to one thread.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

NOTEBOOKS := 1-model 2-data 3-pretraining 4-tasks 5-inference

# The texts of releases, in model_cards/texts.toml.
TEXTS := BOOKS BLIMP FINETUNE

.PHONY: install demo release test test-slow test-all fuzz contract style quality types site links notebooks browsers dist older clean

install: .venv/installed

demo: .venv/installed
	$(BIN)/d2l-bert pretrain --output_dir d2l-bert-demo --overwrite_output_dir

# Make a released model again, and compare it with its record.
release: .venv/installed
	$(BIN)/python -m benchmarks.release $(MODEL) \
	    $(foreach text,$(TEXTS),$(if $($(text)),'$(text)=$($(text))')) $(if $(TASK),--task $(TASK)) $(FLAGS)

test: .venv/with-tests
	$(PYTEST)

# The tests that `make test` leaves out: they compile, export, install, or start several processes.
test-slow: .venv/with-tests
	$(PYTEST) -m slow

test-all: .venv/with-tests
	$(PYTEST) -m ""

# Run the property tests on new random examples, again and again until MINUTES minutes are over or a test fails. A failing
# example is printed and kept in .hypothesis; the next run tries it first. When the bug is fixed, add the example to its
# test as an `@example`.
fuzz: .venv/with-tests
	end=$$(($$(date +%s) + 60 * $(MINUTES))); while [ $$(date +%s) -lt $$end ]; do \
	    $(BIN)/python -m pytest -m hypothesis --hypothesis-profile=fuzz --hypothesis-show-statistics -q || exit 1; \
	done

# Run Transformers' common model tests on our model classes. Only its source distribution contains these tests.
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

# Check the type hints of the public names, as a program that uses them sees them.
types: .venv/with-tests
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --upgrade --target build/types .
	MYPYPATH=build/types $(BIN)/python -m mypy --strict --follow-imports silent tests/typed_use.py tests/all_ways.py

# The documentation as a site in build/site. A warning, such as that of a link to nothing, is an error.
site: .venv/with-tests
	$(BIN)/python -m sphinx -W --keep-going -q -c docs . build/site

# Try the addresses outside of the repository that the documentation links to.
links: .venv/with-tests
	$(BIN)/python -m sphinx -b linkcheck -q -c docs . build/links

# Run the notebooks from top to bottom, and keep what they print.
notebooks: .venv/with-tests
	mkdir -p build/notebooks
	for name in $(NOTEBOOKS); do PYTHONWARNINGS=ignore TQDM_DISABLE=1 $(BIN)/python -m jupytext --to ipynb --execute \
	    --run-path build/notebooks docs/notebooks/$$name.md || exit 1; done

# transformers.js, for the tests of pages and of ONNX files; they also want node, Chromium and its driver.
browsers: .venv/with-tests
	npm install --ignore-scripts --no-audit --no-fund --prefix build/js \
	    @huggingface/transformers@$$($(BIN)/python -c 'from d2l_bert.inference.page import TRANSFORMERS_JS as it; print(it)')

# Transformers 4, for the tests of saved tokenizers.
older: .venv/with-tests
	$(BIN)/python -m pip install --quiet --upgrade --target build/transformers-4 'transformers>=4.57.6,<5'

# An sdist and a wheel in dist/, with the version of the tag.
dist: .venv/with-tests
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf .venv build dist d2l-bert-demo

# The environment to run d2l-bert.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable .
	touch $@

# The same environment, with the packages for tests and ruff.
.venv/with-tests: .venv/installed
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	touch $@
