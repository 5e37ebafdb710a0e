"""Evaluate a checkpoint on RULER, beside a second one and beside itself with local heads, to ``reports/<name>/``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.markup import escape
from rich.table import Table

from spkv_nas.artifacts.result_tables import RULER
from spkv_nas.base.console import out, print_path
from spkv_nas.base.distributed import on_main
from spkv_nas.base.progress import SILENT, Bar, Progress, Reporter
from spkv_nas.base.units import parse_context
from spkv_nas.base.version import environment
from spkv_nas.contrib.defaults import RULER_SAMPLES
from spkv_nas.contrib.evaluate.ruler.answers import Answers, Cell, answer, ruler_table, sample_if_it_fits
from spkv_nas.contrib.evaluate.ruler.options import RulerOptions
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample import VERSION, Sample
from spkv_nas.data.ruler.tasks import available, check_task
from spkv_nas.evaluation.micro_batch import check_positions
from spkv_nas.evaluation.samples import read_samples, sample_file, write_samples
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.checkpoints import Loaded, check_pair, hard, identity, load
from spkv_nas.stages.checkpoints import origin as origin_of
from spkv_nas.stages.checks import check
from spkv_nas.stages.printing import change, percent, say_sample_count, with_error
from spkv_nas.stages.result import Result
from spkv_nas.stages.sized_model import result_name


@dataclass(frozen=True)
class RulerResult:
    """Result of RULER: its name, the table of ``evaluation.ruler``, the table's folder, and the answers' folder."""

    name: str
    rows: pd.DataFrame
    folder: Path
    samples: Path


def ruler(options: RulerOptions, reporter: Reporter = SILENT) -> RulerResult:
    """Score a checkpoint on RULER at several lengths: ``reports/<name>/ruler.csv``, with answers in ``runs/``.

    A sample that does not fit in its length is skipped, if the task's first one does fit.

    Raises:
        UserError: a length is too short for a task, or something cannot be loaded.
    """
    from spkv_nas.model.windows import default_window, every_head_local, local_sinks

    quiet_transformers(reporter)
    check(options)
    # Choose lengths, tasks and material
    lengths = sorted({parse_context(text) for text in options.lengths.split(",")})
    material = Material.read(options.haystack or [], options.qa or [])
    tasks = _tasks(options.tasks, material)
    name = options.name or result_name(options.model, options.folders)
    folder = options.folders.report_dir(name)
    # Load the checkpoint, and check that each task's first sample fits
    check_pair(options.model, options.against)
    loaded = model, tokenizer = _load(options, options.model, lengths, reporter)
    sheets = [(task, length) for length in lengths for task in tasks]
    seed, number = options.seed, options.samples or RULER_SAMPLES
    make = partial(sample_if_it_fits, seed=seed, tokenizer=tokenizer, material=material)
    for sheet in sheets:  # raises if it does not fit, before hours of work
        make(*sheet, 0)
    window, sinks = options.window or default_window(model, lengths[0]), local_sinks(model)  # for the shortest prompts
    origin_record = origin_of(options.model, model, options.tau)
    origin = {
        **origin_record,
        "lengths": lengths,
        "tasks": tasks,
        "samples": number,
        "samples_version": VERSION,
        "seed": seed,
        "haystack": options.haystack or "RULER's noise",
        "questions": options.qa or [],
        "floor_window": window,
        **({"floor_sinks": sinks} if sinks else {}),
        "environment": {**environment(), "wonderwords": version("wonderwords")},
    }
    # Answer: the checkpoint, itself with all heads local, the baseline
    samples = options.folders.run_dir(name) / "ruler"
    samples_identity = f"{seed} {number} {VERSION} {version('wonderwords')} {material.identity}"
    with reporter.bar("answering") as bar:
        exam = _Exam(sheets, make, number, 2 if options.against is None else 3, bar, samples, samples_identity)
        with hard(model, options.tau):
            checkpoint_answers = exam.take(0, loaded, identity(options.model, loaded, str(origin_record["tau"])))
        with every_head_local(model, window, sinks):
            local = f"local {window} {sinks}".removesuffix(" 0")
            floor_answers = exam.take(1, loaded, identity(options.model, loaded, local))
        baseline_answers, origin["against"] = _against(options, exam, lengths, reporter)
    _warn_of_skipped(sheets, checkpoint_answers, reporter)
    # Write the table
    answers_by_sheet = zip(sheets, checkpoint_answers, floor_answers, baseline_answers, strict=True)
    rows = ruler_table(
        [Cell(*sheet, checkpoint, local, baseline) for sheet, checkpoint, local, baseline in answers_by_sheet]
    )
    on_main(lambda: RULER.write(folder, rows, origin, reporter))
    return RulerResult(name, rows, folder, samples)


def _against(
    options: RulerOptions, exam: _Exam, lengths: list[int], reporter: Reporter
) -> tuple[Sequence[Answers | None], dict[str, Any] | None]:
    """Return the baseline's answers to each sheet and its origin; Nones without a baseline."""
    if options.against is None:
        return [None] * len(exam.sheets), None
    baseline = model, _ = _load(options, options.against, lengths, reporter)
    origin_record = origin_of(options.against, model, None)
    with hard(model, None):
        return exam.take(2, baseline, identity(options.against, baseline, str(origin_record["tau"]))), origin_record


