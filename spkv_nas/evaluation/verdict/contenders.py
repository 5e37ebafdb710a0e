"""Put the layouts of a verdict on models, and keep the scores that were measured with them."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.arrays import Array, read_arrays
from spkv_nas.base.files import write_npz
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.checked_calls import checked_calls
from spkv_nas.evaluation.verdict.criterion import SCORE, Rounds
from spkv_nas.model import config_section, modes, windows
from spkv_nas.model.checkpoint import checkpoint_hash

Arrays = dict[str, NDArray[Any]]
_REMEDY = "remove it and run the command again"


@dataclass(frozen=True)
class Contender:
    """Candidate or dense model: a checkpoint, "" for a model in memory, with a layout put on it.

    Without a layout, it is the checkpoint as it is, with hard gates if it has any. ``chosen`` is the layout that was
    selected, which is the candidate or was trained into it.
    """

    name: str
    source: str = ""
    layout: Layout | None = None
    chosen: Layout | None = None

    @classmethod
    def of(cls, layout: Layout, source: str = "") -> "Contender":
        """Return a layout on a checkpoint as a candidate that is called by its strategy."""
        return cls(layout.strategy, source, layout, layout)

    @property
    def content(self) -> tuple[str, str]:
        """Return what it is apart from its name: the checkpoint, and the content of the layout on it."""
        return self.source, "" if self.layout is None else self.layout.content

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[None]:
        """Put the layout on the checkpoint's model inside the ``with`` block."""
        as_it_is = (
            nullcontext()
            if config_section.gate_config(model) is None
            else modes.gate_mode(model, "hard")
        )
        with as_it_is if self.layout is None else windows.layout_applied(model, self.layout):
            yield


