# make demo | test | style | quality | clean. Pass PYTHON=python3.12 or PIP_FLAGS='--extra-index-url ...' if you need to.
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin

.PHONY: demo test style quality clean

demo: .venv/installed
	$(BIN)/d2l-bert pretrain --output_dir d2l-bert-demo --overwrite_output_dir

test: .venv/installed
	$(BIN)/python -m pytest

style: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

quality: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

clean:
	rm -rf .venv build d2l-bert-demo

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	touch $@