def _warn_of_skipped(sheets: list[tuple[str, int]], answers: list[Answers], reporter: Reporter) -> None:
    """Caution the user about samples that did not fit in their length."""
    for (task, length), sheet_answers in zip(sheets, answers, strict=True):
        if num_missing := int(np.isnan(sheet_answers.scores).sum()):
            reporter.caution(
                f"{num_missing} of {len(sheet_answers.scores)} samples of {task} do not fit in {length} tokens"
            )


def _tasks(names: str | None, material: Material) -> list[str]:
    """Return the named tasks, by default all that there is material for."""
    if names is None:
        return available(material)
    tasks = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for task in tasks:
        check_task(task)
    return tasks


def _load(options: RulerOptions, source: str, lengths: list[int], reporter: Reporter) -> Loaded:
    """Load a checkpoint and check that its positions reach the longest length."""
    model, tokenizer = load(options, source, reporter)
    check_positions(model, lengths[-1], "--lengths")
    return model, tokenizer


@dataclass(frozen=True)
class _Exam:
    """Questions that every model answers, as one sheet per task and length.

    Attributes:
        sheets: (task, length) of each sheet.
        make: function that makes a sample from task, length and index.
        number: samples per sheet.
        passes: how often all sheets are answered, for the progress bar.
        bar: progress bar.
        folder: folder of the answers.
        samples_identity: everything that samples depend on besides task and length.
    """

    sheets: list[tuple[str, int]]
    make: Callable[[str, int, int], Sample | None]
    number: int
    passes: int
    bar: Bar
    folder: Path
    samples_identity: str

    def take(self, pass_index: int, loaded: Loaded, answer_identity: str) -> list[Answers]:
        """Answer every sheet with a model in its current gate mode, in pass ``pass_index``; reuse finished sheets."""
        return [
            self._sheet(task, length, loaded, answer_identity, partial(self._update_bar, num_done, task))
            for num_done, (task, length) in enumerate(self.sheets, pass_index * len(self.sheets))
        ]

    def _sheet(self, task: str, length: int, loaded: Loaded, answer_identity: str, progress: Progress) -> Answers:
        """Answer one sheet and write it, or read its finished answers."""
        file = sample_file(self.folder, f"{task}-{length}", f"{answer_identity} {self.samples_identity}")
        if not on_main(file.is_file):
            lines = answer(*loaded, partial(self.make, task, length), self.number, progress)
            on_main(lambda: write_samples(file, lines))
        return Answers.of(on_main(lambda: read_samples(file)), self.number)

    def _update_bar(self, sheets_done: int, task: str, samples_done: int, samples_per_sheet: int) -> None:
        """Advance the bar, given the sheets done and the samples done of the current sheet."""
        self.bar(
            sheets_done * samples_per_sheet + samples_done, self.passes * len(self.sheets) * samples_per_sheet, task
        )


def show(result: RulerResult) -> None:
    """Print the scores by length and task, with the floor and, if there is one, the other checkpoint."""
    against = result.rows["against"].notna().any()
    columns = ["length", "task", "score", "floor", "density %", *(["against", "difference"] if against else [])]
    title = f"{escape(result.name)}: share of correct answers; floor: every head local"
    grid = Table(*columns, title=title)
    for row in result.rows.itertuples():
        cells = [
            str(row.length),
            row.task,
            with_error(row.score, row.standard_error),
            with_error(row.floor),
            percent(row.density),
        ]
        if against:
            cells += [with_error(row.against), change(row.difference, row.difference_standard_error)]
        grid.add_row(*cells, end_section=row.task.startswith("average"))
    out.print(grid)
    single_tasks = result.rows[~result.rows["task"].str.startswith("average")]
    say_sample_count(single_tasks["num_samples"], "samples per task")
    print_path("scores", result.folder / "ruler.csv")
    print_path("answers", result.samples)


def run(options: RulerOptions, reporter: Reporter) -> Result:
    """Run the command."""
    return Result(ruler(options, reporter), show)
