"""Criterion ``ruler``: RULER's questions, by generated answers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from spkv_nas.base.errors import UserError
from spkv_nas.base.units import parse_context
from spkv_nas.contrib.evaluate.ruler.options import check_questions
from spkv_nas.evaluation.verdict.paired_test import MeanDrop
from spkv_nas.stages.verdict.criterion import Criterion, Setting
from spkv_nas.stages.verdict.options import QUESTIONS, VerdictOptions

if TYPE_CHECKING:
    from spkv_nas.evaluation.verdict.rounds import Rounds

_FIRST_SEED = 1 << 41  # other questions than those of ``evaluate ruler`` and of training, which may have chosen


def _questions(setting: Setting) -> Rounds:
    """Return RULER's questions, each of a random task and length."""
    from importlib.metadata import version

    from spkv_nas.contrib.evaluate.ruler.answers import sample_if_it_fits
    from spkv_nas.contrib.evaluate.ruler.rounds import QuestionRounds
    from spkv_nas.data.ruler.material import Material
    from spkv_nas.data.ruler.sample import VERSION
    from spkv_nas.data.ruler.tasks import available
    from spkv_nas.evaluation.micro_batch import check_positions

    options = setting.options
    material = Material.read(options.haystack or [], options.qa or [])
    names = available(material) if options.tasks is None else [name.strip() for name in options.tasks.split(",")]
    lengths = sorted({parse_context(text) for text in str(options.lengths).split(",")})
    cells = [(task, length) for length in lengths for task in dict.fromkeys(names)]
    check_positions(setting.dense, lengths[-1], "--lengths")
    seed = _FIRST_SEED + options.seed
    make = partial(sample_if_it_fits, seed=seed, tokenizer=setting.tokenizer, material=material)
    for cell in cells:  # raises before hours of work
        make(*cell, 0)
    identity = f"{VERSION} {_FIRST_SEED} {version('wonderwords')} {material.identity}"
    number = options.questions or QUESTIONS
    return QuestionRounds(cells, make, setting.tokenizer, number=number, seed=options.seed, identity=identity)


def _check_questions(options: VerdictOptions) -> None:
    """Check the lengths, the tasks and the material of RULER."""
    if options.lengths is None:
        raise UserError("--margin ruler=... needs --lengths: comma-separated prompt lengths in tokens, such as 512,4k")
    check_questions(options.lengths, options.tasks, options.haystack, options.qa)


RULER = Criterion("ruler", "questions", MeanDrop(), _questions, _check_questions, reads_text=False)
