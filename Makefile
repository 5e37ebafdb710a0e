# Two commands do everything: `make demo` and `make test`; `make attack` tries to break what they made.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ROUNDS ?= 1

.PHONY: demo test attack lint clean

demo: $(STAMP)  ## probe -> propose -> train-hybrid -> report on the embedded reference
	$(BIN)/spkv-nas demo

test: $(STAMP) lint  ## lint, types, and the whole CPU test suite
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto --dist worksteal

attack: $(STAMP)  ## kills, full disks, races, damage; ROUNDS: percent of the full numbers
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/attack -m attack --rounds $(ROUNDS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy reports/*.py reports/study/run.py

# lm-eval alone: what its own command prints tables with refuses the pinned python-dateutil; the rest is in [dev].
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps lm-eval
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
