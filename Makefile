# Two commands do everything: `make demo` and `make test`. `make test-slow` runs the tests that `make test` leaves out,
# `make test-vllm` runs tests in vLLM, `make attack` tries to break the commands, and `make docs` builds the documentation.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ROUNDS ?= 1
SHARE  ?= 100

.PHONY: demo test test-slow test-vllm attack docs lint clean

demo: $(STAMP)  ## probe -> propose -> train-hybrid -> report on the embedded reference
	$(BIN)/spkv-nas demo

test: $(STAMP) lint  ## lint, types, and the quick CPU tests
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-slow: $(STAMP)  ## the other CPU tests: long trainings, several processes, whole pages; SHARE: percent of them
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto --dist worksteal -m slow --share $(SHARE)

test-vllm: $(STAMP)  ## tests in vLLM, in an environment of its own; skipped where that cannot be installed
	bash .ci/vllm

attack: $(STAMP)  ## kills, full disks, races, damage; ROUNDS: percent of the full numbers
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/attack -m attack --rounds $(ROUNDS)

docs: $(STAMP)  ## docs/_build/html/index.html, which opens from disk; a warning is an error
	HF_HUB_OFFLINE=1 $(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/mypy reports/*.py reports/study/run.py docs/generate_reference.py

# lm-eval alone: what its own command prints tables with refuses the pinned python-dateutil; the rest is in [dev].
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps lm-eval
	@touch $@

clean:
	rm -rf $(VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache
