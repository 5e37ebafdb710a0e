"""Evaluate a model on RULER (arXiv 2404.06654): the share of correct answers (``score``), and its density."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.result_tables import RULER
from spkv_nas.base import arrays, distributed, memory, statistics, units
from spkv_nas.base.progress import Progress
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample import NoRoomError, Sample
from spkv_nas.data.ruler.tasks import accepts_any, available, generate
from spkv_nas.model.generation import continue_greedily

_TOGETHER = 1 << 15  # prompt tokens per batch
_CONTROL = re.compile(r"[\x00-\x1f]")

_QUESTION = 400  # characters kept from the end of a prompt

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
        cls, lengths: str, tasks: str | None, haystack: Sequence[str] | None, qa: Sequence[str] | None
    ) -> "Questions":
        """Read the material, and parse lists by comma; by default all tasks that there is material for."""
        material = Material.read(haystack or [], qa or [])
        names = available(material) if tasks is None else [name.strip() for name in tasks.split(",")]
        return cls(
            list(dict.fromkeys(names)), sorted({units.parse_context(text) for text in lengths.split(",")}), material
        )

    @property
    def cells(self) -> list[tuple[str, int]]:
        """Return every task at every length."""
        return [(task, length) for length in self.lengths for task in self.tasks]

    def maker(self, seed: int, tokenizer: PreTrainedTokenizerBase) -> MakeSample:
        """Return the function that makes samples. Raises ``UserError`` if the first one of a cell does not fit."""
        make = partial(sample_if_it_fits, seed=seed, tokenizer=tokenizer, material=self.material)
        for cell in self.cells:  # before hours of work
            make(*cell, 0)
        return make


@dataclass(frozen=True)
class Answers:
    """Scores and densities, both [samples], of one task at one length; NaN for samples that do not fit in it."""

    scores: arrays.Float
    densities: arrays.Float

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], number: int) -> "Answers":
        """Collect the records that ``answer`` returns for samples 0 to ``number`` - 1."""
        columns = np.full((2, number), np.nan)
        for line in lines:
            columns[:, line["index"]] = line["score"], line["density"]
        return cls(*columns)


@dataclass(frozen=True)
class Cell:
    """Answers to one task at one length: of a model, of it with every head local, and of another checkpoint."""

    task: str
    length: int
    checkpoint: Answers
    floor: Answers
    against: Answers | None = None


def score(output: str, answers: Sequence[str], *, any_will_do: bool) -> float:
    """Return RULER's score of an output: the share of answers it contains, or 1 if any one suffices and occurs."""
    text = _CONTROL.sub("\n", output.strip()).strip().lower()
    matches = [answer.lower() in text for answer in answers]
    return float(any(matches)) if any_will_do else sum(matches) / len(matches)


def sample_if_it_fits(
    task: str, length: int, index: int, *, seed: int, tokenizer: PreTrainedTokenizerBase, material: Material
) -> Sample | None:
    """Generate a sample of a task; None if it does not fit in the length, which only the first one has to."""
    try:
        return generate(task, seed, index, length, tokenizer, material)
    except NoRoomError:
        if index:
            return None
        raise


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
    first = make(0)

    def run(part: range) -> list[dict[str, Any]]:
        return _answer(model, tokenizer, {index: make(index) for index in part})

    # Answer this process's share in batches that fit in memory
    batching = memory.AdaptiveBatchSize(_TOGETHER // first.num_tokens if first else 1)
    lines = batching.run_all(run, distributed.own_share(number), progress)
    return [line for part in distributed.gathered(lines) for line in part]


def _answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Mapping[int, Sample | None]
) -> list[dict[str, Any]]:
    """Answer, as one batch, the samples that are not None."""
    existing = {index: sample for index, sample in samples.items() if sample is not None}
    if not existing:
        return []
    batch = existing.values()
    continuations = continue_greedily(
        model, tokenizer, [sample.text for sample in batch], [sample.new_tokens for sample in batch]
    )
    return [
        {
            "index": index,
            "question": sample.text[-_QUESTION:],
            "answers": sample.answers,
            "output": output,
            "score": score(output, sample.answers, any_will_do=accepts_any(sample.task)),
            "density": float(density),
        }
        for (index, sample), output, density in zip(
            existing.items(), continuations.texts, continuations.densities, strict=True
        )
    ]


def ruler_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """Return one row per cell, columns of ``RULER``, and after each length the average of its tasks; scores in [0, 1].

    ``difference`` is the model's score minus that of the other checkpoint, with the error of the difference by sample.
    """
    frames = []
    for length in dict.fromkeys(cell.length for cell in cells):
        rows = pd.DataFrame([_row(cell) for cell in cells if cell.length == length], columns=RULER.header)
        frames += [rows, _average(rows)]
    return pd.concat(frames, ignore_index=True)


def _row(cell: Cell) -> tuple[Any, ...]:
    """Return the row of a cell, over the samples that fit in the length."""
    fits = ~np.isnan(cell.checkpoint.scores)
    scores = cell.checkpoint.scores[fits]
    row = (cell.length, cell.task, len(scores), *statistics.mean_and_error(scores), cell.floor.scores[fits].mean())
    if cell.against is None:
        return *row, cell.checkpoint.densities[fits].mean(), *(np.nan,) * 4
    other_scores = cell.against.scores[fits]
    density, other_density = (answers.densities[fits].mean() for answers in (cell.checkpoint, cell.against))
    return *row, density, other_scores.mean(), other_density, *statistics.mean_and_error(scores - other_scores)


def _average(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over tasks, whose samples are independent."""
    errors = ["standard_error", "difference_standard_error"]
    average = rows.drop(columns="task").mean()
    average[errors] = np.sqrt((rows[errors] ** 2).sum(skipna=False)) / len(rows)
    labels = {"length": rows["length"].iloc[0], "task": f"average of {len(rows)}"}
    labels["num_samples"] = rows["num_samples"].sum()
    return pd.DataFrame([{**average, **labels}])[RULER.header]
