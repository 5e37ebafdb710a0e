"""Run several commands as one: ``auto``, from a model and a text to an exported hybrid, and ``demo``."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from spkv_nas.artifacts.defaults import RECOMMENDED
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import console, errors, locks, manifest, units
from spkv_nas.base.progress import GRADIENT, SECONDS, START, Reporter, Stages
from spkv_nas.engines.registry import serve_command
from spkv_nas.stages import flags
from spkv_nas.stages.commands import Result, command_line, next_line
from spkv_nas.stages.options import DEFAULT_PROBE, InWorkspace, OnDevice, init
from spkv_nas.stages.options.auto import HELD_OUT_TOKENS, AutoOptions

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.artifacts.measurement import Measurement
    from spkv_nas.stages import decision, verdict
    from spkv_nas.stages.critical_budget import BudgetResult, Memory


# Stages, and those that run no model, in starts of the command: the folder is checked in a process of its own, which
# imports the same libraries
_COSTS = "costs of windows"
_SEARCH = "smallest KV cache that passes"
_FOLDER = "the folder"
_REPORT = "the report"
_RETRAINING = "retraining"
_VERDICT = "verdict on retrained hybrids"
_STARTS = {_FOLDER: 1.0, _REPORT: 0.5}
_LOOKS = 3.0  # about as many budgets are measured, and as many retrained hybrids
# Of a step of retraining on a CPU
_STEP_TOKENS = 2048
_TRAINING_PASSES = 3.0
# Layouts are retrained that lose up to these multiples of the margin by their costs
_RECOVERED = (2.0, 4.0, 8.0)
# A cache that holds less than this many times as many requests is said to hold no more
_MORE_REQUESTS = 1.05
# Of head gates; 25 steps choose the same heads as 100 in all but one of the study's models
DEMO_STEPS = 25
DEMO_LAYOUTS = (RECOMMENDED, "densest", "interleaved-last")
# A fifth of the held-out text; a tenth misses a needed head among 18 (reports/LOG.md)
DEMO_TOKENS = 65_536


@dataclass(frozen=True)
class AutoResult:
    """Hold the lines that say what ``auto`` found, and what it wrote; None if no budget passes."""

    lines: list[str]
    layout: Path | None = None
    folder: Path | None = None
    report: Path | None = None


@dataclass(frozen=True)
class _Hybrid:
    """Hold a hybrid that passes, and what was measured of it."""

    layout: Layout
    file: Path | None  # of the layout; None if the checkpoint has it
    model: str  # checkpoint
    memory: Memory
    measured: list[Measurement]  # by criterion
    compared: decision.Compared


@dataclass(frozen=True)
class _Inputs:
    """Hold the state of the model and the text that ``auto`` began with, as later steps read them again."""

    options: AutoOptions
    model_hash: str
    text: list[tuple[str, int, int]]  # of its files: name, size, and time of the last write

    @classmethod
    def of(cls, options: AutoOptions) -> _Inputs:
        """Read the present state."""
        from spkv_nas.model.checkpoint import checkpoint_hash

        return cls(options, checkpoint_hash(options.model), _text_files(options))

    def check(self) -> None:
        """Raise ``UserError`` if the model or the text is not the one that ``auto`` began with."""
        self.check_model()
        changed = sorted(set(_text_files(self.options)) ^ set(self.text))
        if changed:
            name = changed[0][0]
            raise errors.UserError(
                f"the text {name} was changed while it was measured\nrun the same command again"
            )

    def check_model(self, advice: str = "") -> None:
        """Raise ``UserError`` if the model was replaced; ``advice`` says what else to do."""
        from spkv_nas.model.checkpoint import checkpoint_hash

        if checkpoint_hash(self.options.model) != self.model_hash:
            raise errors.UserError(
                f"model {self.options.model} was replaced while it was measured\n"
                f"{advice}run the same command again"
            )


def _text_files(options: AutoOptions) -> list[tuple[str, int, int]]:
    """Return name, size and time of the last write of each file of the text."""
    from spkv_nas.data import readers

    return [file for source in options.data for file in readers.written(source)]


def auto(options: AutoOptions, reporter: Reporter) -> Iterator[Result]:
    """Measure the costs of windows, find the smallest KV cache that passes, export its layout, and write the report.

    Nothing is computed here: every step is one of another command. Raises ``UserError`` as these do, and if the numbers
    of the probe make no sense.
    """
    from spkv_nas.stages.sized_model import model_name

    # Results of one model share their names: another run on it would replace the layout before this one exports it
    folder = options.folders.run_dir(model_name(options.model))
    with locks.locked(folder, "runs auto on this model in this workspace", reporter.announce):
        yield from _auto(options, reporter)


auto.__doc__ = AutoOptions.__doc__  # the help


def _auto(options: AutoOptions, reporter: Reporter) -> Iterator[Result]:
    """Run the steps of ``auto``; the caller holds the lock of the model's results."""
    from spkv_nas.stages import critical_budget, probe, report
    from spkv_nas.stages.options.report import ReportOptions

    deadline = None if options.minutes is None else time.monotonic() + 60.0 * options.minutes
    retrains = options.retrain is not None
    stages = _stages(options, reporter)
    inputs = _Inputs.of(options)
    # Measure what windows cost
    with stages.begin(_COSTS) as inner:
        table = probe.probe(
            options.probe,
            inner,
            is_step=True,
            compares=options.max_tokens or HELD_OUT_TOKENS,
            tell_unseen=lambda tokens: _expect(options, stages, tokens),
        )
    inputs.check()
    _check(table.record.alarm)
    # Find the smallest KV cache; the answer about retrained hybrids may replace this one
    with stages.begin(_SEARCH) as inner:
        result = critical_budget.run(options.search(table.name), inner, deadline)
    inputs.check()
    yield replace(result, exit_code=0) if retrains else result
    search: BudgetResult = result.value
    _check(search.alarm)
    hybrid = _untrained(options, search)
    # Retrain smaller ones, and take the hybrid with the smaller KV cache, or of equal ones the one not retrained
    if retrains:
        retrained = yield from _retrained(options, table, search, stages, inputs)
        if retrained is not None and (hybrid is None or retrained.memory.used < hybrid.memory.used):
            hybrid = retrained
    if hybrid is None:
        yield Result(AutoResult(_remedies(options, search)), _show, exit_code=result.exit_code)
        return
    # Write the folder and the report
    with stages.begin(_FOLDER) as inner:
        serve = _export(options, hybrid, inner)
    inputs.check_model(f"{options.out} may hold weights of both: remove it, and ")
    with stages.begin(_REPORT) as inner:
        page = report.run(ReportOptions(probe=table.name, workspace=options.workspace), inner).value
    lines = _lines(options, hybrid, page, serve)
    yield Result(AutoResult(lines, hybrid.file, options.out, page), _show)


