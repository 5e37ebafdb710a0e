"""Stop scoring a layout early once it is clearly behind an incumbent ("racing").

The text is scored in rungs (``laps``): a quarter of its blocks, another quarter, the remaining half. After each rung
the score on the whole text is estimated, and a layout that is more than two standard errors behind its incumbent
(``rival``) is stopped with that estimate. Samplers learn from the estimate, so it must be accurate: with the plain
difference to the incumbent on the part, a search that learns made only half the progress (reports/LOG.md). It is
therefore the regression estimator of survey sampling (Cochran 1977, chapter 7): the layout's loss by block is regressed
on the losses of finished layouts, whose scores on the whole text are known. The sample is the blocks of a rung, which
are spread over the text: the standard error is over blocks, with finite population correction. Documents as clusters
would answer another question, about unseen text, and would be too few.
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

_SHARES = (4, 2, 1)  # after each rung, one block in N has been scored
_FEWEST = 8  # minimum number of scored blocks: a standard error over fewer is unreliable
_BEHIND = 2.0  # standard errors behind the incumbent at which a layout is stopped

Float = NDArray[np.float64]
_Key = str | None  # content hash of a layout; None is full attention


@dataclass(frozen=True)
class RungSchedule:
    """A text divided into rungs (``laps``).

    Attributes:
        laps: blocks of each rung; each piece, the part of a document inside one block, counts as a document of its own.
        block: int64 [pieces] for each rung, the block of the rung that contains each piece.
        document: int64 [pieces] for each rung, the document of the text that each piece belongs to.
        num_documents: number of documents in the text.
    """

    laps: tuple[TokenBlocks, ...]
    block: tuple[NDArray[np.int64], ...]
    document: tuple[NDArray[np.int64], ...]
    num_documents: int

    @classmethod
    def of(cls, text: TokenBlocks) -> RungSchedule | None:
        """Divide a text into rungs; None if it is too short for early stopping."""
        ends = [text.num_blocks // share for share in _SHARES]
        ends = [end for end in ends if end >= _FEWEST or end == ends[-1]]
        if len(ends) == 1:
            return None
        laps, block, document = zip(*map(_by_piece, text.nested(ends)), strict=True)
        return cls(laps, block, document, len(text.documents))

    def num_tokens(self, laps: int) -> int:
        """Return the number of tokens in the first ``laps`` rungs."""
        return sum(lap.tokens.size for lap in self.laps[:laps])

    def by_block(self, laps: Sequence[DocumentNLL]) -> Float:
        """Return [blocks], the nats per token in each block of the first rungs, from the NLL by piece."""
        means = [
            np.bincount(block, nll.total) / np.bincount(block, nll.num_tokens)
            for block, nll in zip(self.block, laps, strict=False)
        ]
        return np.concatenate(means)

    def whole(self, laps: Sequence[DocumentNLL]) -> DocumentNLL:
        """Return the NLL of the text by document, from the NLL of all rungs by piece."""
        document = np.concatenate(self.document)
        total = np.bincount(document, np.concatenate([lap.total for lap in laps]), self.num_documents)
        num_tokens = np.bincount(document, np.concatenate([lap.num_tokens for lap in laps]), self.num_documents)
        return DocumentNLL(total.astype(np.float64), num_tokens.astype(np.int64))


def _by_piece(blocks: TokenBlocks) -> tuple[TokenBlocks, NDArray[np.int64], NDArray[np.int64]]:
    """Return the blocks with pieces as documents, and the block and the document that each piece belongs to."""
    documents = tuple(blocks.documents)
    # Number each (block, document) pair that occurs as a piece
    piece_ids = np.arange(blocks.num_blocks)[:, None] * len(documents) + blocks.document
    pieces, piece = np.unique(piece_ids, return_inverse=True)
    block, document = np.divmod(pieces, len(documents))
    by_piece = piece.reshape(piece_ids.shape).astype(np.int32)
    return TokenBlocks(blocks.tokens, by_piece, tuple(documents[index] for index in document)), block, document


@dataclass(frozen=True)
class Estimate:
    """Estimate of the nats per token on a whole text from a part of it, with its standard error."""

    nats: float
    standard_error: float

    @classmethod
    def of(cls, seen: Float, others: Float, whole: Float, share: float) -> Estimate:
        """Estimate by ridge regression on other layouts.

        Args:
            seen: [blocks], nats per token in the blocks scored so far.
            others: [blocks, others], the same for the other layouts.
            whole: [others], nats per token of the other layouts on the whole text.
            share: share of the text that has been scored.
        """
        fit = Ridge.fit(others, seen)
        nats = seen.mean() + (whole - others.mean(0)) @ (fit.operator @ seen)
        return cls(float(nats), math.sqrt(fit.squared_error / len(seen) * (1.0 - share)))


@dataclass(frozen=True)
class _Stop:
    """Number of rungs after which a layout was stopped, and its estimate."""

    laps: int
    estimate: Estimate


@dataclass(frozen=True)
class Race:
    """Scorer of layouts with early stopping against incumbents.

    Attributes:
        model: model whose weights the layouts are put on.
        course: rungs of the text.
        batch_size: blocks per forward pass.
        cache: folder of finished scores on the whole text, shared with ``zero_shot``.
        lap_caches: folders of finished scores on each rung but the last.
    """

    model: PreTrainedModel
    course: RungSchedule
    batch_size: int
    cache: Path
    lap_caches: Sequence[Path]
    _wholes: dict[_Key, DocumentNLL] = field(default_factory=dict, init=False)  # NLL by document, by layout
    _laps: dict[tuple[_Key, int], DocumentNLL] = field(
        default_factory=dict, init=False
    )  # NLL by piece, by layout and rung

    def run(
        self, layouts: Sequence[Layout], rivals: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[Score]:
        """Score each layout as zero-shot ΔNLL against full attention; an estimate where it falls behind its incumbent.

        Args:
            layouts: layouts to score.
            rivals: incumbent of each layout, one of ``finished``; None scores the layout on the whole text.
            finished: layouts scored on the whole text, which the estimates regress on.
        """
        stops = self._stops(layouts, rivals, finished)
        complete = [rival if stop else layout for layout, rival, stop in zip(layouts, rivals, stops, strict=True)]
        full, *wholes = self._whole([None, *complete])
        return [self._score(whole, full, stop) for whole, stop in zip(wholes, stops, strict=True)]

    def _stops(
        self, layouts: Sequence[Layout], rivals: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[_Stop | None]:
        """Return where each layout is stopped; None if it is not."""
        stops: list[_Stop | None] = [None] * len(layouts)
        running = {number: _key(rival) for number, rival in enumerate(rivals) if rival is not None}
        if not running:
            return stops
        nats = {_key(layout): whole.mean for layout, whole in zip(finished, self._whole(finished), strict=True)}
        # After each rung, estimate every running layout and stop those far behind their incumbent
        for laps in range(1, len(self.course.laps)):
            finished_losses = np.stack(self._by_block(finished, laps), 1)
            share = self.course.num_tokens(laps) / self.course.num_tokens(len(self.course.laps))
            losses_by_layout = self._by_block([layouts[number] for number in running], laps)
            for (number, rival), losses in zip(list(running.items()), losses_by_layout, strict=True):
                estimate = Estimate.of(losses, finished_losses, np.array(list(nats.values())), share)
                if estimate.nats - nats[rival] > _BEHIND * estimate.standard_error:
                    stops[number] = _Stop(laps, estimate)
                    del running[number]
        return stops

    def _score(self, whole: DocumentNLL, full: DocumentNLL, stop: _Stop | None) -> Score:
        """Return the score of a layout from its own NLL, or from its estimate and its incumbent's NLL if stopped."""
        change = paired_difference(whole, full)
        if stop is None:
            return Score.of(change, self.course.num_tokens(len(self.course.laps)))
        scale = 100.0 / full.mean
        error = math.hypot(change.standard_error, scale * stop.estimate.standard_error)
        percent = scale * (stop.estimate.nats - full.mean)
        return Score(percent, error, self.course.num_tokens(stop.laps), stopped=True)

    def _by_block(self, layouts: Sequence[Layout], laps: int) -> list[Float]:
        """Return [blocks] for each layout, the nats per token in the blocks of the first rungs."""
        rungs = [self._lap(layouts, rung) for rung in range(laps)]
        return [self.course.by_block([rung[_key(layout)] for rung in rungs]) for layout in layouts]

    def _lap(self, layouts: Sequence[Layout | None], lap: int) -> dict[_Key, DocumentNLL]:
        """Return the NLL by piece of one rung, by layout, scoring the layouts that are missing."""
        is_last = lap == len(self.lap_caches)
        missing = {_key(layout): layout for layout in layouts if (_key(layout), lap) not in self._laps}
        if missing:
            scored = zero_shot(
                self.model,
                list(missing.values()),
                self.course.laps[lap],
                batch_size=self.batch_size,
                cache=None if is_last else self.lap_caches[lap],
            )
            self._laps.update(((key, lap), nll) for key, nll in zip(missing, scored, strict=True))
        return {_key(layout): self._laps[_key(layout), lap] for layout in layouts}

    def _whole(self, layouts: Sequence[Layout | None]) -> list[DocumentNLL]:
        """Return the NLL by document of the whole text for each layout, from the cache or by running all rungs."""
        for layout in layouts:
            if _key(layout) not in self._wholes:
                cached = read_score(self.cache, layout, self.course.num_documents)
                self._wholes.update({} if cached is None else {_key(layout): cached})
        missing = {_key(layout): layout for layout in layouts if _key(layout) not in self._wholes}
        laps = [self._lap(list(missing.values()), lap) for lap in range(len(self.course.laps))]
        for key, layout in missing.items():
            self._wholes[key] = self.course.whole([lap[key] for lap in laps])
            keep_score(self.cache, layout, self._wholes[key])
        return [self._wholes[_key(layout)] for layout in layouts]


def _key(layout: Layout | None) -> _Key:
    """Return the key of a layout in the score dictionaries."""
    return None if layout is None else layout.content_hash
