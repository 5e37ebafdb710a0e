"""Evaluate a checkpoint on RULER, beside a second one and beside itself with local heads, to ``reports/<name>/``."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np

from spkv_nas.artifacts.result_tables import RULER
from spkv_nas.base import console, distributed
from spkv_nas.base.progress import SILENT, Bar, Reporter, part_of
from spkv_nas.base.version import environment
from spkv_nas.contrib.defaults import RULER_SAMPLES
from spkv_nas.contrib.evaluate import samples
from spkv_nas.contrib.evaluate.ruler.answers import Answers, Cell, MakeSample, Questions, answer, ruler_table
from spkv_nas.contrib.evaluate.ruler.options import RulerOptions
from spkv_nas.data.ruler.sample import VERSION
from spkv_nas.evaluation.micro_batch import check_positions
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages import checkpoints, checks, printing, sized_model
from spkv_nas.stages.result import Result


def ruler(options: RulerOptions, reporter: Reporter = SILENT) -> samples.SampledTable:
    """Score a checkpoint on RULER at several lengths: ``reports/<name>/ruler.csv``, with answers in ``runs/``."""
    from spkv_nas.model.windows import default_window, every_head_local, local_sinks

    quiet_transformers(reporter)
    checks.check(options)
    questions = Questions.read(options.lengths, options.tasks, options.haystack, options.qa)
    lengths, number = questions.lengths, options.samples or RULER_SAMPLES
    name = options.name or sized_model.result_name(options.model, options.folders)
    folder, sample_folder = options.folders.report_dir(name), options.folders.run_dir(name) / "ruler"
    # Load the checkpoint, and check that each task's first sample fits
    checkpoints.check_pair(options.model, options.against)
    checkpoint = samples.Checkpoint.load(options, options.model, options.tau, reporter)
    model = checkpoint.model
    check_positions(model, lengths[-1], "--lengths")
    make = questions.maker(options.seed, checkpoint.tokenizer)
    window, sinks = options.window or default_window(model, lengths[0]), local_sinks(model)  # for the shortest prompts
    origin = {
        **checkpoint.origin,
        "lengths": lengths,
        "tasks": questions.tasks,
        "samples": number,
        "samples_version": VERSION,
        "seed": options.seed,
        "haystack": options.haystack or "RULER's noise",
        "questions": options.qa or [],
        "floor_window": window,
        **({"floor_sinks": sinks} if sinks else {}),
        "against": None,
        "environment": {**environment(), "wonderwords": version("wonderwords")},
    }
    # Answer: the checkpoint, itself with all heads local, the baseline
    samples_identity = f"{options.seed} {number} {VERSION} {version('wonderwords')} {questions.material.identity}"
    baseline_answers: Sequence[Answers | None] = [None] * len(questions.cells)
    with reporter.bar("answering") as bar:
        num_passes = 2 if options.against is None else 3
        exam = _Exam(questions.cells, make, number, num_passes, bar, sample_folder, samples_identity)
        with checkpoint.hard():
            checkpoint_answers = exam.take(0, checkpoint, checkpoint.origin["tau"])
        with every_head_local(model, window, sinks):
            floor_answers = exam.take(1, checkpoint, f"local {window} {sinks}".removesuffix(" 0"))
        if options.against is not None:
            baseline = samples.Checkpoint.load(options, options.against, None, reporter)
            check_positions(baseline.model, lengths[-1], "--lengths")
            with baseline.hard():
                baseline_answers = exam.take(2, baseline, baseline.origin["tau"])
            origin["against"] = baseline.origin
    _warn_of_skipped(questions.cells, checkpoint_answers, reporter)
    # Write the table
    answers = zip(questions.cells, checkpoint_answers, floor_answers, baseline_answers, strict=True)
    rows = ruler_table([Cell(*cell, one, local, baseline) for cell, one, local, baseline in answers])
    distributed.on_main(lambda: RULER.write(folder, rows, origin, reporter))
    return samples.SampledTable(name, rows, folder, sample_folder)


def _warn_of_skipped(cells: Sequence[tuple[str, int]], answers: list[Answers], reporter: Reporter) -> None:
    """Caution the user about samples that did not fit in their length."""
    for (task, length), cell_answers in zip(cells, answers, strict=True):
        if missing := int(np.isnan(cell_answers.scores).sum()):
            reporter.caution(f"{missing} of {len(cell_answers.scores)} samples of {task} do not fit in {length} tokens")


@dataclass(frozen=True)
class _Exam:
    """Questions by (task, length), ``number`` of each, that every model answers in one of ``passes``."""

    cells: Sequence[tuple[str, int]]
    make: MakeSample
    number: int
    passes: int
    bar: Bar
    folder: Path
    samples_identity: str

    def take(self, pass_index: int, checkpoint: samples.Checkpoint, mode: object) -> list[Answers]:
        """Answer all questions with a checkpoint in its current gate mode, in a pass; finished answers are reused."""
        answers = []
        identity = f"{checkpoint.identity(mode)} {self.samples_identity}"
        for index, (task, length) in enumerate(self.cells, pass_index * len(self.cells)):
            progress = part_of(self.bar, index, self.passes * len(self.cells), task)
            make = partial(self.make, task, length)
            compute = partial(answer, checkpoint.model, checkpoint.tokenizer, make, self.number, progress)
            lines = samples.kept_samples(samples.sample_file(self.folder, f"{task}-{length}", identity), compute)
            answers.append(Answers.of(lines, self.number))
        return answers


def show(result: samples.SampledTable) -> None:
    """Print the scores by length and task, with the floor and, if there is one, the other checkpoint."""
    against = result.rows["against"].notna().any()
    columns = ["length", "task", "score", "floor", "density %", *(["against", "difference"] if against else [])]
    title = f"{console.escape(result.name)}: share of correct answers; floor: every head local"
    grid = console.Table(*columns, title=title)
    for row in result.rows.itertuples():
        score = samples.with_error(row.score, row.standard_error)
        cells = [str(row.length), row.task, score, samples.with_error(row.floor), samples.percent(row.density)]
        if against:
            cells += [samples.with_error(row.against), printing.change(row.difference, row.difference_standard_error)]
        grid.add_row(*cells, end_section=row.task.startswith("average"))
    console.out.print(grid)
    single_tasks = result.rows[~result.rows["task"].str.startswith("average")]
    samples.say_sample_count(single_tasks["num_samples"], "samples per task")
    console.print_path("scores", result.folder / "ruler.csv")
    console.print_path("answers", result.samples)


def run(options: RulerOptions, reporter: Reporter) -> Result:
    """Run the command."""
    return Result(ruler(options, reporter), show)