def _stages(options: AutoOptions, reporter: Reporter) -> Stages:
    """Return the stages. Raises ``UserError``, before anything is measured, if full attention fits in the memory."""
    from spkv_nas.stages.critical_budget import check_memory

    check_memory(options.search(None))
    retraining = [] if options.retrain is None else [_RETRAINING, _VERDICT]
    return Stages(reporter, [_COSTS, _SEARCH, *retraining, *_STARTS])


def _untrained(options: AutoOptions, search: BudgetResult) -> _Hybrid | None:
    """Return the smallest hybrid that passes with the model's own weights; None if none does."""
    from spkv_nas.stages import decision

    if search.layout is None or search.memory is None:
        return None
    size = "num_global" if search.memories is None else "memory"
    rows = search.rows[search.rows[size] == search.passes]
    return _Hybrid(
        layout=search.layout,
        file=search.file,
        model=options.model,
        memory=search.memory,
        measured=decision.measured_by(search.compared, search, rows),
        compared=search.compared,
    )


def _retrained(
    options: AutoOptions, table: HeadScores, search: BudgetResult, stages: Stages, inputs: _Inputs
) -> Generator[Result, None, _Hybrid | None]:
    """Retrain smaller hybrids, yield the verdict on them, and return the first that passes; None if none does."""
    from spkv_nas.stages import verdict

    with stages.begin(_RETRAINING) as inner:
        checkpoints = _retrain(options, table, search, inner)
    if not checkpoints:
        return None
    with stages.begin(_VERDICT) as inner:
        judged = verdict.run(options.verdict(table.name, checkpoints), inner)
    inputs.check()
    yield replace(judged, exit_code=0)
    _check(judged.value.alarm)
    return _passing(options, table, judged.value)


