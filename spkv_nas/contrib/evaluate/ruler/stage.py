"""Evaluate a checkpoint on RULER (arXiv 2404.06654), beside a second one and beside itself with local heads.

A score is the share of correct answers. The table is written to ``reports/<name>/``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
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
        names = available(material)
        if tasks is not None:
            names = [name.strip() for name in tasks.split(",")]
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

        # Check before hours of work
        for task, length in self.cells:
            make(task, length, 0)
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
        texts = [sample.text for _, sample in batch]
        new_tokens = [sample.new_tokens for _, sample in batch]
        continuations = generation.continue_greedily(model, tokenizer, texts, new_tokens)
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
    answers = checkpoint.merge(floor, on=keys, suffixes=(None, "_floor"))
    answers = answers.rename(columns={"score_floor": "floor"})
    if against is None:
        answers = answers.assign(against=np.nan, against_density=np.nan)
    else:
        names = {"score": "against", "density": "against_density"}
        answers = answers.merge(against.rename(columns=names), on=keys)
    answers["difference"] = answers["score"] - answers["against"]
    # Average the samples of each task at each length
    groups = answers.groupby(keys[:2], sort=False)
    columns = ["score", "floor", "density", "against", "against_density", "difference"]
    rows = groups[columns].agg(lambda values: values.mean(skipna=False))
    rows["num_samples"] = groups.size()
    rows["standard_error"] = groups["score"].agg(_standard_error)
    rows["difference_standard_error"] = groups["difference"].agg(_standard_error)
    # Average the tasks of each length
    frames = []
    for _, tasks in rows.reset_index().groupby("length", sort=False):
        frames += [tasks, _average(tasks)]
    return pd.concat(frames, ignore_index=True)[RULER.header]


def _standard_error(values: "pd.Series[float]") -> float:
    """Return the standard error of the mean of samples."""
    return statistics.mean_and_error(values.to_numpy())[1]


def _average(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over tasks, whose samples are independent."""
    error_columns = ["standard_error", "difference_standard_error"]
    squared_errors = rows[error_columns] ** 2
    average = rows.drop(columns="task").mean()
    average[error_columns] = np.sqrt(squared_errors.sum(skipna=False)) / len(rows)
    labels = {
        "length": rows["length"].iloc[0],
        "task": f"average of {len(rows)}",
        "num_samples": rows["num_samples"].sum(),
    }
    return pd.DataFrame([{**average, **labels}])


@dataclass(frozen=True)
class Answering:
    """Answer ``number`` questions of every (task, length) with checkpoints, and keep the answers in a folder.

    ``make`` makes the questions, and ``identity`` is a text of everything that they depend on.
    """

    cells: Sequence[tuple[str, int]]
    make: MakeSample
    number: int
    folder: Path
    identity: str

    def take(self, checkpoint: samples.Checkpoint, mode: object, bar: Bar) -> pd.DataFrame:
        """Answer with a checkpoint in its gate ``mode``, which is set already; finished answers are reused."""
        frames = []
        identity = f"{checkpoint.identity(mode)} {self.identity}"
        for index, (task, length) in enumerate(self.cells):
            compute = partial(
                answer,
                checkpoint.model,
                checkpoint.tokenizer,
                partial(self.make, task, length),
                self.number,
                part_of(bar, index, len(self.cells), task),
            )
            lines = samples.kept_samples(self.folder, f"{task}-{length}", identity, compute)
            frame = pd.DataFrame(lines)[["index", "score", "density"]]
            frames.append(frame.assign(task=task, length=length))
        return pd.concat(frames, ignore_index=True)