@dataclass
class ScoreStore:
    """Scores of all contenders, and what the dense model prepared for them, by criterion and round.

    At most two models are in memory: the dense one, which is also a contender, and the last other one, which ``load``
    loads. Scores are kept in a folder, or in memory alone. ``setting`` is the device and dtype that all are measured
    with. ``text`` has the documents that samples are made from; None if no criterion reads text.
    """

    dense: PreTrainedModel
    contender: Contender = field(default_factory=lambda: Contender("dense"))
    folder: Path | None = None
    load: Callable[[str], PreTrainedModel] | None = None
    setting: tuple[str, ...] = ()
    text: TokenBlocks | None = None
    # Rounds of all contenders that were not known before
    num_measured: int = field(default=0, init=False)
    _other: tuple[str, PreTrainedModel] | None = field(default=None, init=False)
    _kept: dict[tuple[str, str], Arrays] = field(default_factory=dict, init=False)
    _references: dict[tuple[str, int], Arrays] = field(default_factory=dict, init=False)

    def score(self, contender: Contender, rounds: Rounds, number: int) -> NDArray[np.float64]:
        """Return the scores of the samples that rounds 0 to ``number`` - 1 complete, from files where they exist."""
        key = self._key(contender, rounds)
        return rounds.scores(
            [
                self._round(contender, rounds, index, key)[rounds.scored.name]
                for index in range(number)
            ]
        )

    def detail(
        self, contender: Contender, rounds: Rounds, number: int, name: str
    ) -> NDArray[np.float64]:
        """Return the sum over rounds 0 to ``number`` - 1 of a detail that is measured with the scores."""
        return np.asarray(np.sum(self.details(contender, rounds, number, name), axis=0))

    def details(
        self, contender: Contender, rounds: Rounds, number: int, name: str
    ) -> list[NDArray[np.float64]]:
        """Return a detail of each of the rounds 0 to ``number`` - 1."""
        key = self._key(contender, rounds)
        return [self._round(contender, rounds, index, key)[name] for index in range(number)]

    def num_known(self, contender: Contender, rounds: Rounds) -> int:
        """Return how many of the first rounds are measured already."""
        key = self._key(contender, rounds)
        for index in range(rounds.num_rounds):
            name = _round_name(index)
            file = None if self.folder is None else self.folder / key / f"{name}.npz"
            if (key, name) not in self._kept and (file is None or not file.is_file()):
                return index
        return rounds.num_rounds

    def _round(self, contender: Contender, rounds: Rounds, index: int, key: str) -> Arrays:
        """Return what a round measured."""

        def measure() -> Arrays:
            """Measure the round, after its preparation, as a layout is put on the dense model itself."""
            self.num_measured += 1
            prepared = self._prepared(rounds, index)
            if rounds.reference and key != self._key(self.contender, rounds):
                return self._measured(
                    contender, rounds, index, prepared | self._reference(rounds, index)
                )
            made = self._measured(contender, rounds, index, prepared)
            self._keep_reference(rounds, index, made)
            return made

        return self._get(key, _round_name(index), (SCORE, *rounds.details), measure)

    def _measured(
        self, contender: Contender, rounds: Rounds, index: int, prepared: Arrays
    ) -> Arrays:
        """Measure a round with the model of a contender."""
        model = self._model(contender.source)
        with contender.applied(model), self._checked(model, rounds):
            return rounds.measure_all(index, model, prepared)

    def _reference(self, rounds: Rounds, index: int) -> Arrays:
        """Return what the dense model's measurement of a round keeps for those of others; measure it if need be."""
        key = self._key(self.contender, rounds)
        if self.folder is None:
            self._round(self.contender, rounds, index, key)
            return self._references[key, index]
        # Not kept in memory, as the arrays are large
        file = self.folder / key / f"reference-{index:05d}.npz"
        if not file.is_file():
            prepared = self._prepared(rounds, index)
            made = self._measured(self.contender, rounds, index, prepared)
            self._keep_reference(rounds, index, made)
        return read_arrays(file, rounds.reference, _REMEDY)

    def _keep_reference(self, rounds: Rounds, index: int, made: Arrays) -> None:
        """Take what others are compared with out of the dense model's measurement, and keep it."""
        key = self._key(self.contender, rounds)
        reference = {array.name: made.pop(array.name) for array in rounds.reference}
        if not reference:
            return
        if self.folder is None:
            self._references[key, index] = reference
            return
        file = self.folder / key / f"reference-{index:05d}.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_npz(file, reference, compressed=False)

    def _prepared(self, rounds: Rounds, index: int) -> Arrays:
        """Return what the dense model prepared for a round."""

        def prepare() -> Arrays:
            with self.contender.applied(self.dense), self._checked(self.dense, rounds):
                return rounds.prepare(index, self.dense)

        if not rounds.prepared:
            return {}
        return self._get(
            self._key(self.contender, rounds), f"prepared-{index:05d}", rounds.prepared, prepare
        )

    def _checked(self, model: PreTrainedModel, rounds: Rounds) -> AbstractContextManager[None]:
        """Check the calls of the model by a criterion."""
        return checked_calls(model, f"the criterion's {type(rounds).__name__}", self.text)

    def _get(
        self, key: str, name: str, arrays: tuple[Array, ...], make: Callable[[], Arrays]
    ) -> Arrays:
        """Return arrays from memory or their file; if they are new, make and write them."""
        if (key, name) not in self._kept:
            file = None if self.folder is None else self.folder / key / f"{name}.npz"
            if file is not None and not file.is_file():
                made = make()
                file.parent.mkdir(parents=True, exist_ok=True)
                write_npz(file, made)
            self._kept[key, name] = make() if file is None else read_arrays(file, arrays, _REMEDY)
        return self._kept[key, name]

    def _key(self, contender: Contender, rounds: Rounds) -> str:
        """Return the name of a folder for a contender and a criterion's samples, on this device and dtype."""
        source, content = contender.content
        checkpoint = checkpoint_hash(source) if source else ""
        details = [array.name for array in rounds.details]
        words = (checkpoint, content, *self.setting, rounds.identity, *details)
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]

    def _model(self, source: str) -> PreTrainedModel:
        """Return the model of a checkpoint, loading it if need be."""
        if source == self.contender.source:
            return self.dense
        if self._other is None or self._other[0] != source:
            assert self.load is not None
            self._other = None  # frees its memory first
            self._other = source, self.load(source)
        return self._other[1]


def _round_name(index: int) -> str:
    """Return the name of a round's scores."""
    return f"round-{index:05d}"
