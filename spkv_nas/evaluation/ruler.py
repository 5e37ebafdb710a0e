"""RULER (arXiv 2404.06654): how many of the answers a model gives that its text has, and at which density.

The score of a sample is the share of its answers that are in what the model writes, upper and lower case alike; of
questions on documents one will do. A task's is the mean over its samples, with the standard error of that mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.result_tables import RULER
from spkv_nas.base.distributed import gathered, own_share
from spkv_nas.base.memory import AdaptiveBatchSize
from spkv_nas.base.progress import Progress
from spkv_nas.base.statistics import mean_and_error
from spkv_nas.data.ruler.sample import Sample
from spkv_nas.data.ruler.tasks import accepts_any
from spkv_nas.model.continuation import continue_greedily

_TOGETHER = 1 << 15  # tokens of the prompts that pass at once
_CONTROL = re.compile(r"[\x00-\x1f]")

_QUESTION = 400  # characters of a prompt's end that are kept

Make = Callable[[int], Sample | None]


@dataclass(frozen=True)
class Answers:
    """Of a model to the samples of a task at a length: scores and densities, both [samples].

    NaN where there is no room for a sample; the density also of a model that has none.
    """

    scores: NDArray[np.float64]
    densities: NDArray[np.float64]

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], number: int) -> Answers:
        """From what ``answer`` gives of samples 0 to ``number``."""
        found = np.full((2, number), np.nan)
        for line in lines:
            found[:, line["index"]] = line["score"], line["density"]
        return cls(*found)


@dataclass(frozen=True)
class Cell:
    """A task at a length: a model's answers, its answers with every head local, and those of another checkpoint."""

    task: str
    length: int
    own: Answers
    floor: Answers
    against: Answers | None = None


def score(output: str, answers: Sequence[str], *, any_will_do: bool) -> float:
    """What RULER gives a model's output: the share of the answers that are in it, or 1 if one of them is."""
    text = _CONTROL.sub("\n", output.strip()).strip().lower()
    found = [answer.lower() in text for answer in answers]
    return float(any(found)) if any_will_do else sum(found) / len(found)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    make: Make,
    number: int,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Answers to samples 0 to ``number``, each with its score and density; collective: every process does its share.

    Args:
        model: with its gates, if it has any, as they are to be: hard, or open below windows.
        make: makes a sample, or None where there is no room for it.
        progress: called with (samples done, in all) of this process.

    Raises:
        UserError: logits that are not finite.
    """
    lines: list[dict[str, Any]] = []
    share = own_share(number)
    first = make(0)
    place, together = share.start, AdaptiveBatchSize(max(1, _TOGETHER // first.num_tokens) if first else 1)
    while place < share.stop:

        def attempt(size: int, place: int = place) -> tuple[int, list[dict[str, Any]]]:
            return size, _answer(model, tokenizer, {index: make(index) for index in range(place, place + size)})

        size, found = together.run(attempt, share.stop - place)
        lines += found
        place += size
        if progress is not None:
            progress(place - share.start, len(share))
    return [line for part in gathered(lines) for line in part]


def _answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Mapping[int, Sample | None]
) -> list[dict[str, Any]]:
    """The answers to those samples that there are, at once."""
    there = {index: sample for index, sample in samples.items() if sample is not None}
    if not there:
        return []
    asked = there.values()
    found = continue_greedily(model, tokenizer, [one.text for one in asked], [one.new_tokens for one in asked])
    return [
        {
            "index": index,
            "question": sample.text[-_QUESTION:],
            "answers": sample.answers,
            "output": output,
            "score": score(output, sample.answers, any_will_do=accepts_any(sample.task)),
            "density": float(density),
        }
        for (index, sample), output, density in zip(there.items(), found.texts, found.densities, strict=True)
    ]


def ruler_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """One row per cell, columns of ``RULER``, and after each length the average of its tasks; scores in [0, 1].

    ``difference`` is the model's score minus the other checkpoint's, its error that of the difference by sample.
    """
    frames = []
    for length in dict.fromkeys(cell.length for cell in cells):
        rows = pd.DataFrame([_row(cell) for cell in cells if cell.length == length], columns=RULER.header)
        frames += [rows, _average(rows)]
    return pd.concat(frames, ignore_index=True)


def _row(cell: Cell) -> tuple[Any, ...]:
    """Of the samples that there was room for."""
    there = ~np.isnan(cell.own.scores)
    own = cell.own.scores[there]
    row = (cell.length, cell.task, len(own), *mean_and_error(own), cell.floor.scores[there].mean())
    if cell.against is None:
        return *row, cell.own.densities[there].mean(), *(np.nan,) * 4
    other = cell.against.scores[there]
    density, others = (one.densities[there].mean() for one in (cell.own, cell.against))
    return *row, density, other.mean(), others, *mean_and_error(own - other)


def _average(rows: pd.DataFrame) -> pd.DataFrame:
    """The mean over tasks, whose samples are independent."""
    errors = ["standard_error", "difference_standard_error"]
    average = rows.drop(columns="task").mean()
    average[errors] = np.sqrt((rows[errors] ** 2).sum(skipna=False)) / len(rows)
    whole = {"length": rows["length"].iloc[0], "task": f"average of {len(rows)}"}
    whole["num_samples"] = rows["num_samples"].sum()
    return pd.DataFrame([{**average, **whole}])[RULER.header]
