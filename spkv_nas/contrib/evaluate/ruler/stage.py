"""Evaluate a checkpoint on RULER (arXiv 2404.06654), beside a second one and beside itself with local heads.

A score is the share of correct answers. The table is written to ``reports/<name>/``.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.result_tables import RULER
from spkv_nas.base import console, distributed, statistics, units
from spkv_nas.base.progress import SILENT, Bar, Progress, Reporter, part_of
from spkv_nas.contrib.evaluate import samples
from spkv_nas.contrib.evaluate.ruler.options import SAMPLES, RulerOptions
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample import VERSION, NoRoomError, Sample
from spkv_nas.data.ruler.tasks import accepts_any, available, generate
from spkv_nas.evaluation.continuations import in_batches
from spkv_nas.evaluation.micro_batch import check_positions
from spkv_nas.evaluation.verdict import criterion
from spkv_nas.model import generation
from spkv_nas.model.windows import default_window, every_head_local, local_sinks
from spkv_nas.stages import commands, printing, sized_model, subject

_TOGETHER = 1 << 15  # prompt tokens per batch
_CONTROL = re.compile(r"[\x00-\x1f]")

_QUESTION = 400  # characters kept from the end of a prompt
_STREAM = 35  # separates the order of a verdict's questions from other uses of the seed

Make = Callable[[int], Sample | None]  # of an index
MakeSample = Callable[[str, int, int], Sample | None]  # of task, length, index


@dataclass(frozen=True)
class Questions:
    """Tasks and lengths, ascending, with the material that their questions are made of."""

    tasks: list[str]
    lengths: list[int]
    material: Material

    @classmethod
    def read(
        cls,
        lengths: str,
        tasks: str | None,
        haystack: Sequence[str] | None,
        qa: Sequence[str] | None,
    ) -> "Questions":
        """Read the material, and parse lists by comma; by default all tasks that there is material for."""
        material = Material.read(haystack or [], qa or [])
        names = (
            available(material) if tasks is None else [name.strip() for name in tasks.split(",")]
        )
        numbers = sorted({units.parse_context(text) for text in lengths.split(",")})
        return cls(list(dict.fromkeys(names)), numbers, material)

    @property
    def cells(self) -> list[tuple[str, int]]:
        """Return every task at every length."""
        return [(task, length) for length in self.lengths for task in self.tasks]

    def maker(self, seed: int, tokenizer: PreTrainedTokenizerBase) -> MakeSample:
        """Return the function that makes samples, or None for one that does not fit in its length.

        Raises ``UserError`` if the first sample of a cell does not fit.
        """

        def make(task: str, length: int, index: int) -> Sample | None:
            try:
                return generate(task, seed, index, length, tokenizer, self.material)
            except NoRoomError:
                if index:
                    return None
                raise

        for cell in self.cells:  # before hours of work
            make(*cell, 0)
        return make


def score(output: str, answers: Sequence[str], *, any_will_do: bool) -> float:
    """Return RULER's score of an output: the share of answers it contains, or 1 if any one suffices and occurs."""
    text = _CONTROL.sub("\n", output.strip()).strip().lower()
    matches = [answer.lower() in text for answer in answers]
    return float(any(matches)) if any_will_do else sum(matches) / len(matches)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    make: Make,
    number: int,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Answer samples 0 to ``number`` - 1, and return a record with score and density for each; call on all ranks.

    The caller sets the model's gates. ``make`` returns a sample by index, or None if it does not fit in the length.
    Raises ``UserError`` if logits are not finite.
    """

    def run(part: range) -> list[dict[str, Any]]:
        """Answer, as one batch, the samples that fit in the length."""
        batch = [(index, sample) for index in part if (sample := make(index)) is not None]
        if not batch:
            return []
        texts, new_tokens = zip(
            *((sample.text, sample.new_tokens) for _, sample in batch), strict=True
        )
        continuations = generation.continue_greedily(
            model, tokenizer, list(texts), list(new_tokens)
        )
        outputs = zip(batch, continuations.texts, continuations.densities, strict=True)
        return [
            {
                "index": index,
                "question": sample.text[-_QUESTION:],
                "answers": sample.answers,
                "output": output,
                "score": score(output, sample.answers, any_will_do=accepts_any(sample.task)),
                "density": float(density),
            }
            for (index, sample), output, density in outputs
        ]

    # Answer this process's share in batches that fit in memory
    first = make(0)
    return in_batches(run, number, _TOGETHER // first.num_tokens if first else 1, progress)


def ruler_table(
    checkpoint: pd.DataFrame, floor: pd.DataFrame, against: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Return one row per task and length, columns of ``RULER``, and after each length the average of its tasks.

    The answers of the checkpoint, of it with every head local, and of another one have columns length, task, index,
    score in [0, 1] and density, and a row per sample that fits in the length. ``difference`` is the checkpoint's score
    minus that of the other one, with the error of the difference by sample.
    """
    keys = ["length", "task", "index"]
    answers = checkpoint.merge(floor, on=keys, suffixes=(None, "_floor")).rename(
        columns={"score_floor": "floor"}
    )
    if against is None:
        answers = answers.assign(against=np.nan, against_density=np.nan)
    else:
        names = {"score": "against", "density": "against_density"}
        answers = answers.merge(against.rename(columns=names), on=keys)
    answers["difference"] = answers["score"] - answers["against"]
    # Average the samples of each task at each length
    groups = answers.groupby(keys[:2], sort=False)
    columns = ["score", "floor", "density", "against", "against_density", "difference"]
    rows = (
        groups[columns]
        .agg(lambda values: values.mean(skipna=False))
        .assign(num_samples=groups.size())
    )
    for name, error in (("score", "standard_error"), ("difference", "difference_standard_error")):
        rows[error] = groups[name].agg(
            lambda values: statistics.mean_and_error(values.to_numpy())[1]
        )
    # Average the tasks of each length
    lengths = rows.reset_index().groupby("length", sort=False)
    frames = [frame for _, of_length in lengths for frame in (of_length, _average(of_length))]
    return pd.concat(frames, ignore_index=True)[RULER.header]