def run(options: RulerOptions, reporter: Reporter = SILENT) -> commands.Result:
    """Score a checkpoint on RULER at several lengths: ``reports/<name>/ruler.csv``, with answers in ``runs/``."""
    questions = Questions.read(options.lengths, options.tasks, options.haystack, options.qa)
    lengths = questions.lengths
    number = options.samples or SAMPLES
    name = options.name or sized_model.result_name(options.model, options.folders)
    folder = options.folders.report_dir(name)
    # Load the checkpoint, and check that each task's first sample fits
    subject.check_pair(options.model, options.against)
    checkpoint = samples.Checkpoint.load(options, options.model, options.tau, reporter)
    model = checkpoint.model
    check_positions(model, lengths[-1], "--lengths")
    answering = Answering(
        cells=questions.cells,
        make=questions.maker(options.seed, checkpoint.tokenizer),
        number=number,
        folder=options.folders.run_dir(name) / "ruler",
        identity=(
            f"{options.seed} {number} {VERSION} {version('wonderwords')} "
            f"{questions.material.identity}"
        ),
    )
    # Local heads get the window of the shortest prompts
    window = options.window or default_window(model, lengths[0])
    sinks = local_sinks(model)
    origin = _origin(options, questions, checkpoint.origin, window, sinks)
    # Answer: the checkpoint, itself with all heads local, the baseline
    baseline_answers = None
    with reporter.bar("answering") as bar:
        num_passes = 2 if options.against is None else 3
        with checkpoint.hard():
            tau = checkpoint.origin["tau"]
            checkpoint_answers = answering.take(checkpoint, tau, part_of(bar, 0, num_passes))
        with every_head_local(model, window, sinks):
            mode = f"local {window} {sinks}".removesuffix(" 0")
            floor_answers = answering.take(checkpoint, mode, part_of(bar, 1, num_passes))
        if options.against is not None:
            baseline = samples.Checkpoint.load(options, options.against, None, reporter)
            check_positions(baseline.model, lengths[-1], "--lengths")
            origin["against"] = baseline.origin
            with baseline.hard():
                tau = baseline.origin["tau"]
                baseline_answers = answering.take(baseline, tau, part_of(bar, 2, num_passes))
    # Caution the user about samples that did not fit in their length
    num_fitting = checkpoint_answers.groupby(["task", "length"], sort=False).size()
    for (task, length), num_samples in num_fitting.items():
        if num_samples < number:
            num_left_out = number - num_samples
            reporter.caution(
                f"{num_left_out} of {number} samples of {task} do not fit in {length} tokens"
            )
    # Write the table
    rows = ruler_table(checkpoint_answers, floor_answers, baseline_answers)
    distributed.on_main(lambda: RULER.write(folder, rows, origin, reporter))
    return commands.Result(samples.SampledTable(name, rows, folder, answering.folder), show)


def _origin(
    options: RulerOptions,
    questions: Questions,
    checkpoint: Mapping[str, Any],
    window: int,
    sinks: int,
) -> dict[str, object]:
    """Return the record of the table: the ``checkpoint``, the questions, and the ``window`` of the floor."""
    return {
        **checkpoint,
        "lengths": questions.lengths,
        "tasks": questions.tasks,
        "samples": options.samples or SAMPLES,
        "samples_version": VERSION,
        "seed": options.seed,
        "haystack": options.haystack or "RULER's noise",
        "questions": options.qa or [],
        "floor_window": window,
        **({"floor_sinks": sinks} if sinks else {}),
        "against": None,
        "environment": {"wonderwords": version("wonderwords")},
    }


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
        rng = np.random.default_rng((seed, _STREAM))
        drawn = rng.integers(len(cells), size=self.num_rounds * self.size).tolist()
        num_drawn = [0] * len(cells)
        self._questions = []
        for cell in drawn:
            task, length = cells[cell]
            self._questions.append((task, length, num_drawn[cell]))
            num_drawn[cell] += 1

    def measure(
        self, index: int, model: PreTrainedModel, prepared: criterion.Prepared
    ) -> criterion.Float:
        """Return the score in [0, 1] of each question; ``NO_SCORE`` for one that does not fit in its length."""
        questions = self._questions[self.part(index)]
        lengths = [length for _, length, _ in questions]
        # The longest question comes first, because the batch size is chosen by it
        order = sorted(
            range(len(questions)), key=lambda number: (-lengths[number], questions[number])
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
    has_baseline = result.rows["against"].notna().any()
    columns = ["length", "task", "score", "floor", "density %"]
    if has_baseline:
        columns += ["against", "difference"]
    title = f"{console.escape(result.name)}: share of correct answers; floor: every head local"
    grid = console.Table(*columns, title=title)
    for row in result.rows.itertuples():
        cells = [
            str(row.length),
            row.task,
            samples.with_error(row.score, row.standard_error),
            samples.with_error(row.floor),
            samples.percent(row.density),
        ]
        if has_baseline:
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
