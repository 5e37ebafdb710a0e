"""Counters of the density probe: keys kept by every KV head, by domain, document, position and utility logit.

Memory is O(layers x KV heads), independent of the number of tokens. Moments over documents give the standard errors;
counts per document (per group of documents, beyond 256) are resampled by the bootstrap.

A document enters the moments as a whole, wherever its tokens are: what is left of a separate document beyond whole
blocks shares a later block with others. Its parts are kept until its last block is counted.

With torchrun, each rank counts its share of the text. Sums over ranks are exact, because all counts are integers. The
parts of a document that is in the shares of several ranks are merged before it enters the moments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from spkv_nas.artifacts.grid import Grid, head_cells
from spkv_nas.artifacts.histogram import group_documents
from spkv_nas.base.distributed import gathered, sum_over_processes
from spkv_nas.base.errors import UserError, not_finite
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import gates

NUM_POSITION_BUCKETS = 16
# Maximum tokens in the first position bucket; in longer blocks, widths grow geometrically
_FIRST_BUCKET = 128
# Of logits: u from 6e-6 to 1 - 6e-6, and tau is resolved to 0.0125 at worst
BIN_LIMIT = 12.0
BIN_WIDTH = 0.05
# Maximum cells of the histogram by document, whose bins merge 2, 4, ... fine bins to fit
DOCUMENT_CELLS = 20_000_000


@dataclass
class Counts:
    """Counts of one probe, on the model's device: ``P`` domains, ``L`` layers, ``H`` KV heads."""

    kept: torch.Tensor  # [P, L, H] tokens kept
    kept_squared: torch.Tensor  # [P, L, H] sum over documents of (kept tokens)^2
    kept_times_tokens: torch.Tensor  # [P, L, H] sum over documents of kept tokens x tokens
    bins: torch.Tensor  # [P * L * H * num_bins]
    position: torch.Tensor  # [L, H, buckets] tokens kept, by position in the document
    position_tokens: NDArray[np.int64]  # [buckets]
    tokens: NDArray[np.int64]  # [P]
    tokens_squared: NDArray[np.float64]  # [P] sum over documents of tokens^2
    document_kept: torch.Tensor  # [groups, L, H] tokens kept, by group of documents
    document_bins: torch.Tensor  # int32 [groups, L, H, coarse bins]
    document_tokens: NDArray[np.int64]  # [groups]
    # [documents] 1 for a document that was completed, 0 for one without text
    seen: NDArray[np.int64]
    wrong: torch.Tensor  # int64 [L, H] batches with a NaN utility


class _Part(NamedTuple):
    """Counts of the part of a document processed so far."""

    kept: torch.Tensor  # [L, H]
    tokens: int

    def with_(self, other: "_Part | None") -> "_Part":
        """Return the sum of this part and another of the same document, if there is one."""
        return self if other is None else _Part(self.kept + other.kept, self.tokens + other.tokens)


