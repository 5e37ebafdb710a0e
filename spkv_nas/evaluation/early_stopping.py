"""Racing: a layout that is clearly behind a rival on a part of the text is not scored on the rest.

The text is run in laps: a quarter of its blocks, as many again, the other half. After a lap the score on the whole of
this text is estimated, and whoever is more than two standard errors behind its rival is stopped, with that estimate. It
must be a good one, because samplers learn from it: with the plain difference to the rival on the part a search that
learns went half as far (reports/LOG.md). So it is a regression estimate, as of surveys (Cochran 1977, chapter 7): what
a layout loses block by block is regressed on what the layouts lose that have finished, whose scores on the whole text
are known. The blocks of a lap are spread over the text, and they are the sample: the standard error is over blocks, and
smaller by what has been seen (finite population correction). Documents as clusters would answer for text that nobody
has seen, which is another question, and be too few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.paired import DocumentNLL, Score, paired_difference
from spkv_nas.evaluation.ridge import Ridge
from spkv_nas.evaluation.zero_shot import keep_score, read_score, zero_shot

_SHARES = (4, 2, 1)  # one block of so many has been seen after each lap
_FEWEST = 8  # blocks that must have been seen: a standard error over fewer is not worth the name
_BEHIND = 2.0  # standard errors

Float = NDArray[np.float64]
_Key = str | None  # of a layout its content hash; None is full attention


@dataclass(frozen=True)
class RungSchedule:
    """A text in laps.

    Attributes:
        laps: blocks of the text; what a block holds of a document, a piece, counts as a document of its own.
        block: for each lap int64 [pieces], the block of the lap that each is of.
        document: the same of the document of the text.
        num_documents: of the text.
    """

    laps: tuple[TokenBlocks, ...]
    block: tuple[NDArray[np.int64], ...]
    document: tuple[NDArray[np.int64], ...]
    num_documents: int

    @classmethod
    def of(cls, text: TokenBlocks) -> RungSchedule | None:
        """None: the text is too short to race on."""
        ends = [text.num_blocks // share for share in _SHARES]
        ends = [end for end in ends if end >= _FEWEST or end == ends[-1]]
        if len(ends) == 1:
            return None
        laps, block, document = zip(*map(_by_piece, text.nested(ends)), strict=True)
        return cls(laps, block, document, len(text.documents))

    def num_tokens(self, laps: int) -> int:
        """Tokens of the first laps."""
        return sum(lap.tokens.size for lap in self.laps[:laps])

    def by_block(self, laps: Sequence[DocumentNLL]) -> Float:
        """[blocks], nats per token in each block of the first laps, from the NLL by piece."""
        means = [
            np.bincount(block, nll.total) / np.bincount(block, nll.num_tokens)
            for block, nll in zip(self.block, laps, strict=False)
        ]
        return np.concatenate(means)

    def whole(self, laps: Sequence[DocumentNLL]) -> DocumentNLL:
        """The NLL of the text by document, from that of all laps by piece."""
        document = np.concatenate(self.document)
        total = np.bincount(document, np.concatenate([lap.total for lap in laps]), self.num_documents)
        num_tokens = np.bincount(document, np.concatenate([lap.num_tokens for lap in laps]), self.num_documents)
        return DocumentNLL(total.astype(np.float64), num_tokens.astype(np.int64))


def _by_piece(blocks: TokenBlocks) -> tuple[TokenBlocks, NDArray[np.int64], NDArray[np.int64]]:
    """The same blocks with pieces as documents, and the block and the document that each piece is of."""
    documents = tuple(blocks.documents)
    number = np.arange(blocks.num_blocks)[:, None] * len(documents) + blocks.document
    pieces, piece = np.unique(number, return_inverse=True)
    block, document = np.divmod(pieces, len(documents))
    by_piece = piece.reshape(number.shape).astype(np.int32)
    return TokenBlocks(blocks.tokens, by_piece, tuple(documents[index] for index in document)), block, document


@dataclass(frozen=True)
class Estimate:
    """Of the nats per token on a whole text, from a part of it, with its standard error."""

    nats: float
    standard_error: float

    @classmethod
    def of(cls, seen: Float, others: Float, whole: Float, share: float) -> Estimate:
        """By ridge regression on other layouts.

        Args:
            seen: [blocks], nats per token in the blocks seen.
            others: [blocks, others], the same of the other layouts.
            whole: [others], their nats per token on the whole text.
            share: of the text that was seen.
        """
        fit = Ridge.fit(others, seen)
        nats = seen.mean() + (whole - others.mean(0)) @ (fit.operator @ seen)
        return cls(float(nats), math.sqrt(fit.squared_error / len(seen) * (1.0 - share)))


@dataclass(frozen=True)
class _Stop:
    """Where a layout was stopped, after so many laps, and with what estimate."""

    laps: int
    estimate: Estimate


@dataclass(frozen=True)
class Race:
    """Scores layouts on a course.

    Attributes:
        model: whose weights the layouts are put on.
        cache: folder of the finished scores on the whole text, those of ``zero_shot``.
        lap_caches: the same of the laps but the last.
    """

    model: PreTrainedModel
    course: RungSchedule
    batch_size: int
    cache: Path
    lap_caches: Sequence[Path]
    _wholes: dict[_Key, DocumentNLL] = field(default_factory=dict, init=False)  # what was read or run, by layout
    _laps: dict[tuple[_Key, int], DocumentNLL] = field(default_factory=dict, init=False)  # and by number of the lap

    def run(
        self, layouts: Sequence[Layout], rivals: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[Score]:
        """Zero-shot ΔNLL of each layout against full attention; an estimate if its rival leaves it behind.

        Args:
            rivals: of each layout, one of ``finished``; None: it is scored on the whole text.
            finished: layouts that are scored on the whole text, to estimate others by.
        """
        stops = self._stops(layouts, rivals, finished)
        finishers = [rival if stop else layout for layout, rival, stop in zip(layouts, rivals, stops, strict=True)]
        full, *wholes = self._whole([None, *finishers])
        return [self._score(whole, full, stop) for whole, stop in zip(wholes, stops, strict=True)]

    def _stops(
        self, layouts: Sequence[Layout], rivals: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[_Stop | None]:
        """Where each layout is stopped; None: nowhere."""
        stops: list[_Stop | None] = [None] * len(layouts)
        running = {number: _key(rival) for number, rival in enumerate(rivals) if rival is not None}
        if not running:
            return stops
        nats = {_key(layout): whole.mean for layout, whole in zip(finished, self._whole(finished), strict=True)}
        for laps in range(1, len(self.course.laps)):
            others = np.stack(self._by_block(finished, laps), 1)
            share = self.course.num_tokens(laps) / self.course.num_tokens(len(self.course.laps))
            seen = self._by_block([layouts[number] for number in running], laps)
            for (number, rival), losses in zip(list(running.items()), seen, strict=True):
                estimate = Estimate.of(losses, others, np.array(list(nats.values())), share)
                if estimate.nats - nats[rival] > _BEHIND * estimate.standard_error:
                    stops[number] = _Stop(laps, estimate)
                    del running[number]
        return stops

    def _score(self, whole: DocumentNLL, full: DocumentNLL, stop: _Stop | None) -> Score:
        """From the NLL of the layout itself, or of the rival that it was stopped by."""
        change = paired_difference(whole, full)
        if stop is None:
            return Score.of(change, self.course.num_tokens(len(self.course.laps)))
        scale = 100.0 / full.mean
        error = math.hypot(change.standard_error, scale * stop.estimate.standard_error)
        percent = scale * (stop.estimate.nats - full.mean)
        return Score(percent, error, self.course.num_tokens(stop.laps), stopped=True)

    def _by_block(self, layouts: Sequence[Layout], laps: int) -> list[Float]:
        """[blocks], nats per token in the blocks of the first laps, of each layout."""
        found = [self._lap(layouts, lap) for lap in range(laps)]
        return [self.course.by_block([lap[_key(layout)] for lap in found]) for layout in layouts]

    def _lap(self, layouts: Sequence[Layout | None], lap: int) -> dict[_Key, DocumentNLL]:
        """The NLL by piece of a lap, by layout."""
        is_last = lap == len(self.lap_caches)
        missing = {_key(layout): layout for layout in layouts if (_key(layout), lap) not in self._laps}
        if missing:
            found = zero_shot(
                self.model, list(missing.values()), self.course.laps[lap],
                batch_size=self.batch_size, cache=None if is_last else self.lap_caches[lap],
            )  # fmt: skip
            self._laps.update(((key, lap), nll) for key, nll in zip(missing, found, strict=True))
        return {_key(layout): self._laps[_key(layout), lap] for layout in layouts}

    def _whole(self, layouts: Sequence[Layout | None]) -> list[DocumentNLL]:
        """The NLL by document of the whole text."""
        for layout in layouts:
            if _key(layout) not in self._wholes:
                kept = read_score(self.cache, layout, self.course.num_documents)
                self._wholes.update({} if kept is None else {_key(layout): kept})
        missing = {_key(layout): layout for layout in layouts if _key(layout) not in self._wholes}
        laps = [self._lap(list(missing.values()), lap) for lap in range(len(self.course.laps))]
        for key, layout in missing.items():
            self._wholes[key] = self.course.whole([lap[key] for lap in laps])
            keep_score(self.cache, layout, self._wholes[key])
        return [self._wholes[_key(layout)] for layout in layouts]


def _key(layout: Layout | None) -> _Key:
    return None if layout is None else layout.content_hash
