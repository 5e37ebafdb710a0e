# Two commands do everything: `make demo` and `make test`. `make test-slow` runs the tests that `make test` leaves out,
# `make test-avx2` runs those of numbers as processors without AVX-512 do, `make test-vllm` tests in vLLM, `make attack`
# tries to break the commands, `make docs` builds the documentation, and `make nightly` runs all of them at length.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ROUNDS ?= 1
SHARE  ?= 100
# Tests of a file, or of a class, stay in one process, which then makes their fixtures once
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto

.PHONY: demo test quick test-avx2 test-slow test-vllm attack nightly docs lint style clean

demo: $(STAMP)  ## probe -> propose -> train-hybrid -> report on the embedded reference
	$(BIN)/spkv-nas demo

test: $(STAMP)  ## lint and types beside the quick CPU tests
	$(MAKE) --jobs 2 lint quick

quick: $(STAMP)
	$(PYTEST) --dist loadfile -m "not slow" --ignore tests/attack --ignore tests/contrib

# AVX2 alone, in all three libraries that multiply matrices, and one thread in every process that a test starts. Sums have
# another order there, which depends on where in memory weights begin: equalities that hold by chance fail. Triton's
# interpreter computes with NumPy.
AVX2 := OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

test-avx2: $(STAMP)  ## quick tests of numbers as on processors without AVX-512
	$(AVX2) $(PYTEST) --dist loadfile -m "not slow" --ignore-glob 'tests/kernels/test_triton*' \
	  $(addprefix tests/,model kernels training probing evaluation)

test-slow: $(STAMP)  ## the other CPU tests: long trainings, several processes, whole pages; SHARE: percent of them
	$(PYTEST) --dist loadscope -m slow --share $(SHARE)

test-vllm: $(STAMP)  ## tests in vLLM, in an environment of its own; skipped where that cannot be installed
	bash .ci/vllm

attack: $(STAMP)  ## kills, full disks, races, damage; ROUNDS: percent of the full numbers
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/attack -m attack --rounds $(ROUNDS)

nightly: test test-avx2 docs test-slow test-vllm  ## everything, with a longer attack: hours
	$(MAKE) attack ROUNDS=10

docs: $(STAMP)  ## docs/_build/html/index.html, which opens from disk; a warning is an error
	HF_HUB_OFFLINE=1 $(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

lint: style
	$(BIN)/mypy

# Only what git tracks: commands write programs, pages and figures into the checkout, under any name
TRACKED := git grep --files-with-matches --null ''

style: $(STAMP)
	$(TRACKED) -- '*.py' '*.pyi' '*.ipynb' | xargs -0 $(BIN)/ruff check
	$(TRACKED) -- '*.py' '*.pyi' '*.ipynb' | xargs -0 $(BIN)/ruff format --check
	$(TRACKED) | xargs -0 $(BIN)/codespell

# lm-eval alone: what its own command prints tables with refuses the pinned python-dateutil; the rest is in [dev].
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps lm-eval
	@touch $@

clean:
	rm -rf $(VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache
