"""List the commands of every piece, with the time that each may take.

A step is one command. Its limit is what it may take at most, and ``needed`` what must be left of a call for it to
start: about what it is expected to take on an H100 or H200, which nobody has timed yet. Commands of ``spkv-nas`` that
are stopped go on where they stopped when they run again; the others begin anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from figures import (
    Reader,
    benchmark,
    hybrids,
    json_lines,
    nothing,
    tests,
    timed,
    training_speed,
    verdicts,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PIECES = (
    "training-speed",
    "kernels-speed",
    "auto-smollm2",
    "kernels-tests",
    "study",
    "gates",
    "eight-b",
)
BUDGETS = ("50%", "25%", "12.5%")  # of the KV cache
REHEARSED = 15  # seconds that must be left for a step with tiny shapes
REHEARSED_NEEDLE = 500  # tokens of a question: more than a tokenizer of few words needs
TASKS = "niah_single_1,niah_multikey_1"
TOKENS_PER_STEP = 131_072


@dataclass(frozen=True)
class Settings:
    """Say what a run measures, and on what.

    Attributes:
        smollm2: folder of SmolLM2-135M-Instruct, or of another model in its place.
        small: folder of a Llama of 30 M parameters.
        text: folder with a JSON Lines file for each domain.
        out: folder of all results; commands of ``spkv-nas`` use ``out/work`` as their workspace.
        steps: training steps of retraining and of the reference model.
        context: tokens of a block of the study.
        rehearses: run everything on a CPU, with tiny shapes.
    """

    smollm2: Path
    small: Path
    text: Path
    out: Path
    steps: int = 200
    context: int = 8192
    rehearses: bool = False

    @property
    def device(self) -> str:
        """Return the device of all commands."""
        return "cpu" if self.rehearses else "cuda"

    @property
    def work(self) -> Path:
        """Return the workspace of the commands of ``spkv-nas``."""
        return self.out / "work"

    @property
    def layouts(self) -> list[str]:
        """Return the layout files of the study: the recommended one of each budget, and one layer in four."""
        recommended = [
            self.work / "layouts" / cache_name(budget) / "recommended.yaml" for budget in BUDGETS
        ]
        whole_layers = self.work / "layouts" / "one-in-four.yaml"
        return [str(file) for file in (*recommended, whole_layers)]

    @property
    def layout_files(self) -> list[Path]:
        """Return the layout files as paths."""
        return [Path(file) for file in self.layouts]

    @property
    def recipe(self) -> Path:
        """Return the recipe of full retraining."""
        return self.work / "recipe.yaml"

    @property
    def retrained(self) -> Path:
        """Return the table of retrained checkpoints."""
        return self.work / "reports" / cache_name("25%") / "checkpoints.csv"

    @property
    def evaluated(self) -> str:
        """Return the file of the documents that nothing was chosen or trained on."""
        return str(self.work / "text" / "evaluate.jsonl")


@dataclass(frozen=True)
class Step:
    """Hold a command, its limit, and how its figures are read.

    Attributes:
        piece: one of ``PIECES``.
        name: what it does; unique.
        command: arguments, the program first.
        limit: seconds after which it is stopped.
        needed: seconds that must be left for it to start.
        read: function from its output and its seconds to figures.
        accepts: exit codes of success; ``auto`` and ``verdict`` exit with 1 and 3 after their answers.
        folders: what must not exist when it starts, and is removed.
        requires: files that earlier steps write; without them it does not run.
        keeps: tables that it writes in the workspace, to be copied to ``tables/``.
    """

    piece: str
    name: str
    command: list[str]
    limit: int
    needed: int
    read: Reader = nothing
    accepts: tuple[int, ...] = (0,)
    folders: list[Path] = field(default_factory=list)
    requires: list[Path] = field(default_factory=list)
    keeps: list[Path] = field(default_factory=list)


def cache_name(budget: str) -> str:
    """Return the name of the probe for a share of the KV cache."""
    return f"cache-{budget.rstrip('%')}"


def script(*parts: str) -> list[str]:
    """Return the command of a script of the repository."""
    return [sys.executable, str(ROOT / parts[0]), *parts[1:]]


def spkv_nas(settings: Settings, *arguments: str, computes: bool = True) -> list[str]:
    """Return a command of ``spkv-nas`` in the workspace; ``computes`` tells that it takes ``--device``."""
    device = ["--device", settings.device] if computes else []
    return [
        sys.executable,
        "-m",
        "spkv_nas",
        *arguments,
        "--workspace",
        str(settings.work),
        *device,
    ]


def steps(settings: Settings) -> Iterator[Step]:
    """Yield all steps, the most wanted first."""
    groups = (
        training_steps,
        kernel_steps,
        command_steps,
        test_steps,
        study_steps,
        gate_steps,
        eight_b_steps,
    )
    for step in (step for group in groups for step in group(settings)):
        yield replace(step, needed=REHEARSED) if settings.rehearses else step


def training_steps(settings: Settings) -> Iterator[Step]:
    """Yield whole training steps of three shapes, against a plain compiled loop."""
    # Each case is compiled, which took up to 40 s on an H100: few cases in a command, so that none is stopped
    bars = ["--cases", "plain loop", "full attention", "full attention, teacher"]
    layouts = ["--cases", "full attention", "layout, a quarter global", "SP-KV, hard gates"]
    retraining = [
        "--cases",
        "plain loop",
        "full attention",
        "layout, a quarter global, teacher",
        "SP-KV, soft gates",
    ]
    small = ["--layers", "12", "--width", "512", "--vocabulary", "8192"]
    smollm2 = [
        "--layers",
        "30",
        "--width",
        "576",
        "--kv-heads",
        "3",
        "--ffn",
        "1536",
        "--vocabulary",
        "49152",
    ]
    eight_b = [
        "--layers",
        "2",
        "--width",
        "4096",
        "--head-size",
        "128",
        "--kv-heads",
        "8",
        "--ffn",
        "14336",
    ]
    shapes = {
        "30m-2048": [*small, "--block-size", "2048", "--batch-size", "16", *bars],
        "30m-8192": [*small, "--block-size", "8192", "--batch-size", "4", *layouts],
        "30m-32768": [*small, "--block-size", "32768", "--batch-size", "1", *layouts],
        "smollm2-8192": [*smollm2, "--block-size", "8192", "--batch-size", "2", *retraining],
        "8b-layers-8192": [*eight_b, "--vocabulary", "32768", "--block-size", "8192", *bars],
    }
    for name, shape in shapes.items():
        options = [*shape, "--device", "cuda", "--compile", "--rounds", "5"]
        if settings.rehearses:
            cases = shape[shape.index("--cases") :]
            options = [
                "--layers",
                "2",
                "--width",
                "128",
                "--block-size",
                "128",
                "--rounds",
                "1",
                *cases,
            ]
        command = script("reports/training_speed.py", *options)
        yield Step("training-speed", name, command, limit=300, needed=90, read=training_speed)


def kernel_steps(settings: Settings) -> Iterator[Step]:
    """Yield the kernels' ratios to cuDNN, and the time per token of windows alone."""
    heads = "fwd+bwd, Hq=32 Hkv=8 T="
    groups = {
        "windows": ["windows"],
        "gates-8192": [f"{kind} {heads}8192" for kind in ("soft", "hard")],
        "gates-32768": [f"{kind} {heads}32768" for kind in ("soft", "hard")],
    }
    for name, cases in groups.items():
        options = ["--device", "cuda", "--rounds", "7", "--only", *cases]
        if settings.rehearses:
            options = [
                "--rounds",
                "1",
                "--only",
                "window fwd+bwd, T=512",
                "soft fwd+bwd, T=512",
            ]
        command = script("kernels/benchmarks/attention.py", *options)
        yield Step("kernels-speed", name, command, limit=150, needed=40, read=benchmark)


