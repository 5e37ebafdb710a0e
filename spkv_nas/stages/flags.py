"""Declare every option and argument of the commands: type, help text and bounds.

``options`` says which command takes which flag with which default; ``spkv_nas.cli.options`` builds the command line
from both. A flag name is declared twice only where its values differ: ``--tau`` is a number, or a choice of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from spkv_nas.base.device import DTYPES
from spkv_nas.base.flag import Flag
from spkv_nas.base.limits import (
    MOST_BATCH,
    MOST_BLOCK_SIZE,
    MOST_REPEATS,
    MOST_SIZE,
    MOST_WHOLE,
    MOST_WINDOW,
)
from spkv_nas.probing.flags import BUDGET, SEED, STEPS
from spkv_nas.probing.registry import SIGNALS

MEMORY = "Constraints and memory"
_MOST_DEVICES = 1 << 16
_LEVELS = (*(f"level-{n}" for n in (*range(11), 13)), "llama-3-8b", *(f"micro-{n}" for n in range(5)))
_RECIPE = "Recipe (YAML): model, text, training, gates."
_RECIPE_FILE = Flag(_RECIPE, argument=True)
_MODEL = Flag("Checkpoint: a folder, an id, ID@REVISION, or embedded:NAME.")
_LAYOUT = Flag("Layout file (YAML).", argument=True)
_LAYOUTS = Flag("Layout files (YAML).", argument=True)
_PROBE = Flag(
    "Density table: a name in the workspace, or a file (CSV, TSV).", ("--probe", "-p"), "NAME|FILE", is_probe=True
)
_BUDGETS = Flag(
    "Global KV heads: a number, a share such as 25%, or several: 12,18,24, 6..40, 10%..50%, 6..40:2.",
    ("--budget", "-b"),
    "N|N%|LIST|RANGE",
)
_MAX_TOKENS = Flag(
    "Use at most N tokens, spread over the documents: a block of each before a second of any.", low=1, high=MOST_WHOLE
)
_BLOCK_SIZE = Flag("Tokens per block, with --data.", low=2, high=MOST_BLOCK_SIZE)
_WINDOW = Flag("Visible recent keys of a local head, the query's own included.", low=1, high=MOST_WINDOW)
_CONTEXT = Flag("Tokens per sequence; k is 1,024.", metavar="N|Nk", panel=MEMORY)
_TAUS = Flag(
    "Thresholds: a range, evenly spaced in logit, or a comma-separated list; open gates are always measured.",
    metavar="LOW..HIGH|LIST",
)
_GRANULARITY = Flag(
    "head, or layer for whole layers only.", metavar="head|layer", values=("head", "layer"), panel=MEMORY
)

# Workspace, names and devices
Root = Annotated[Path, Flag("Folder with probes/, layouts/, reports/, runs/.", ("--workspace", "-w"))]
Name = Annotated[str | None, Flag("Name of the result.")]
Device = Annotated[str | None, Flag("cpu or cuda; CUDA if there is one.", values=("cpu", "cuda"))]
AnyDevice = Annotated[
    str | None, Flag("cpu or cuda; CUDA if there is one. auto: a model over all GPUs.", values=("cpu", "cuda", "auto"))
]
Dtype = Annotated[str | None, Flag("Compute in float32, bfloat16 or float16.", values=DTYPES)]

# Models, text and training length
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
Data = Annotated[list[str] | None, Flag("Text to measure on: one or several files or folders.")]
BlockSize = Annotated[int | None, _BLOCK_SIZE]
MaxTokens = Annotated[int, _MAX_TOKENS]
OptionalMaxTokens = Annotated[int | None, _MAX_TOKENS]
RecipeFile = Annotated[Path, _RECIPE_FILE]
OptionalRecipeFile = Annotated[Path | None, _RECIPE_FILE]
RecipeOption = Annotated[Path | None, Flag(_RECIPE)]
Tau = Annotated[float | None, Flag("Threshold in [0, 1]; a higher one keeps fewer keys.")]
Seed = Annotated[int, SEED]
OptionalSeed = Annotated[int | None, SEED]
Seeds = Annotated[int, Flag("Repetitions, each with a seed of its own.", low=1, high=MOST_REPEATS)]
Steps = Annotated[int | None, STEPS]

# Measuring
Signal = Annotated[
    str | None,
    Flag(f"Score of heads. {'; '.join(f'{signal.name}: {signal.help}' for signal in SIGNALS)}.", values=SIGNALS.names),
]
Taus = Annotated[str, _TAUS]
OptionalTaus = Annotated[str | None, _TAUS]
Points = Annotated[
    int | None, Flag("Number of thresholds in the range --taus LOW..HIGH, endpoints included.", high=MOST_REPEATS)
]
OptionalProbe = Annotated[str | None, _PROBE]

Against = Annotated[
    str | None, Flag("Baseline checkpoint to compare with, on the same text or questions.", metavar="CHECKPOINT")
]

# Layouts and budgets
LayoutFiles = Annotated[list[Path], _LAYOUTS]
OptionalLayoutFiles = Annotated[list[Path] | None, _LAYOUTS]
LayoutFile = Annotated[Path, _LAYOUT]
OptionalLayoutFile = Annotated[Path | None, _LAYOUT]
Layouts = Annotated[list[Path] | None, Flag("Layout file (YAML); repeat for several.")]
OptionalBudget = Annotated[str | None, BUDGET]
OptionalBudgets = Annotated[str | None, _BUDGETS]
ChosenTau = Annotated[
    str | None,
    Flag(
        "Another threshold, or match-budget: the one whose mean density is the budget's share of heads.", metavar="TAU"
    ),
]
Window = Annotated[int, _WINDOW]
OptionalWindow = Annotated[int | None, _WINDOW]

# Constraints and memory
Context = Annotated[str, _CONTEXT]
OptionalContext = Annotated[str | None, _CONTEXT]
Batch = Annotated[int, Flag("Sequences held at once.", low=1, high=MOST_BATCH, panel=MEMORY)]
HeadDim = Annotated[int | None, Flag("Channels of a head.", high=MOST_SIZE, panel=MEMORY)]
KvDtype = Annotated[str | None, Flag("Of keys and values: float32, bfloat16, float8, ...", panel=MEMORY)]
MinPerLayer = Annotated[
    int | None, Flag("Least global heads in a layer, those named below aside.", high=MOST_SIZE, panel=MEMORY)
]
MaxPerLayer = Annotated[
    int | None, Flag("Most global heads in a layer, those named below aside.", high=MOST_SIZE, panel=MEMORY)
]
GlobalLayers = Annotated[
    str | None, Flag("Layers with global heads alone, such as 0,20.", metavar="LAYERS", panel=MEMORY)
]
LocalLayers = Annotated[str | None, Flag("Layers with local heads alone, such as 3-5.", metavar="LAYERS", panel=MEMORY)]
Granularity = Annotated[str, _GRANULARITY]
Uniform = Annotated[
    bool, Flag("The same number of global heads in every layer that mixes.", ("--uniform",), panel=MEMORY)
]

# Search

# Cost and reports
Level = Annotated[
    str | None,
    Flag(
        "Level of the ladder: level-0 to level-10, level-13, llama-3-8b, micro-0 to micro-4.", metavar="LEVEL",
        argument=True, values=_LEVELS,
    ),
]  # fmt: skip
Density = Annotated[float | None, Flag("Share of keys that SP-KV keeps beyond the window.")]
CalibrationName = Annotated[str | None, Flag("Take times from this calibration of the workspace.", metavar="NAME")]
Hardware = Annotated[
    str | None, Flag("Take times from the roofline of h200, h100 or a100.", values=("h200", "h100", "a100"))
]

# Training
DryRun = Annotated[
    bool, Flag("Say what would be trained, and its tokens, time and memory; write nothing.", ("--dry-run",))
]
BatchSize = Annotated[int | None, Flag("Sequences per step.", low=1, high=2**20)]

# Layout formats