def _expect(options: AutoOptions, stages: Stages, unseen_tokens: int) -> None:
    """Say how much work later stages are going to be, with a text that leaves so many tokens to compare on."""
    from spkv_nas.data.held_out import HELD_OUT_SHARE
    from spkv_nas.evaluation.verdict.trial import USUAL_SHARE
    from spkv_nas.probing.rivals import passes_of_choices
    from spkv_nas.stages.subject import sequence_length

    tokens = min(unseen_tokens, options.max_tokens or HELD_OUT_TOKENS)
    comparing = (1.0 + _LOOKS) * USUAL_SHARE * tokens
    length = sequence_length(options.search(None))
    choosing = length * passes_of_choices(_LOOKS, int(HELD_OUT_SHARE * unseen_tokens / length))
    stages.expect(_SEARCH, "comparing", comparing + choosing)
    if options.retrain is not None:
        stages.expect(_VERDICT, "comparing", comparing)
        retraining = units.parse_length(options.retrain)
        if isinstance(retraining, float):
            stages.expect(_RETRAINING, _RETRAINING, retraining, SECONDS)
        else:
            work = _LOOKS * retraining * _STEP_TOKENS * _TRAINING_PASSES
            stages.expect(_RETRAINING, _RETRAINING, work, GRADIENT)
    for title, starts in _STARTS.items():
        stages.expect(title, "", starts, START)


def _check(alarm: str | None) -> None:
    """Raise ``UserError`` if numbers make no sense."""
    if alarm is not None:
        raise errors.UserError(
            f"{alarm}\nno layout is chosen by such numbers: check the model and the text"
        )


def _passing(
    options: AutoOptions, table: HeadScores, judged: verdict.VerdictResult
) -> _Hybrid | None:
    """Return the first retrained hybrid that passes; None if none does."""
    from spkv_nas.stages import decision
    from spkv_nas.stages.critical_budget import layout_memory

    for candidate in judged.compared.candidates:
        layout = candidate.chosen
        if layout is None or judged.answers[candidate.name] != "passes":
            continue
        rows = judged.rows[judged.rows["candidate"] == candidate.name]
        return _Hybrid(
            layout=layout,
            file=None,
            model=candidate.source,
            memory=layout_memory(options.search(table.name), table, layout),
            measured=decision.measured_by(judged.compared, judged, rows),
            compared=judged.compared,
        )
    return None


def _retrain(
    options: AutoOptions, table: HeadScores, search: BudgetResult, reporter: Reporter
) -> list[str]:
    """Retrain the smallest layouts whose costs are below some multiples of the margin; return checkpoints, ascending.

    Costs of windows choose their sizes, and a comparison on documents of its own their kind, so that the documents of
    the verdict do not. None is retrained if a layout that is not larger passes without. Raises ``UserError``: as
    ``retraining.retrain``.
    """
    from spkv_nas.evaluation.verdict.critical_budget import first_by_costs, named_by_memory
    from spkv_nas.probing.measure import half_of
    from spkv_nas.proposal import earlier
    from spkv_nas.stages.subject import Subject
    from spkv_nas.training import retraining

    # Choose layouts by their costs
    margins = search.compared.trial.margins
    nll = table.record.nll
    middle = len(search.layouts) // 2
    by_costs = {first_by_costs(margins, search.layouts, nll, factor) for factor in _RECOVERED}
    positions = sorted({middle if position is None else position for position in by_costs})
    passes = search.critical.passes
    if passes is not None and passes <= positions[0]:
        reporter.announce("nothing is retrained: no smaller layout is likely to pass")
        return []
    # Write them, so that what selected them is known
    layouts = []
    for position in positions:
        layout = search.layouts[position]  # its name has its size
        if search.rivals is not None:
            layout = named_by_memory(search.rivals.choose(position), search.budgets[position])
        layouts.append(layout)
        file = options.folders.layout_dir(table.name) / f"{layout.strategy}.yaml"
        earlier.write_layout(file, layout, reporter)
    # Retrain them on the half of the documents that selects
    measured = Subject.of(options.probe, options.model, "retrain on").load(reporter)
    checkpoints = retraining.retrain(
        layouts,
        options.model,
        measured.tokenizer,
        half_of(measured.whole),
        units.parse_length(str(options.retrain)),
        options.folders.run_dir(table.name),
        device_name=options.device,
        reporter=reporter,
    )
    return [str(path) for path in checkpoints]