def command_steps(settings: Settings) -> Iterator[Step]:
    """Yield two commands whose whole processes are timed: head gates of the small model, and ``auto``."""
    small = ["--model", str(settings.small), "--data", str(settings.text), "--name", "small"]
    gates = ["--signal", "head-gates", "--budget", "25%"]
    auto = [str(settings.smollm2), str(settings.text), "--context", str(settings.context)]
    if settings.rehearses:
        gates += ["--context", "128", "--steps", "2", "--max-tokens", "4096"]
        auto += ["--max-tokens", "4096", "--margin", "nll=20%", "--memory", "60%"]
    command = spkv_nas(settings, "probe", *small, *gates)
    yield Step("auto-smollm2", "head-gates-30m", command, limit=120, needed=30, read=timed)
    folder = settings.out / "hybrid"
    command = spkv_nas(settings, "auto", *auto, "--out", str(folder))
    yield Step(
        "auto-smollm2", "auto", command, 420, 120, timed, accepts=(0, 1, 3), folders=[folder]
    )


def test_steps(settings: Settings) -> Iterator[Step]:
    """Yield the kernels' tests, compiled on a GPU, and the check of process groups and shards."""
    options = [str(ROOT / "tests" / "kernels"), "-n", "12"]
    if settings.rehearses:
        options = [
            str(ROOT / "tests" / "kernels" / "test_triton.py"),
            "-m",
            "not slow",
            "-k",
            "oracle or windows",
        ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
        *options,
    ]
    yield Step("kernels-tests", "tests", command, limit=420, needed=150, read=tests)
    command = script("reports/gpu/process_group.py", "--device", settings.device)
    yield Step("kernels-tests", "process-group", command, limit=120, needed=30, read=json_lines)