def _average(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over tasks, whose samples are independent."""
    errors = ["standard_error", "difference_standard_error"]
    average = rows.drop(columns="task").mean()
    average[errors] = np.sqrt((rows[errors] ** 2).sum(skipna=False)) / len(rows)
    labels = {"length": rows["length"].iloc[0], "task": f"average of {len(rows)}"}
    labels["num_samples"] = rows["num_samples"].sum()
    return pd.DataFrame([{**average, **labels}])


def run(options: RulerOptions, reporter: Reporter = SILENT) -> commands.Result:
    """Score a checkpoint on RULER at several lengths: ``reports/<name>/ruler.csv``, with answers in ``runs/``."""
    questions = Questions.read(options.lengths, options.tasks, options.haystack, options.qa)
    lengths = questions.lengths
    number = options.samples or SAMPLES
    name = options.name or sized_model.result_name(options.model, options.folders)
    folder = options.folders.report_dir(name)
    sample_folder = options.folders.run_dir(name) / "ruler"
    # Load the checkpoint, and check that each task's first sample fits
    subject.check_pair(options.model, options.against)
    checkpoint = samples.Checkpoint.load(options, options.model, options.tau, reporter)
    model = checkpoint.model
    check_positions(model, lengths[-1], "--lengths")
    make = questions.maker(options.seed, checkpoint.tokenizer)
    window, sinks = (
        options.window or default_window(model, lengths[0]),
        local_sinks(model),
    )  # for the shortest prompts
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
        "environment": {"wonderwords": version("wonderwords")},
    }
    # Answer: the checkpoint, itself with all heads local, the baseline
    samples_identity = (
        f"{options.seed} {number} {VERSION} {version('wonderwords')} {questions.material.identity}"
    )
    baseline_answers = None
    with reporter.bar("answering") as bar:
        num_passes = 2 if options.against is None else 3
        take = partial(_take, questions.cells, make, number, sample_folder, samples_identity)
        with checkpoint.hard():
            checkpoint_answers = take(
                checkpoint, checkpoint.origin["tau"], part_of(bar, 0, num_passes)
            )
        with every_head_local(model, window, sinks):
            mode = f"local {window} {sinks}".removesuffix(" 0")
            floor_answers = take(checkpoint, mode, part_of(bar, 1, num_passes))
        if options.against is not None:
            baseline = samples.Checkpoint.load(options, options.against, None, reporter)
            check_positions(baseline.model, lengths[-1], "--lengths")
            with baseline.hard():
                baseline_answers = take(
                    baseline, baseline.origin["tau"], part_of(bar, 2, num_passes)
                )
            origin["against"] = baseline.origin
    # Caution the user about samples that did not fit in their length
    for (task, length), num_fitting in (
        checkpoint_answers.groupby(["task", "length"], sort=False).size().items()
    ):
        if num_fitting < number:
            reporter.caution(
                f"{number - num_fitting} of {number} samples of {task} do not fit in {length} tokens"
            )
    # Write the table
    rows = ruler_table(checkpoint_answers, floor_answers, baseline_answers)
    distributed.on_main(lambda: RULER.write(folder, rows, origin, reporter))
    return commands.Result(samples.SampledTable(name, rows, folder, sample_folder), show)


def _take(
    cells: Sequence[tuple[str, int]],
    make: MakeSample,
    number: int,
    folder: Path,
    samples_identity: str,
    checkpoint: samples.Checkpoint,
    mode: object,
    bar: Bar,
) -> pd.DataFrame:
    """Answer ``number`` questions of each (task, length) with a checkpoint in its gate ``mode``, which is set already.

    Finished answers are reused.
    """
    frames = []
    identity = f"{checkpoint.identity(mode)} {samples_identity}"
    for index, (task, length) in enumerate(cells):
        progress = part_of(bar, index, len(cells), task)
        compute = partial(
            answer,
            checkpoint.model,
            checkpoint.tokenizer,
            partial(make, task, length),
            number,
            progress,
        )
        lines = samples.kept_samples(folder, f"{task}-{length}", identity, compute)
        frames.append(
            pd.DataFrame(lines)[["index", "score", "density"]].assign(task=task, length=length)
        )
    return pd.concat(frames, ignore_index=True)


class QuestionRounds(criterion.Rounds):
    """Scores of generated answers to RULER's questions. Each question is of a random task and length.

    All rounds are full, the last too, so that they do not depend on the number of questions.
    """

    def __init__(
        self,
        cells: Sequence[tuple[str, int]],
        make: MakeSample,
        tokenizer: PreTrainedTokenizerBase,
        *,
        number: int,
        seed: int,
        identity: str,
    ) -> None:
        """Draw the (task, length) of all questions, with equal probability, and number the questions of each."""
        self._make = make
        self._tokenizer = tokenizer
        self.num_samples = number
        self.identity = f"{identity} {seed} {list(cells)}"
        drawn = pd.Series(
            np.random.default_rng((seed, _STREAM)).integers(
                len(cells), size=self.num_rounds * self.size
            )
        )
        numbers = drawn.groupby(drawn).cumcount().tolist()
        self._questions = [
            (*cells[cell], index) for cell, index in zip(drawn, numbers, strict=True)
        ]

    def measure(
        self, index: int, model: PreTrainedModel, prepared: criterion.Prepared
    ) -> criterion.Float:
        """Return the score in [0, 1] of each question; ``NO_SCORE`` for one that does not fit in its length."""
        questions = self._questions[self.part(index)]
        # The longest question comes first, because the batch size is chosen by it
        order = sorted(
            range(len(questions)), key=lambda number: (-questions[number][1], questions[number])
        )
        lines = answer(
            model, self._tokenizer, lambda number: self._make(*questions[order[number]]), len(order)
        )
        scores = np.full(len(questions), criterion.NO_SCORE)
        for line in lines:
            scores[order[line["index"]]] = line["score"]
        return scores


def show(result: samples.SampledTable) -> None:
    """Print the scores by length and task, with the floor and, if there is one, the other checkpoint."""
    against = result.rows["against"].notna().any()
    columns = [
        "length",
        "task",
        "score",
        "floor",
        "density %",
        *(["against", "difference"] if against else []),
    ]
    title = f"{console.escape(result.name)}: share of correct answers; floor: every head local"
    grid = console.Table(*columns, title=title)
    for row in result.rows.itertuples():
        score = samples.with_error(row.score, row.standard_error)
        cells = [
            str(row.length),
            row.task,
            score,
            samples.with_error(row.floor),
            samples.percent(row.density),
        ]
        if against:
            cells += [
                samples.with_error(row.against),
                printing.change(row.difference, row.difference_standard_error),
            ]
        grid.add_row(*cells, end_section=row.task.startswith("average"))
    console.out.print(grid)
    single_tasks = result.rows[~result.rows["task"].str.startswith("average")]
    samples.say_sample_count(single_tasks["num_samples"], "samples per task")
    console.print_path("scores", result.folder / "ruler.csv")
    console.print_path("answers", result.samples)