def _export(options: AutoOptions, hybrid: _Hybrid, reporter: Reporter) -> str | None:
    """Write the hybrid, unless the folder holds it from before: the same layout of the same weights, for the engine.

    Return the command by which vLLM serves what was written; None if it does not, or nothing was written. Raises
    ``UserError``: the folder holds another hybrid, or a damaged one.
    """
    from spkv_nas.model.export.export import exported_from
    from spkv_nas.stages import export

    layout = hybrid.layout if hybrid.file is None else Layout.read(hybrid.file)
    written = options.out / "layout.yaml"
    if not written.is_file():
        done = export.export(options.export(hybrid.file, hybrid.model), reporter)
        return serve_command(done.engines, str(options.out))
    manifest.check_manifest(options.out, what="folder")
    is_same = manifest.read_origin(options.out) == exported_from(hybrid.model, options.engine)
    if not is_same or Layout.read(written) != layout:
        raise errors.UserError(
            f"{options.out} holds another hybrid: its layout, weights, engine or margin differ\n"
            "remove it, or give another folder (--out): "
            "the same command then reuses what was measured"
        )
    reporter.announce(f"{options.out} holds this hybrid already")
    return None


def _lines(options: AutoOptions, hybrid: _Hybrid, page: Path, serve: str | None) -> list[str]:
    """Return the lines that a user reads at the end: heads, memory, loss, files, and what was not tried."""
    from spkv_nas.artifacts.measurement import displacement_words, note_words

    layout = hybrid.layout
    name = hybrid.compared.against
    if hybrid.file is None:
        name += ", retrained"
    # The loss by each criterion, whose upper end holds for all budgets together
    losses = [f"{each.criterion} {each.finding}; {each.conclusion}" for each in hybrid.measured]
    files = [f"folder: {options.out}", f"report: {page}"]
    if serve is not None:
        files.insert(1, serve)
    return [
        f"{name}: {layout.num_global} of {layout.num_heads} KV heads global, {layout.legend_words}",
        _about_memory(hybrid.memory),
        "; ".join(losses),
        *displacement_words(hybrid.measured),
        *note_words(hybrid.measured),
        "   ".join(files),
        f"not tried: {'; '.join(_not_tried(options, hybrid))}",
    ]


def _about_memory(memory: Memory) -> str:
    """Return how much smaller the KV cache is, how many more requests fit, and which context was not tested."""
    ratio = memory.full / memory.used
    line = f"KV cache at {memory.context:,} tokens: {ratio:.1f} times smaller"
    if memory.requests is not None and memory.requests < _MORE_REQUESTS:
        line += " (vLLM: no more requests, because it keeps every token of so short a context)"
    elif memory.requests is not None:
        line += f" (vLLM: {memory.requests:.1f} times as many requests)"
    if memory.untested is not None:
        line += f"; at {memory.untested:,} not tested (--context)"
    return line


def _not_tried(options: AutoOptions, hybrid: _Hybrid) -> list[str]:
    """Return what the answer leaves open."""
    not_tried = []
    if options.retrain is None:
        not_tried.append("retraining, which recovers part of the loss (--retrain)")
    else:
        not_tried.append("full attention retrained alike")
    # Windows lose recall from afar, which the NLL of a text hardly shows (reports/llama-30m)
    if not {"needles", "recall"} & set(hybrid.compared.trial.nouns):
        not_tried.append("recall from afar, which nll hardly shows" + _judging(options.margin))
    not_tried.append("other tasks")
    return not_tried


