"""Evaluate a checkpoint on RULER, to ``reports/<name>/``: beside another one, and beside itself without long range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from spkv_nas.artifacts.defaults import RULER_SAMPLES
from spkv_nas.artifacts.result_tables import RULER
from spkv_nas.base.distributed import on_main
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Bar, Progress, Reporter
from spkv_nas.base.units import parse_context
from spkv_nas.base.version import environment
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample import VERSION, NoRoomError, Sample
from spkv_nas.data.ruler.tasks import available, check_task, generate
from spkv_nas.evaluation.ruler import Answers, Cell, answer, ruler_table
from spkv_nas.evaluation.samples import read_samples, sample_file, write_samples
from spkv_nas.stages.checks import check
from spkv_nas.stages.common import check_positions, quiet_transformers, result_name
from spkv_nas.stages.eval_modes import Loaded, hard, identity, load
from spkv_nas.stages.eval_modes import origin as origin_of
from spkv_nas.stages.options import EvaluateOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RulerResult:
    """What RULER gave: its name, the table of ``evaluation.ruler``, the table's folder, and that of all answers."""

    name: str
    rows: pd.DataFrame
    folder: Path
    samples: Path


def ruler(options: EvaluateOptions, reporter: Reporter = SILENT) -> RulerResult:
    """Scores of a checkpoint at several lengths, written to ``reports/<name>/ruler.csv``, answers to ``runs/``.

    A sample without room, where the task's first has it, is left out.

    Raises:
        UserError: options that do not go together, a length without room for a task, or what cannot be loaded.
    """
    from spkv_nas.model.windows import default_window, every_head_local

    quiet_transformers(reporter)
    check(options)
    assert options.ruler is not None
    lengths = sorted({parse_context(text) for text in options.ruler.split(",")})
    material = Material.read(options.haystack or [], options.qa or [])
    tasks = _tasks(options.ruler_tasks, material)
    assert options.model is not None
    name = options.name or result_name(options.model)
    folder = options.place.report_dir(name)
    loaded = model, tokenizer = _load(options, options.model, lengths, reporter)
    places = [(task, length) for length in lengths for task in tasks]
    seed, number = options.seed or 0, options.samples or RULER_SAMPLES
    make = _maker(seed, tokenizer, material)
    for place in places:  # whether there is room for it, before hours of work
        make(*place, 0)
    window = options.window or default_window(model, lengths[0])  # of the shortest prompts
    about = origin_of(options.model, model, options.tau)
    origin = {
        **about,
        "lengths": lengths,
        "tasks": tasks,
        "samples": number,
        "samples_version": VERSION,
        "seed": seed,
        "haystack": options.haystack or "RULER's noise",
        "questions": options.qa or [],
        "floor_window": window,
        "environment": {**environment(), "wonderwords": version("wonderwords")},
    }
    samples = options.place.run_dir(name) / "ruler"
    asked = f"{seed} {number} {VERSION} {version('wonderwords')} {material.identity}"
    with reporter.bar("answering") as bar:
        exam = _Exam(places, make, number, 2 if options.against is None else 3, bar, samples, asked)
        with hard(model, options.tau):
            own = exam.take(0, loaded, identity(options.model, loaded, str(about["tau"])))
        with every_head_local(model, window):
            floor = exam.take(1, loaded, identity(options.model, loaded, f"local {window}"))
        against, origin["against"] = _against(options, exam, loaded, lengths, reporter)
    _say_left_out(places, own, reporter)
    answers = zip(places, own, floor, against, strict=True)
    rows = ruler_table([Cell(*place, one, local, other) for place, one, local, other in answers])
    on_main(lambda: RULER.write(folder, rows, origin))
    return RulerResult(name, rows, folder, samples)


def _maker(
    seed: int, tokenizer: PreTrainedTokenizerBase, material: Material
) -> Callable[[str, int, int], Sample | None]:
    """What makes a sample of a task at a length, by its index; None without room, but for the first."""

    def make(task: str, length: int, index: int) -> Sample | None:
        try:
            return generate(task, seed, index, length, tokenizer, material)
        except NoRoomError:
            if index:
                return None
            raise

    return make


def _against(
    options: EvaluateOptions, exam: _Exam, loaded: Loaded, lengths: list[int], reporter: Reporter
) -> tuple[Sequence[Answers | None], dict[str, Any] | None]:
    """What the other checkpoint answers to each sheet, and where that comes from; nothing where there is none."""
    if options.against is None:
        return [None] * len(exam.places), None
    other = model, tokenizer = _load(options, options.against, lengths, reporter)
    if tokenizer.get_vocab() != loaded[1].get_vocab():
        raise UserError(
            f"--against {options.against} has another tokenizer, and so other samples: a pair of answers must be to "
            "one question"
        )
    about = origin_of(options.against, model, None)
    with hard(model, None):
        return exam.take(2, other, identity(options.against, other, str(about["tau"]))), about


def _say_left_out(places: list[tuple[str, int]], answers: list[Answers], reporter: Reporter) -> None:
    for (task, length), one in zip(places, answers, strict=True):
        if missing := int(np.isnan(one.scores).sum()):
            reporter.caution(f"{missing} of {len(one.scores)} samples of {task} have no room at {length} tokens")


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


@dataclass(frozen=True)
class _Exam:
    """The questions that every model answers.

    Attributes:
        places: (task, length) of each sheet.
        number: samples of a sheet.
        passes: how often all of it is answered, for the bar.
        folder: of the answers.
        asked: all that samples depend on beside their place.
    """

    places: list[tuple[str, int]]
    make: Callable[[str, int, int], Sample | None]
    number: int
    passes: int
    bar: Bar
    folder: Path
    asked: str

    def take(self, passed: int, loaded: Loaded, whose: str) -> list[Answers]:
        """A model's answers to each sheet, as its gates are now, after so many passes; what is finished is read."""
        return [
            self._sheet(task, length, loaded, whose, partial(self._tell, done, task))
            for done, (task, length) in enumerate(self.places, passed * len(self.places))
        ]

    def _sheet(self, task: str, length: int, loaded: Loaded, whose: str, progress: Progress) -> Answers:
        file = sample_file(self.folder, f"{task}-{length}", f"{whose} {self.asked}")
        if not on_main(file.is_file):
            lines = answer(*loaded, partial(self.make, task, length), self.number, progress)
            on_main(lambda: write_samples(file, lines))
        return Answers.of(on_main(lambda: read_samples(file)), self.number)

    def _tell(self, sheets: int, task: str, done: int, of_sheet: int) -> None:
        self.bar(sheets * of_sheet + done, self.passes * len(self.places) * of_sheet, task)
