"""Stop scoring a layout early once it is clearly behind an incumbent ("racing").

The text is scored in rungs: a quarter of its blocks, another quarter, the remaining half. After each rung
the score on the whole text is estimated, and a layout that is more than two standard errors behind its incumbent
is stopped with that estimate. Samplers learn from the estimate, so it must be accurate: with the plain
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
_MIN_BLOCKS = 8  # minimum number of scored blocks: a standard error over fewer is unreliable
_BEHIND = 2.0  # standard errors behind the incumbent at which a layout is stopped

Float = NDArray[np.float64]
_Key = str | None  # content hash of a layout; None is full attention


@dataclass(frozen=True)
class RungSchedule:
    """A text divided into rungs.

    Attributes:
        rungs: blocks of each rung; the part of a document inside one block, a piece, counts as a document.
        block: int64 [pieces] for each rung, the block of the rung that contains each piece.
        document: int64 [pieces] for each rung, the document of the text that each piece belongs to.
        num_documents: number of documents in the text.
    """

    rungs: tuple[TokenBlocks, ...]
    block: tuple[NDArray[np.int64], ...]
    document: tuple[NDArray[np.int64], ...]
    num_documents: int

    @classmethod
    def of(cls, text: TokenBlocks) -> RungSchedule | None:
        """Divide a text into rungs; None if it is too short for early stopping."""
        ends = [text.num_blocks // share for share in _SHARES]
        ends = [end for end in ends if end >= _MIN_BLOCKS or end == ends[-1]]
        if len(ends) == 1:
            return None
        rungs, block, document = zip(*map(_by_piece, text.nested(ends)), strict=True)
        return cls(rungs, block, document, len(text.documents))

    def num_tokens(self, num_rungs: int) -> int:
        """Return the number of tokens in the first ``num_rungs`` rungs."""
        return sum(rung.tokens.size for rung in self.rungs[:num_rungs])

    def by_block(self, rungs: Sequence[DocumentNLL]) -> Float:
        """Return [blocks], the nats per token in each block of the first rungs, from the NLL by piece."""
        means = [
            np.bincount(block, nll.total) / np.bincount(block, nll.num_tokens)
            for block, nll in zip(self.block, rungs, strict=False)
        ]
        return np.concatenate(means)

    def whole(self, rungs: Sequence[DocumentNLL]) -> DocumentNLL:
        """Return the NLL of the text by document, from the NLL of all rungs by piece."""
        document = np.concatenate(self.document)
        total = np.bincount(document, np.concatenate([rung.total for rung in rungs]), self.num_documents)
        num_tokens = np.bincount(document, np.concatenate([rung.num_tokens for rung in rungs]), self.num_documents)
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

    num_rungs: int
    estimate: Estimate


@dataclass(frozen=True)
class Race:
    """Scorer of layouts with early stopping against incumbents.

    Attributes:
        model: model whose weights the layouts are put on.
        schedule: rungs of the text.
        batch_size: blocks per forward pass.
        cache: folder of finished scores on the whole text, shared with ``zero_shot``.
        rung_caches: folders of finished scores on each rung but the last.
    """

    model: PreTrainedModel
    schedule: RungSchedule
    batch_size: int
    cache: Path
    rung_caches: Sequence[Path]
    _wholes: dict[_Key, DocumentNLL] = field(default_factory=dict, init=False)  # NLL by document, by layout
    _rungs: dict[tuple[_Key, int], DocumentNLL] = field(
        default_factory=dict, init=False
    )  # NLL by piece, by layout and rung

    def run(
        self, layouts: Sequence[Layout], incumbents: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[Score]:
        """Score each layout as zero-shot ΔNLL against full attention; an estimate where it falls behind its incumbent.

        Args:
            layouts: layouts to score.
            incumbents: incumbent of each layout, one of ``finished``; None scores the layout on the whole text.
            finished: layouts scored on the whole text, which the estimates regress on.
        """
        stops = self._stops(layouts, incumbents, finished)
        complete = [
            incumbent if stop else layout for layout, incumbent, stop in zip(layouts, incumbents, stops, strict=True)
        ]
        full, *wholes = self._whole([None, *complete])
        return [self._score(whole, full, stop) for whole, stop in zip(wholes, stops, strict=True)]

    def _stops(
        self, layouts: Sequence[Layout], incumbents: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[_Stop | None]:
        """Return where each layout is stopped; None if it is not."""
        stops: list[_Stop | None] = [None] * len(layouts)
        running = {number: _key(incumbent) for number, incumbent in enumerate(incumbents) if incumbent is not None}
        if not running:
            return stops
        nats = {_key(layout): whole.mean for layout, whole in zip(finished, self._whole(finished), strict=True)}
        # After each rung, estimate every running layout and stop those far behind their incumbent
        for num_rungs in range(1, len(self.schedule.rungs)):
            finished_losses = np.stack(self._by_block(finished, num_rungs), 1)
            share = self.schedule.num_tokens(num_rungs) / self.schedule.num_tokens(len(self.schedule.rungs))
            losses_by_layout = self._by_block([layouts[number] for number in running], num_rungs)
            for (number, incumbent), losses in zip(list(running.items()), losses_by_layout, strict=True):
                estimate = Estimate.of(losses, finished_losses, np.array(list(nats.values())), share)
                if estimate.nats - nats[incumbent] > _BEHIND * estimate.standard_error:
                    stops[number] = _Stop(num_rungs, estimate)
                    del running[number]
        return stops

    def _score(self, whole: DocumentNLL, full: DocumentNLL, stop: _Stop | None) -> Score:
        """Return the score of a layout from its own NLL, or from its estimate and its incumbent's NLL if stopped."""
        change = paired_difference(whole, full)
        if stop is None:
            return Score.of(change, self.schedule.num_tokens(len(self.schedule.rungs)))
        scale = 100.0 / full.mean
        error = math.hypot(change.standard_error, scale * stop.estimate.standard_error)
        percent = scale * (stop.estimate.nats - full.mean)
        return Score(percent, error, self.schedule.num_tokens(stop.num_rungs), stopped=True)

    def _by_block(self, layouts: Sequence[Layout], num_rungs: int) -> list[Float]:
        """Return [blocks] for each layout, the nats per token in the blocks of the first rungs."""
        rungs = [self._rung(layouts, rung) for rung in range(num_rungs)]
        return [self.schedule.by_block([rung[_key(layout)] for rung in rungs]) for layout in layouts]

    def _rung(self, layouts: Sequence[Layout | None], rung: int) -> dict[_Key, DocumentNLL]:
        """Return the NLL by piece of one rung, by layout, scoring the layouts that are missing."""
        is_last = rung == len(self.rung_caches)
        missing = {_key(layout): layout for layout in layouts if (_key(layout), rung) not in self._rungs}
        if missing:
            scored = zero_shot(
                self.model,
                list(missing.values()),
                self.schedule.rungs[rung],
                batch_size=self.batch_size,
                cache=None if is_last else self.rung_caches[rung],
            )
            self._rungs.update(((key, rung), nll) for key, nll in zip(missing, scored, strict=True))
        return {_key(layout): self._rungs[_key(layout), rung] for layout in layouts}

    def _whole(self, layouts: Sequence[Layout | None]) -> list[DocumentNLL]:
        """Return the NLL by document of the whole text for each layout, from the cache or by running all rungs."""
        for layout in layouts:
            if _key(layout) not in self._wholes:
                cached = read_score(self.cache, layout, self.schedule.num_documents)
                self._wholes.update({} if cached is None else {_key(layout): cached})
        missing = {_key(layout): layout for layout in layouts if _key(layout) not in self._wholes}
        rungs = [self._rung(list(missing.values()), rung) for rung in range(len(self.schedule.rungs))]
        for key, layout in missing.items():
            self._wholes[key] = self.schedule.whole([rung[key] for rung in rungs])
            keep_score(self.cache, layout, self._wholes[key])
        return [self._wholes[_key(layout)] for layout in layouts]


def _key(layout: Layout | None) -> _Key:
    """Return the key of a layout in the score dictionaries."""
    return None if layout is None else layout.content_hash
