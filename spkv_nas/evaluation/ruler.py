"""RULER (arXiv 2404.06654): how many of the answers a model gives that its text has, and at which density.

The score of a sample is the share of its answers that are in what the model writes, upper and lower case alike; of
questions on documents one will do. A task's is the mean over its samples, with the standard error of that mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.base.distributed import own_share, sum_over_processes
from spkv_nas.base.memory import Together
from spkv_nas.base.progress import Progress
from spkv_nas.base.records import write_record
from spkv_nas.base.replace import replacing
from spkv_nas.base.statistics import mean_and_error
from spkv_nas.base.tables import write_csv
from spkv_nas.data.ruler.sample import Sample
from spkv_nas.data.ruler.tasks import accepts_any
from spkv_nas.model.continuation import continue_greedily

COLUMNS = (
    "length", "task", "num_samples", "score", "standard_error", "floor", "density", "against", "against_density",
    "difference", "difference_standard_error",
)  # fmt: skip
_TOGETHER = 1 << 15  # tokens of the prompts that pass at once
_CONTROL = re.compile(r"[\x00-\x1f]")

Make = Callable[[int], Sample]


@dataclass(frozen=True)
class Answers:
    """Of a model to the samples of a task at a length: scores and densities, both [samples]."""

    scores: NDArray[np.float64]
    densities: NDArray[np.float64]


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
) -> Answers:
    """Answers to samples 0 to ``number``, which ``make`` makes; collective: every process answers its share.

    Args:
        model: with its gates, if it has any, as they are to be: hard, or open below windows.
        progress: called with (samples done, in all) of this process.

    Raises:
        UserError: logits that are not finite.
    """
    scores, densities = np.zeros(number), np.zeros(number)
    share = own_share(number)
    place, together = share.start, Together(max(1, _TOGETHER // make(0).num_tokens))
    while place < share.stop:

        def attempt(size: int, place: int = place) -> int:
            samples = [make(index) for index in range(place, place + size)]
            found = continue_greedily(model, tokenizer, [s.text for s in samples], [s.new_tokens for s in samples])
            scores[place : place + size] = [
                score(text, sample.answers, any_will_do=accepts_any(sample.task))
                for text, sample in zip(found.texts, samples, strict=True)
            ]
            densities[place : place + size] = found.densities
            return size

        place += together.run(attempt, share.stop - place)
        if progress is not None:
            progress(place - share.start, len(share))
    return Answers(sum_over_processes(scores), sum_over_processes(densities))


def ruler_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """One row per cell, columns ``COLUMNS``, and after each length the average of its tasks; scores in [0, 1].

    ``difference`` is the model's score minus the other checkpoint's, its error that of the difference by sample.
    """
    frames = []
    for length in dict.fromkeys(cell.length for cell in cells):
        rows = pd.DataFrame([_row(cell) for cell in cells if cell.length == length], columns=list(COLUMNS))
        frames += [rows, _average(rows)]
    return pd.concat(frames, ignore_index=True)


def _row(cell: Cell) -> tuple[Any, ...]:
    mean, error = mean_and_error(cell.own.scores)
    nan = float("nan")
    against: tuple[float, ...] = (nan,) * 4
    if cell.against is not None:
        difference = mean_and_error(cell.own.scores - cell.against.scores)
        against = (mean_and_error(cell.against.scores)[0], float(cell.against.densities.mean()), *difference)
    density = float(cell.own.densities.mean())
    return (
        cell.length,
        cell.task,
        len(cell.own.scores),
        mean,
        error,
        mean_and_error(cell.floor.scores)[0],
        density,
        *against,
    )


def _average(rows: pd.DataFrame) -> pd.DataFrame:
    """The mean over tasks, whose samples are independent."""
    errors = ["standard_error", "difference_standard_error"]
    average = rows.drop(columns="task").mean()
    average[errors] = np.sqrt((rows[errors] ** 2).sum(skipna=False)) / len(rows)
    whole = {"length": rows["length"].iloc[0], "task": f"average of {len(rows)}"}
    whole["num_samples"] = rows["num_samples"].sum()
    return pd.DataFrame([{**average, **whole}])[list(COLUMNS)]


def write_ruler(folder: Path, rows: pd.DataFrame, origin: Mapping[str, Any]) -> None:
    """Write the table of ``ruler_table`` to ``ruler.csv``, and where it comes from to ``ruler.yaml``."""
    with replacing(folder) as new:
        write_csv(new / "ruler.csv", rows)
        write_record(new / "ruler.yaml", origin)