class Bins:
    """Bins of logits: fine by domain, 2 to 32 joined by document; the outer ones hold those beyond ``BIN_LIMIT``."""

    num_fine = round(2 * BIN_LIMIT / BIN_WIDTH) + 2

    def __init__(self, num_histograms: int) -> None:
        """Choose the coarse bin width so that ``num_histograms`` histograms by document fit in memory."""
        inner = self.num_fine - 2
        self._width = 2
        while (
            self._width < 32
            and num_histograms * (self.num_fine // self._width + 2) > DOCUMENT_CELLS
        ):
            self._width *= 2
        self.num_coarse = inner // self._width + 2

    def fine(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the fine bin index of each logit."""
        bins = ((logits + BIN_LIMIT) / BIN_WIDTH).floor_()
        return bins.clamp_(-1, self.num_fine - 2).long() + 1

    def coarse(self, fine: torch.Tensor) -> torch.Tensor:
        """Return the coarse bin index of each fine bin index."""
        return (fine - 1).div(self._width, rounding_mode="floor") + 1

    @staticmethod
    def edges(number: int) -> NDArray[np.float64]:
        """Return the inner edges of ``num_fine`` or ``num_coarse`` bins, [number - 1]."""
        return np.linspace(-BIN_LIMIT, BIN_LIMIT, number - 1)


def position_buckets(length: int) -> NDArray[np.int64]:
    """Assign each position of a block to a bucket.

    Buckets have equal widths if that gives the first at most 128 tokens. In longer blocks, widths grow by a constant
    ratio, because density falls fast at first and slowly later: in 131,072 tokens, the first bucket has 128 tokens and
    the last about 41,000.

    Returns:
        int64 [length], bucket index of each position.
    """
    number = min(NUM_POSITION_BUCKETS, length)
    if length <= number * _FIRST_BUCKET:
        return np.arange(length, dtype=np.int64) * number // length
    # The ratio solves 1 + ratio + ratio^2 + ... = length / first
    coefficients = [1.0] * (number - 1)
    roots = np.roots([*coefficients, 1.0 - length / _FIRST_BUCKET])
    is_growth = (abs(roots.imag) < 1e-9) & (roots.real > 1.0)
    ratio = roots[is_growth].real.item()
    widths = ratio ** np.arange(number - 1)
    ends = np.round(_FIRST_BUCKET * np.cumsum(widths))
    return np.searchsorted(ends, np.arange(length), side="right").astype(np.int64)


class GateCounter:
    """Accumulator of ``Counts`` over forward passes: call ``begin``, then ``see`` per layer, then ``end``.

    Logits are buffered until ``end``, so that a forward pass that fails counts nothing.
    """

    def __init__(
        self, blocks: TokenBlocks, heads_per_layer: Sequence[int], tau: float, device: torch.device
    ) -> None:
        """Allocate zero counts on ``device`` for ``blocks`` and a model with these KV heads by layer."""
        self._blocks = blocks
        self._tau = tau
        self.is_head = head_cells(heads_per_layer)  # bool [L, Hkv]
        grid = self.is_head.shape
        self._layers, self._heads = grid
        # Index domains and groups of documents, int64 [documents], and position buckets, int64 [T]
        number_of = {domain: number for number, domain in enumerate(blocks.domains)}
        self.domain_of = np.array([number_of[document.domain] for document in blocks.documents])
        self.group_of, num_groups = group_documents(self.domain_of, len(number_of))
        buckets = position_buckets(blocks.block_size)
        self.bucket_of = torch.from_numpy(buckets).to(device)
        # Allocate the counts
        self.bins = Bins(num_groups * self._layers * self._heads)
        sizes = (len(number_of), len(blocks.documents), num_groups)
        # Counts of finished passes; ``finish`` adds the moments of documents that may continue on another rank
        self.counts = _no_counts(sizes, grid, int(buckets[-1]) + 1, self.bins, device)
        self._logits: dict[int, torch.Tensor] = {}  # logits of the current pass, by layer
        self._first_block, self._last_block = _extents(blocks)  # of each document
        self._start: int | None = None  # first block of this rank
        # Documents with tokens in later passes, or on other ranks, by index
        self._open: dict[int, _Part] = {}

    def begin(self) -> None:
        """Start a forward pass and discard the logits of a failed one."""
        self._logits = {}

    def see(self, layer: int, logits: torch.Tensor, _is_text: torch.Tensor) -> None:
        """Buffer the utility logits [B, H, T] of one layer."""
        absent = self._heads - logits.shape[1]  # beyond the heads of the layer
        self._logits[layer] = pad(logits, (0, 0, 0, absent), value=-math.inf) if absent else logits

    def _prepare(self, start: int, stop: int) -> None:
        """Compute the documents, positions and histogram offsets of the n tokens of text in blocks ``start:stop``."""
        # Documents in these blocks, and their tokens, without filling
        tokens = self._blocks.marked(slice(start, stop))
        device = self.counts.kept.device
        is_filling = self._blocks.boundaries.is_filling(tokens)
        text = np.flatnonzero(~is_filling)
        documents = self._blocks.document[start:stop].ravel()[text]  # [n]
        self._numbers, index = np.unique(documents, return_inverse=True)
        self._text = torch.from_numpy(text).to(device)
        self._tokens = np.bincount(index, minlength=len(self._numbers))
        column = torch.from_numpy(index).to(device)  # [n], of each token's document
        self._membership = torch.nn.functional.one_hot(column, len(self._numbers)).float()
        # Buckets of their positions in the documents
        position = self._blocks.boundaries.positions(tokens).ravel()[text]
        self._bucket = self.bucket_of[torch.from_numpy(position).to(device)]
        num_buckets = len(self.counts.position_tokens)
        self.counts.position_tokens += np.bincount(self._bucket.cpu(), minlength=num_buckets)
        # Offsets of each token's domain and document in the flattened histograms
        domain = torch.from_numpy(self.domain_of[documents]).to(device)
        self._bin_base = domain * (self._layers * self._heads * self.bins.num_fine)
        self._kept = torch.zeros(self._layers, self._heads, len(self._numbers), device=device)
        self._column_base = column * (self._heads * self.bins.num_coarse)
        # Group of each document
        groups = self.group_of[self._numbers]
        self._groups = torch.from_numpy(groups).to(device)
        np.add.at(self.counts.document_tokens, groups, self._tokens)

    def _count(self, layer: int, logits: torch.Tensor) -> None:
        """Count the logits [B, H, T] of one layer."""
        is_wrong = logits.isnan().any(2)  # [B, H]
        self.counts.wrong[layer] += is_wrong.any(0)
        # NaN has no bin; ``finish`` refuses it
        logits = logits.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
        logits = logits.transpose(0, 1).flatten(1)[:, self._text]  # [H, n]
        # Count kept tokens by document and by position
        kept = gates.keeps(logits, self._tau).float()
        self._kept[layer] = kept @ self._membership
        self.counts.position[layer].index_add_(1, self._bucket, kept.double())
        # Add to the histograms by domain
        fine = self.bins.fine(logits)
        head = torch.arange(self._heads, device=logits.device)[:, None]
        head_of_all = head + layer * self._heads
        index = fine + head_of_all * self.bins.num_fine + self._bin_base
        self.counts.bins += torch.bincount(index.flatten(), minlength=self.counts.bins.numel())
        # Add to the coarse histograms by group of documents
        index = self.bins.coarse(fine) + head * self.bins.num_coarse + self._column_base
        shape = (len(self._numbers), self._heads, self.bins.num_coarse)
        coarse = torch.bincount(index.flatten(), minlength=math.prod(shape)).view(shape)
        self.counts.document_bins[:, layer].index_add_(0, self._groups, coarse.int())

    def end(self, start: int, number: int) -> None:
        """Count a pass over ``number`` blocks from ``start``, and add documents to the moments once complete."""
        self._prepare(start, start + number)
        for layer, logits in self._logits.items():
            self._count(layer, logits.to(self.counts.kept.device))
        self._logits = {}
        self.counts.document_kept.index_add_(0, self._groups, self._kept.permute(2, 0, 1).double())
        # Complete the documents that this rank has counted as a whole
        if self._start is None:
            self._start = start
        for column, document in enumerate(self._numbers.tolist()):
            part = _Part(self._kept[:, :, column].double(), int(self._tokens[column]))
            self._open[document] = part.with_(self._open.get(document))
        for document in list(self._open):
            begins_here = self._first_block[document] >= self._start
            if begins_here and self._last_block[document] < start + number:
                self._close(document, self._open.pop(document))

    def finish(self) -> Counts:
        """Return the counts; call on all ranks. Raises ``UserError``: a NaN utility, which would look like 0."""
        # Sum over ranks and reject NaN utilities
        shared = {
            document: part._replace(kept=part.kept.cpu()) for document, part in self._open.items()
        }
        for field in fields(self.counts):
            rank_counts = getattr(self.counts, field.name)
            setattr(self.counts, field.name, sum_over_processes(rank_counts))
        wrong = self.counts.wrong.nonzero().tolist()
        if wrong:
            raise UserError(
                not_finite("the utility", len(wrong), self.counts.wrong.numel(), tuple(wrong[0]))
            )
        # Merge the documents that several ranks have tokens of
        merged: dict[int, _Part] = {}
        for of_rank in gathered(shared):
            for document, part in of_rank.items():
                merged[document] = part.with_(merged.get(document))
        for document, part in merged.items():
            self._close(document, part)
        return self.counts

    def _close(self, document: int, part: _Part) -> None:
        """Add a complete document to the moments."""
        tokens = part.tokens
        domain = int(self.domain_of[document])
        kept = part.kept.to(self.counts.kept.device)
        self.counts.kept[domain] += kept
        self.counts.kept_squared[domain] += kept**2
        self.counts.kept_times_tokens[domain] += kept * tokens
        self.counts.tokens[domain] += tokens
        self.counts.tokens_squared[domain] += tokens**2
        self.counts.seen[document] += 1


def _extents(blocks: TokenBlocks) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and the last block with tokens of each document, int64 [documents] each."""
    first = np.full(len(blocks.documents), -1, dtype=np.int64)
    last = first.copy()
    for block, documents in enumerate(blocks.document):
        first[documents] = np.where(first[documents] < 0, block, first[documents])
        last[documents] = block
    return first, last


def _no_counts(
    sizes: tuple[int, int, int], grid: Grid, num_buckets: int, bins: Bins, device: torch.device
) -> Counts:
    """Return zero counts for ``sizes`` = (domains, documents, document groups)."""
    num_domains, num_documents, groups = sizes
    shape = (num_domains, *grid)
    kept, kept_squared, kept_times_tokens = (
        torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(3)
    )
    return Counts(
        kept=kept,
        kept_squared=kept_squared,
        kept_times_tokens=kept_times_tokens,
        bins=torch.zeros(math.prod(shape) * bins.num_fine, dtype=torch.int64, device=device),
        position=torch.zeros(*grid, num_buckets, dtype=torch.float64, device=device),
        position_tokens=np.zeros(num_buckets, dtype=np.int64),
        tokens=np.zeros(num_domains, dtype=np.int64),
        tokens_squared=np.zeros(num_domains),
        document_kept=torch.zeros(groups, *grid, dtype=torch.float64, device=device),
        document_bins=torch.zeros(groups, *grid, bins.num_coarse, dtype=torch.int32, device=device),
        document_tokens=np.zeros(groups, dtype=np.int64),
        seen=np.zeros(num_documents, dtype=np.int64),
        wrong=torch.zeros(grid, dtype=torch.int64, device=device),
    )
