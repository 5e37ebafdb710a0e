"""Declare every option and argument of the commands: type, help text and bounds.

``options`` says which command takes which flag with which default; ``spkv_nas.cli.options`` builds the command line
from both. A flag name is declared twice only where its values differ: ``--tau`` is a number, or a choice of one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from spkv_nas.base import device, errors, flag, limits
from spkv_nas.base.flag import Flag
from spkv_nas.base.registry import Registry
from spkv_nas.data import config
from spkv_nas.engines.registry import layout_engines, planned_engines
from spkv_nas.probing.signals import BUDGET, SEED, SIGNALS, SINKS, STEPS

MEMORY = "Constraints and memory"
WORKSPACE = Flag(
    "Workspace folder; contains probes/, layouts/, reports/, runs/.", ("--workspace", "-w")
)
DEVICE = Flag(
    "cpu, cuda, or auto: shard a model that is measured over all GPUs.",
    ("--device",),
    values=("cpu", "cuda", "auto"),
)
_LEVELS = (
    *(f"level-{number}" for number in (*range(11), 13)),
    "llama-3-8b",
    *(f"micro-{number}" for number in range(5)),
)
_RECIPE = "Recipe file (YAML): model, text, training and gates."
_RECIPE_FILE = Flag(_RECIPE, argument=True)
_MODEL = Flag(
    "Checkpoint: a folder, a GGUF file, a Hugging Face ID, "
    "ID@REVISION, or embedded:NAME (in the package)."
)
_LAYOUT = Flag("Layout file (YAML), or hub:ORG/NAME.", argument=True)
_LAYOUTS = Flag("Layout files (YAML), or hub:ORG/NAME.", argument=True)
_PROBE = Flag(
    "Probe result: a name in the workspace, or a file of head scores (CSV, TSV).",
    ("--probe", "-p"),
    "NAME|FILE",
    is_probe=True,
)
_BUDGETS = Flag(
    "Number of global KV heads, or a share such as 25%; "
    "several as a list (12,18,24) or a range (6..40, 10%..50%; "
    "6..40:2 has step 2).",
    ("--budget", "-b"),
    "N|N%|LIST|RANGE",
)
_MAX_TOKENS = Flag(
    "Use at most N tokens, taking one block from each document in turn.",
    low=1,
    high=limits.MAX_WHOLE,
)
_BLOCK_SIZE = Flag("Tokens per block (sequence) of --data.", low=2, high=limits.MAX_BLOCK_SIZE)
_WINDOW = Flag(
    "Window of a local head: recent keys it sees, including the query's.",
    low=1,
    high=limits.MAX_WINDOW,
)
_CONTEXT = Flag("Sequence length in tokens; 1k is 1,024.", metavar="N|Nk", panel=MEMORY)
_GRANULARITY = Flag(
    "Choose single heads, or only whole layers.",
    metavar="head|layer",
    values=("head", "layer"),
    panel=MEMORY,
)

Options = TypeVar("Options")


def with_options_of(
    registry: Registry[Any], command: str
) -> Callable[[type[Options]], type[Options]]:
    """Return a decorator that declares the options of all entries in a class that becomes the dataclass of a command.

    Their default is None, for the entry's own. A field that the class declares without a flag keeps its position and
    gets the flag. Raises ``UserError``: the class has a field with a flag that has the name of an option.
    """

    def declare(options_class: type[Options]) -> type[Options]:
        for name, option in registry.shared_options().items():
            entries = list(option.defaults)
            hints = get_type_hints(options_class, include_extras=True)
            if get_origin(hints.get(name)) is Annotated:
                raise errors.UserError(
                    f"{registry.noun} {entries[0]} has an option '{name}', "
                    f"which is one of {command} itself\n"
                    "rename the option, or uninstall its package"
                )
            options_class.__annotations__[name] = Annotated[option.type | None, option.flag]
            default = flag.default(None, option.default_text, note=takers_note(entries))
            setattr(options_class, name, default)
        return options_class

    return declare


def takers_note(names: list[str]) -> str:
    """Return the sentence that names the entries to which an option applies."""
    *most, last = names
    if not most:
        return f"Applies to {last}."
    return f"Applies to {', '.join(most)} and {last}."


# Workspace, names and devices
Root = Annotated[Path, WORKSPACE]
Name = Annotated[str | None, Flag("Name of the results.")]
Device = Annotated[str | None, DEVICE]
Dtype = Annotated[
    str | None, Flag("Compute precision: float32, bfloat16 or float16.", values=device.DTYPES)
]

# Models, text and training length
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
Data = Annotated[
    list[str] | None,
    Flag(
        "Text to measure on: "
        "one or more files or folders (FILE:column=NAME names a column), stdlib, or installed."
    ),
]
BlockSize = Annotated[int | None, _BLOCK_SIZE]
TextContext = Annotated[
    str | None,
    Flag(
        "Tokens per sequence of --data: "
        "the length at which losses are measured and memory is counted; windows go up "
        "to half of it. 1k is 1,024.",
        ("--context", "--block-size"),  # the second is the name that older scripts have
        metavar="N|Nk",
    ),
]
Separator = Annotated[
    str | None,
    Flag(
        "What stands between documents: none, eos, bos, eos+bos, another token, or auto.",
        metavar="TOKEN",
    ),
]
Documents = Annotated[
    str | None,
    Flag(
        "separate: each document alone, from its beginning, "
        "as it reaches a model; joined: packed into blocks, where "
        "tokens also see the documents before.",
        values=(config.JOINED, config.SEPARATE),
    ),
]
MaxTokens = Annotated[int, _MAX_TOKENS]
OptionalMaxTokens = Annotated[int | None, _MAX_TOKENS]
RecipeFile = Annotated[Path, _RECIPE_FILE]
OptionalRecipeFile = Annotated[Path | None, _RECIPE_FILE]
RecipeOption = Annotated[Path | None, Flag(_RECIPE)]
Tau = Annotated[float | None, Flag("Gate threshold in [0, 1]; a higher one keeps fewer keys.")]
Temperature = Annotated[
    float, Flag("Sampling temperature; 0 is greedy decoding.", low=0.0, high=1e6)
]
Seed = Annotated[int, SEED]
Seeds = Annotated[
    int, Flag("Number of repetitions, each with a different seed.", low=1, high=limits.MAX_REPEATS)
]
Steps = Annotated[int | None, STEPS]

# Measuring
Signal = Annotated[
    str | None,
    Flag(
        "Head score to measure. "
        f"{'; '.join(f'{signal.name}: {signal.help}' for signal in SIGNALS)}.",
        values=SIGNALS.names,
    ),
]
OptionalTaus = Annotated[
    str | None,
    Flag(
        "Thresholds: a range, evenly spaced in logit, or a comma-separated list.",
        metavar="LOW..HIGH|LIST",
    ),
]
OptionalProbe = Annotated[str | None, _PROBE]

Against = Annotated[
    str | None,
    Flag(
        "Baseline checkpoint to compare with, on the same text or questions.", metavar="CHECKPOINT"
    ),
]

# Layouts and budgets
LayoutFiles = Annotated[list[Path], _LAYOUTS]
OptionalLayoutFiles = Annotated[list[Path] | None, _LAYOUTS]
LayoutFile = Annotated[Path, _LAYOUT]
OptionalLayoutFile = Annotated[Path | None, _LAYOUT]
Layouts = Annotated[
    list[Path] | None, Flag("Layout file (YAML), or hub:ORG/NAME; repeat for several.")
]
OptionalBudget = Annotated[str | None, BUDGET]
OptionalBudgets = Annotated[str | None, _BUDGETS]
ChosenTau = Annotated[
    str | None,
    Flag(
        "Use another threshold; match-budget: "
        "the one whose mean density equals the budget's share of heads.",
        metavar="TAU",
    ),
]
Window = Annotated[int, _WINDOW]
OptionalWindow = Annotated[int | None, _WINDOW]
SinksOrAuto = Annotated[str | None, SINKS]
OptionalSinks = Annotated[
    int | None,
    Flag(
        "First tokens of a sequence that a local head sees besides its window (sink tokens).",
        low=0,
        high=limits.MAX_WINDOW,
    ),
]

# Inference engines
EnginePython = Annotated[
    Path | None, Flag("Python of the environment in which the engine is installed.", ("--python",))
]

# Constraints and memory
Context = Annotated[str, _CONTEXT]
OptionalContext = Annotated[str | None, _CONTEXT]
Batch = Annotated[
    int, Flag("Sequences in the KV cache.", low=1, high=limits.MAX_BATCH, panel=MEMORY)
]
Requests = Annotated[
    int,
    Flag(
        "Requests in the cache at once.",
        ("--requests", "--batch"),
        low=1,
        high=limits.MAX_BATCH,
        panel=MEMORY,
    ),
]
CacheMemory = Annotated[
    str | None,
    Flag(
        "Memory of the cache, such as 24GiB: how many requests fit.",
        ("--memory", "--kv-bytes"),
        metavar="SIZE",
        panel=MEMORY,
    ),
]
Memory = Annotated[
    str | None,
    Flag(
        "Limit on keys and values: "
        "a share of full attention's cache such as 20%, or bytes such as 2GiB.",
        ("--memory", "--kv-bytes"),
        metavar="N%|SIZE",
        panel=MEMORY,
    ),
]
EngineName = Annotated[
    str | None,
    Flag(
        "Count memory as the allocator of this serving engine does. Settings follow colons, as in "
        "vllm:page-size=32:in-flight-tokens=64:kv-dtype=float8: "
        "tokens per page, tokens scheduled at one time (vLLM's "
        "max_num_batched_tokens, twice that with asynchronous scheduling), "
        "and the data type of keys and values.",
        metavar="NAME[:SETTING=VALUE...]",
        values=lambda: tuple(layout_engines()),
        panel=MEMORY,
    ),
]
ServingEngine = Annotated[
    str | None,
    Flag(
        "Plan the cache as this inference engine allocates it, without loading anything. "
        "Settings follow colons, as in vllm:page-size=32:kv-dtype=float8:tensor-parallel=2; "
        "the output names those that an engine has.",
        metavar="NAME[:SETTING=VALUE...]",
        values=lambda: tuple(planned_engines()),
        panel=MEMORY,
    ),
]
Subject = Annotated[
    str,
    Flag(
        "Recipe (YAML), or model: a folder, a config.json, a GGUF file, a Hugging Face ID, "
        "ID@REVISION, or embedded:NAME.",
        argument=True,
    ),
]
Constraint = Annotated[
    list[str] | None,
    Flag(
        "Constraint; repeat for several. On global heads: "
        "min-per-layer=N, max-per-layer=N: in layers that are not "
        "fixed; global-layers=0,20, local-layers=3-5: "
        "layers that are fixed; uniform: as many in every layer that has "
        "both kinds. On a window per head: max-windows=N (default 3), windows=128,512.",
        metavar="NAME[=VALUE]",
        panel=MEMORY,
    ),
]
Granularity = Annotated[str, _GRANULARITY]
# Cost and reports
Level = Annotated[
    str | None,
    Flag(
        "Level of the paper's model ladder: "
        "level-0 to level-10, level-13, llama-3-8b, micro-0 to micro-4.",
        metavar="LEVEL",
        argument=True,
        values=_LEVELS,
    ),
]
Density = Annotated[float | None, Flag("Share of keys beyond the window that SP-KV keeps.")]
CalibrationName = Annotated[
    str | None, Flag("Use the times of this calibration in the workspace.", metavar="NAME")
]
Hardware = Annotated[
    str | None, Flag("GPU to plan for: h200, h100 or a100.", values=("h200", "h100", "a100"))
]

# Training
DryRun = Annotated[
    bool,
    Flag(
        "Only print the planned runs with their tokens, time and memory; write nothing.",
        ("--dry-run",),
    ),
]
