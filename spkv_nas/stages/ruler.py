"""Evaluate a checkpoint on RULER, to ``reports/<name>/``: beside another one, and beside itself without long range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from spkv_nas.artifacts.gate_config import suitable_window
from spkv_nas.base.distributed import on_main
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Bar, Reporter
from spkv_nas.base.units import parse_context
from spkv_nas.base.version import environment
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample import Sample
from spkv_nas.data.ruler.tasks import available, check_task, generate
from spkv_nas.evaluation.ruler import Answers, Cell, answer, ruler_table, write_ruler
from spkv_nas.stages.answering import Loaded, check_mode, hard, load
from spkv_nas.stages.answering import origin as origin_of
from spkv_nas.stages.common import check_positions, model_name, quiet_transformers
from spkv_nas.stages.options import EvaluateOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLES = 100  # of a task at a length, by default


@dataclass(frozen=True)
class RulerResult:
    """What RULER gave: its name, the table of ``evaluation.ruler``, and the table's folder."""

    name: str
    rows: pd.DataFrame
    folder: Path


def ruler(options: EvaluateOptions, reporter: Reporter = SILENT) -> RulerResult:
    """Scores of a checkpoint at several lengths, written to ``reports/<name>/ruler.csv``.

    Raises:
        UserError: options that do not go together, a length without room for a task, or what cannot be loaded.
    """
    quiet_transformers(reporter)
    check_mode(options)
    assert options.ruler is not None
    lengths = sorted({parse_context(text) for text in options.ruler.split(",")})
    material = Material.read(options.haystack or [], options.qa or [])
    tasks = _tasks(options.ruler_tasks, material)
    assert options.model is not None
    name = options.name or model_name(options.model)
    folder = options.place.report_dir(name)
    options.place.check_writable()
    model, tokenizer = _load(options, options.model, lengths, reporter)
    places = [(task, length) for length in lengths for task in tasks]

    def make(task: str, length: int, index: int) -> Sample:
        return generate(task, options.seed or 0, index, length, tokenizer, material)

    for place in places:  # whether there is room for it, before hours of work
        make(*place, 0)
    window = options.window or _local_window(model, lengths)
    origin = {
        **origin_of(options.model, model, options.tau),
        "lengths": lengths,
        "tasks": tasks,
        "samples": options.samples or SAMPLES,
        "seed": options.seed or 0,
        "haystack": options.haystack or "RULER's noise",
        "questions": options.qa or [],
        "floor_window": window,
        "against": None,
        "environment": {**environment(), "wonderwords": version("wonderwords")},
    }
    against: Sequence[Answers | None] = [None] * len(places)
    with reporter.bar("answering") as bar:
        exam = _Exam(places, make, options.samples or SAMPLES, 2 if options.against is None else 3, bar)
        own = exam.take(0, (model, tokenizer), partial(hard, model, options.tau))
        floor = exam.take(1, (model, tokenizer), partial(_local, model, window))
        if options.against is not None:
            model, other = _load(options, options.against, lengths, reporter)
            if other.get_vocab() != tokenizer.get_vocab():
                raise UserError(
                    f"--against {options.against} has another tokenizer, and so other samples: a pair of answers must "
                    "be to one question"
                )
            origin["against"] = origin_of(options.against, model, None)
            against = exam.take(2, (model, tokenizer), partial(hard, model, None))
    answers = zip(places, own, floor, against, strict=True)
    rows = ruler_table([Cell(*place, one, local, other) for place, one, local, other in answers])
    on_main(lambda: write_ruler(folder, rows, origin))
    return RulerResult(name, rows, folder)


def _tasks(names: str | None, material: Material) -> list[str]:
    """The tasks that are named, or all that there is material for."""
    if names is None:
        return available(material)
    tasks = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for task in tasks:
        check_task(task)
    return tasks


def _load(options: EvaluateOptions, source: str, lengths: list[int], reporter: Reporter) -> Loaded:
    """A checkpoint whose positions reach that far."""
    model, tokenizer = load(options, source, reporter)
    check_positions(model, lengths[-1], "--ruler length")
    return model, tokenizer


def _local_window(model: PreTrainedModel, lengths: list[int]) -> int:
    """Of the floor: the model's own, or one that leaves something outside it in the shortest prompts."""
    from spkv_nas.model.windows import local_window

    return local_window(model) or suitable_window(lengths[0])


def _local(model: PreTrainedModel, window: int) -> AbstractContextManager[Any]:
    """Every head of the model local."""
    from spkv_nas.model.windows import every_head_local

    return every_head_local(model, window)


@dataclass(frozen=True)
class _Exam:
    """The questions that every model answers.

    Attributes:
        places: (task, length) of each sheet.
        number: samples of a sheet.
        passes: how often all of it is answered, for the bar.
    """

    places: list[tuple[str, int]]
    make: Callable[[str, int, int], Sample]
    number: int
    passes: int
    bar: Bar

    def take(self, passed: int, loaded: Loaded, mode: Callable[[], AbstractContextManager[Any]]) -> list[Answers]:
        """A model's answers to each sheet, in a mode of its gates, after so many passes."""
        with mode():
            return [
                answer(*loaded, partial(self.make, *place), self.number, partial(self._tell, done, place[0]))
                for done, place in enumerate(self.places, passed * len(self.places))
            ]

    def _tell(self, sheets: int, task: str, done: int, of_sheet: int) -> None:
        self.bar(sheets * of_sheet + done, self.passes * len(self.places) * of_sheet, task)
