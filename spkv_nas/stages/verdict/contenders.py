"""Load the models of a verdict when they are needed, and keep the scores that were measured with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.proposal import layout_names
from spkv_nas.base.arrays import Array, read_arrays
from spkv_nas.base.device import measuring_device
from spkv_nas.base.files import write_npz
from spkv_nas.base.progress import Reporter
from spkv_nas.evaluation.verdict.rounds import Rounds
from spkv_nas.model.checkpoint import checkpoint_hash, read_config
from spkv_nas.model.config_section import saved_layout
from spkv_nas.model.source import resolve
from spkv_nas.model.windows import layout_applied
from spkv_nas.stages.checkpoints import Loaded, hard, load
from spkv_nas.stages.names import model_name
from spkv_nas.stages.verdict.margins import is_layout
from spkv_nas.stages.verdict.options import VerdictOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DENSE_NAME = "dense"  # name of the dense model in a verdict
_SCORE = Array("score", "number", "samples", low=-1.0)
_REMEDY = "remove it and run the command again"


@dataclass(frozen=True)
class Contender:
    """Candidate or dense model.

    Attributes:
        name: name in the verdict.
        source: checkpoint with its weights.
        layout: layout that is put on them; None: the checkpoint as it is, with hard gates if it has any.
        chosen: the layout that was selected, which is the candidate or was trained into it.
    """

    name: str
    source: str
    layout: Layout | None = None
    chosen: Layout | None = None

    @property
    def content(self) -> tuple[str, str]:
        """Return what it is apart from its name: the checkpoint, and the content of the layout on it."""
        return self.source, "" if self.layout is None else self.layout.content

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[None]:
        """Put the layout on the checkpoint's model inside the ``with`` block."""
        with hard(model, None) if self.layout is None else layout_applied(model, self.layout):
            yield


def contenders(options: VerdictOptions, reporter: Reporter) -> tuple[Contender, list[Contender]]:
    """Return the dense model and the candidates, under different names (``layout_names``), each once."""
    candidates: dict[tuple[str, str], tuple[str, Contender]] = {}
    for text in options.candidates or ():
        layout = Layout.read(text) if is_layout(text) else None
        source, chosen = (text, _layout_of(text)) if layout is None else (options.model, layout)
        candidate = Contender(model_name(text) if layout is None else layout.strategy, source, layout, chosen)
        first, _ = candidates.setdefault(candidate.content, (text, candidate))
        if first != text:
            reporter.announce(f"{text} is the same as {first}: judged once")
    names = iter(layout_names([(Path(text), each.layout) for text, each in candidates.values() if each.layout]))
    named: list[Contender] = []
    for text, candidate in candidates.values():
        name = next(names) if candidate.layout else candidate.name
        named.append(replace(candidate, name=text if any(other.name == name for other in named) else name))
    return Contender(DENSE_NAME, options.model), named


def _layout_of(source: str) -> Layout | None:
    """Return the layout of a checkpoint, from its config alone; None if it has none."""
    return saved_layout(read_config(str(resolve(source)), f"model {source}"))


@dataclass
class ScoreStore:
    """Scores of all contenders, and what the dense model prepared for them, by criterion and round, in a folder.

    At most two models are in memory: the dense one, and the last other one.

    Attributes:
        options: options of the command.
        folder: folder of the scores.
        dense: the dense model, which layouts are put on too.
        reporter: receives messages.
    """

    options: VerdictOptions
    folder: Path
    dense: Loaded
    reporter: Reporter
    _other: tuple[str, Loaded] | None = field(default=None, init=False)
    _measured: dict[Path, NDArray[np.float64]] = field(default_factory=dict, init=False)

    def score(self, contender: Contender, rounds: Rounds, number: int) -> NDArray[np.float64]:
        """Return the scores of the samples that rounds 0 to ``number`` - 1 complete, from files where they exist.

        Raises:
            UserError: a file is damaged, or a model cannot be loaded or measured.
        """
        folder = self.folder / self._key(contender, rounds)
        return rounds.scores([self._round(contender, rounds, index, folder) for index in range(number)])

    def _round(self, contender: Contender, rounds: Rounds, index: int, folder: Path) -> NDArray[np.float64]:
        """Return what a round measured; if it is new, measure and write it."""
        file = folder / f"round-{index:05d}.npz"
        if file in self._measured:
            return self._measured[file]
        if not file.is_file():
            prepared = self._prepared(rounds, index)  # first, as a layout is put on the dense model itself
            model, _ = self._model(contender.source)
            with contender.applied(model):
                measured = rounds.measure(index, model, prepared)
            folder.mkdir(parents=True, exist_ok=True)
            write_npz(file, {_SCORE.name: measured})
        self._measured[file] = read_arrays(file, (_SCORE,), _REMEDY)[_SCORE.name]
        return self._measured[file]

    def _prepared(self, rounds: Rounds, index: int) -> dict[str, NDArray[Any]]:
        """Return what the dense model prepared for a round; if it is new, prepare and write it."""
        if not rounds.prepared:
            return {}
        dense, (model, _) = Contender(DENSE_NAME, self.options.model), self.dense
        folder = self.folder / self._key(dense, rounds)
        file = folder / f"prepared-{index:05d}.npz"
        if not file.is_file():
            with dense.applied(model):
                arrays = rounds.prepare(index, model)
            folder.mkdir(parents=True, exist_ok=True)
            write_npz(file, arrays)
        return read_arrays(file, rounds.prepared, _REMEDY)

    def _key(self, contender: Contender, rounds: Rounds) -> str:
        """Return the name of a folder for a contender and a criterion's samples, on this device and dtype."""
        source, content = contender.content
        setting: Sequence[str] = (
            checkpoint_hash(source),
            content,
            str(self.options.dtype),
            str(measuring_device(self.options.device)),
            rounds.identity,
        )
        return hashlib.sha256("\0".join(setting).encode()).hexdigest()[:16]

    def _model(self, source: str) -> Loaded:
        """Return the model of a checkpoint, loading it if need be."""
        if source == self.options.model:
            return self.dense
        if self._other is None or self._other[0] != source:
            self._other = None  # frees its memory first
            self._other = source, load(self.options, source, self.reporter)
        return self._other[1]