def _judging(margin: str) -> str:
    """Return the option that also judges recall, in brackets; "" if the margin has it, but nothing could judge it."""
    if "recall=" in margin or "needles=" in margin:
        return ""
    return f" (--margin '{margin},needles=5|recall=10')"


def _remedies(options: AutoOptions, search: BudgetResult) -> list[str]:
    """Return the loss at the largest budget that was tried, and what to do if none passes."""
    from spkv_nas.stages import decision

    rows = search.rows[search.rows["kv_bytes"] == search.rows["kv_bytes"].max()]
    measurements = decision.measured_by(search.compared, search, rows)
    losses = []
    for row, measured in zip(rows.itertuples(), measurements, strict=True):
        size = f"{row.num_global} global heads"
        if search.memories is not None:
            size = f"{row.memory:g} % of the KV cache"
        losses.append(f"{size}: {measured.criterion} {measured.finding}; {measured.conclusion}")
    # Suggest retraining, or a recipe for a longer one
    ways = ["more text"] if search.answer == "open" else []
    ways += [
        "a larger --margin",
        "more memory (--memory)",
        "longer retraining" if options.retrain else "--retrain",
    ]
    following: object
    if options.retrain:
        following = init.InitOptions(
            model=options.model, data=options.data, workspace=options.workspace
        )
    else:
        following = replace(options, retrain="30m")
    return [
        *losses,
        f"no layout passes {options.margin}: try {', or '.join(ways)}",
        next_line(command_line(following)),
    ]


def _show(result: AutoResult) -> None:
    """Print the lines."""
    for line in result.lines:
        console.out.print(Text(line), soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class DemoOptions(InWorkspace, OnDevice):
    """Options of the ``demo`` command."""

    command = "demo"

    workspace: flags.Root = Path("demo")


def check(options: DemoOptions) -> None:
    """Check the folder to write to."""
    options.folders.check_writable()


def demo(options: DemoOptions, reporter: Reporter) -> Iterator[Result]:
    """Run the whole workflow on the embedded reference: probe, propose, train-hybrid, report.

    Takes a few minutes on two cores and writes to a separate workspace, the folder demo/.
    """
    from spkv_nas.stages import probe, propose, report, train_hybrid
    from spkv_nas.stages.options.probe import ProbeOptions
    from spkv_nas.stages.options.propose import ProposeOptions
    from spkv_nas.stages.options.report import ReportOptions
    from spkv_nas.stages.options.train_hybrid import TrainHybridOptions

    start = time.perf_counter()
    workspace = options.workspace
    device = options.device
    # Measure the heads twice: by the default signal, without single-head gains, which so few documents estimate badly,
    # and by the recommended one
    default = ProbeOptions(
        max_tokens=DEMO_TOKENS, ablation_tokens=0, workspace=workspace, device=device
    )
    yield probe.run(default, reporter)
    recommended = ProbeOptions(
        signal=RECOMMENDED, steps=DEMO_STEPS, workspace=workspace, device=device
    )
    yield probe.run(recommended, reporter)
    # Propose layouts by the default signal
    yield propose.run(ProposeOptions(probe=DEFAULT_PROBE, workspace=workspace), reporter)
    # Retrain some of them, and write the report
    folder = options.folders.layout_dir(DEFAULT_PROBE)
    layouts = [folder / f"{name}.yaml" for name in DEMO_LAYOUTS]
    retraining = TrainHybridOptions(
        layouts=layouts,
        probe=DEFAULT_PROBE,
        reference=False,
        workspace=workspace,
        device=device,
    )
    yield train_hybrid.run(retraining, reporter)
    yield report.run(ReportOptions(probe=DEFAULT_PROBE, workspace=workspace), reporter)
    reporter.announce(f"{time.perf_counter() - start:.0f} s in total")