def study_steps(settings: Settings) -> Iterator[Step]:
    """Yield the study of SmolLM2 at its context: layouts, needles and recall, retraining, adapters."""
    context, recipe = str(settings.context), str(settings.recipe)
    blocks = 8 if settings.rehearses else 200
    batch = 2 if settings.rehearses else max(1, TOKENS_PER_STEP // settings.context)
    prepare = [
        str(settings.smollm2),
        str(settings.text),
        str(settings.work),
        "--block-size",
        context,
    ]
    prepare += [
        "--heldout-blocks",
        str(blocks),
        "--steps",
        str(settings.steps),
        "--batch-size",
        str(batch),
    ]
    yield Step("study", "prepare", script("reports/gpu/prepare.py", *prepare), limit=60, needed=10)
    # Costs of windows, and the layouts that lose least of several kinds, by budget
    for budget in BUDGETS:
        name = cache_name(budget)
        more = ["--max-tokens", str(32 * settings.context)] if settings.rehearses else []
        memory = (
            {"50%": "70%", "25%": "60%", "12.5%": "55%"}[budget] if settings.rehearses else budget
        )
        probe = ["probe", recipe, "--signal", "window-costs", "--memory", memory, "--name", name]
        command = spkv_nas(settings, *probe, *more)
        tables = [settings.work / "probes" / name / file for file in ("windows.csv", "probe.yaml")]
        yield Step(
            "study",
            f"probe-{name}",
            command,
            180,
            40,
            timed,
            requires=[settings.recipe],
            keeps=tables,
        )
        propose = ["propose", "--probe", name, "--memory", memory, "--num-random", "0"]
        command = spkv_nas(settings, *propose, computes=False)
        probe_folder = settings.work / "probes" / name
        layout = settings.work / "layouts" / name / "recommended.yaml"
        yield Step(
            "study", f"propose-{name}", command, 60, 10, requires=[probe_folder], keeps=[layout]
        )
    recommended = settings.layout_files[:-1]
    yield Step(
        "study", "one-in-four", one_in_four(settings), limit=60, needed=10, requires=recommended
    )
    # Before retraining, retraining, and after
    against = [
        "--against",
        str(settings.smollm2),
        "--data",
        settings.evaluated,
        "--context",
        context,
    ]
    yield from judged(settings, "before", [*settings.layouts, *against])
    train = ["--probe", cache_name("25%"), "--recipe", recipe, "--no-reference", "--json"]
    command = spkv_nas(settings, "train-hybrid", *settings.layouts, *train)
    yield Step("study", "retrain", command, 570, 120, hybrids, requires=settings.layout_files)
    yield from judged(settings, "after", ["@retrained", *against])
    train = [
        "--probe",
        cache_name("12.5%"),
        "--recipe",
        str(settings.work / "lora.yaml"),
        "--no-reference",
        "--json",
    ]
    command = spkv_nas(settings, "train-hybrid", settings.layouts[1], *train)
    yield Step("study", "lora", command, 400, 60, hybrids, requires=settings.layout_files)


def one_in_four(settings: Settings) -> list[str]:
    """Return the command that writes a layout of whole layers, one in four global."""
    recommended, out = settings.layouts[1], settings.layouts[-1]
    return script(
        "reports/gpu/whole_layers.py", recommended, out, "--window", str(settings.context // 16)
    )


def judged(settings: Settings, when: str, candidates: list[str]) -> Iterator[Step]:
    """Yield verdicts on NLL and recall, and on needles, of layouts or retrained checkpoints against the dense model."""
    # Of a needle's question: the answer and the template need the rest
    length = settings.context - 192
    questions, tokens = 128, 128 * settings.context
    if settings.rehearses:
        length, questions, tokens = REHEARSED_NEEDLE, 4, 8 * settings.context
    margins = {
        "recall": "nll=1%,recall=2",
        "needles": f"ruler=2:lengths={length}:tasks={TASKS}:questions={questions}",
    }
    for name, margin in margins.items():
        options = [
            "--max-tokens",
            str(tokens),
            "--margin",
            margin,
            "--name",
            f"{when}-{name}",
            "--json",
        ]
        command = spkv_nas(settings, "verdict", *candidates, *options)
        requires = settings.layout_files if when == "before" else [settings.retrained]
        yield Step(
            "study",
            f"{when}-{name}",
            command,
            150,
            40,
            verdicts,
            accepts=(0, 1, 3),
            requires=requires,
        )


def gate_steps(settings: Settings) -> Iterator[Step]:
    """Yield the reference model of the paper's kind, its densities, and coverage against retrained losses."""
    recipe = str(settings.recipe)
    yield Step(
        "gates",
        "reference",
        spkv_nas(settings, "train", recipe),
        400,
        90,
        timed,
        requires=[settings.recipe],
    )
    densities = spkv_nas(settings, "probe", recipe, "--signal", "density", "--name", "reference")
    tables = [
        settings.work / "probes" / "reference" / file for file in ("density.csv", "probe.yaml")
    ]
    yield Step(
        "gates", "densities", densities, 150, 30, timed, requires=[settings.recipe], keeps=tables
    )
    options = ["--probe", "reference", "--recipe", recipe, "--json"]
    command = spkv_nas(settings, "train-hybrid", *settings.layouts, *options)
    requires = [settings.work / "probes" / "reference", settings.retrained]
    yield Step("gates", "coverage", command, 300, 30, hybrids, requires=requires)


def eight_b_steps(settings: Settings) -> Iterator[Step]:
    """Yield the passes of ``auto`` on a random model of 8 B parameters: memory and time against their estimates."""
    for length in (8192, 32768):
        options = ["llama-3-8b", "--block-size", str(length)]
        if settings.rehearses:
            options = ["micro-0", "--block-size", "256", "--vocabulary", "512", "--device", "cpu"]
        command = script("reports/large_models.py", *options, "--stage", "score", "window-costs")
        yield Step(
            "eight-b", f"auto-passes-{length}", command, limit=200, needed=60, read=json_lines
        )
