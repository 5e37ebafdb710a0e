"""What the signals share: attention weights by chunks of queries, means over documents, a table of them.

Every table says what it took: ``passes`` over ``tokens`` of text, each as much work as one forward pass of the whole
model. A pass of some layers counts as its share of them; a backward pass through a frozen model as one, because it
makes gradients of activations alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from spkv_nas.artifacts.head_score_rows import COLUMNS, NATS
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.distributed import sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.statistics import jackknife_ratio
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.hooks import not_finite

_CHUNK_BYTES, _CHUNK_ROWS = 4 << 20, 16  # of one chunk's attention weights: near the processor's cache; at least rows


def check_window(blocks: TokenBlocks, window: int, sinks: int = 0) -> None:
    """Raise ``UserError`` unless blocks have keys that a window and the first keys, the sinks, leave out."""
    if blocks.block_size <= window + sinks:
        beside = f" and {sinks} sinks" if sinks else ""
        raise UserError(
            f"blocks of {blocks.block_size} tokens have nothing outside a window of {window} keys{beside}\n"
            "give a smaller --window, or a larger --block-size"
        )


def attention_weights(
    q: Tensor, k: Tensor, scale: float, *, window: int, start: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Softmax attention weights in float32, by chunks of queries, so that memory is O(T).

    Args:
        q: [B, Hq, T, D].
        k: [B, Hkv, T, D].
        window: visible recent keys, the query's own included; T or more is all of them.
        start: the first query wanted.

    Yields:
        (positions of the chunk's queries, int64 [c]; weights [B, Hkv, G, c, n] on keys 0 to n - 1, G = Hq / Hkv).
    """
    batch, num_heads, length, size = q.shape
    groups = q.to(torch.promote_types(q.dtype, torch.float32)).view(batch, k.shape[1], -1, length, size)
    keys = k.to(groups.dtype).transpose(2, 3)
    step = max(_CHUNK_ROWS, _CHUNK_BYTES // (4 * batch * num_heads * length))
    for first in range(start, length, step):
        stop = min(first + step, length)
        query, key = torch.arange(first, stop, device=q.device), torch.arange(stop, device=q.device)
        rows = groups[:, :, :, first:stop].reshape(batch, k.shape[1], -1, size)
        scores = (rows @ keys[..., :stop] * scale).view(*groups.shape[:3], stop - first, stop)
        age = query[:, None] - key[None, :]
        yield query, scores.masked_fill_((age < 0) | (age >= window), -torch.inf).softmax(-1)


@dataclass(frozen=True)
class HeadMeans:
    """Values of one domain [L, Hkv], and of how much text; errors where known."""

    values: NDArray[np.float64]
    domain: str
    num_tokens: int
    num_documents: int
    standard_error: NDArray[np.float64] | None = None


class HeadSums:
    """Sums of a value per token and head, by document.

    Attributes:
        sums: float64 [L, H, documents].
        counts: int64 [documents], tokens.
    """

    def __init__(self, blocks: TokenBlocks, num_layers: int, num_heads: int, device: torch.device) -> None:
        self._blocks = blocks
        self.sums = torch.zeros(num_layers, num_heads, len(blocks.documents), dtype=torch.float64, device=device)
        self.counts = np.zeros(len(blocks.documents), dtype=np.int64)

    def count(self, start: int, stop: int, positions: slice) -> None:
        """The tokens at ``positions`` of the blocks ``start:stop`` are those that ``add`` gets next, once per layer."""
        owner = self._blocks.document[start:stop, positions].ravel()
        self.counts += np.bincount(owner, minlength=len(self.counts))
        self._owner = torch.from_numpy(owner.astype(np.int64)).to(self.sums.device)

    def add(self, layer: int, values: Tensor) -> None:
        """``values`` [B, H, tokens] of the tokens that ``count`` announced."""
        rows = values.transpose(0, 1).flatten(1).to(self.sums.device, torch.float64)
        self.sums[layer].index_add_(1, self._owner, rows)

    def add_up(self) -> None:
        """Take in what the other processes have added; collective, once all is there."""
        self.sums, self.counts = sum_over_processes(self.sums), sum_over_processes(self.counts)

    def means(self, sums: NDArray[np.float64] | None = None) -> list[HeadMeans]:
        """``domain_means`` of what was added; of other ``sums`` over the same tokens if given."""
        return domain_means(self._blocks, self.sums.cpu().numpy() if sums is None else sums, self.counts)


def domain_means(blocks: TokenBlocks, sums: NDArray[np.float64], counts: NDArray[np.int64]) -> list[HeadMeans]:
    """Means over tokens by domain, errors those of a ratio estimator by document.

    Args:
        sums: [L, Hkv, documents], of the tokens of each document of ``blocks``.
        counts: [documents], how many these are.
    """
    domain_of = np.array([document.domain for document in blocks.documents])
    means = []
    for domain in blocks.domains:
        seen = (domain_of == domain) & (counts > 0)
        if seen.any():
            mean, error = jackknife_ratio(sums[..., seen], counts[seen])
            means.append(HeadMeans(mean, domain, int(counts[seen].sum()), int(seen.sum()), error))
    return means


def signal_table(
    signal: str,
    means: Sequence[HeadMeans],
    window: int,
    *,
    passes: float,
    tokens: int,
    name: str,
    metadata: Mapping[str, Any],
) -> HeadScores:
    """A signal in place of densities; ``metadata`` says what it is, and what its layouts give as their source.

    Args:
        means: those of a signal in nats are kept as they are, where ``metadata`` has it as ``unit``; those of others
            lie in [0, 1] but for rounding.
        passes: forward passes that it took, over ``tokens`` each.

    Raises:
        UserError: a value is not finite.
    """
    low, high = (-np.inf, np.inf) if metadata.get("unit") == NATS else (0.0, 1.0)
    for part in means:
        wrong = np.argwhere(~np.isfinite(part.values))
        if len(wrong):
            raise UserError(not_finite(f"the score '{signal}'", len(wrong), part.values.size, tuple(wrong[0])))
    parts = []
    for part in means:
        layer, head = (axis.ravel() for axis in np.indices(part.values.shape))
        error = np.nan if part.standard_error is None else part.standard_error.ravel()
        columns = (layer, head, part.values.ravel().clip(low, high), part.domain, part.num_tokens, part.num_documents)
        parts.append(pd.DataFrame(dict(zip(COLUMNS, (*columns, error), strict=True))))
    rows = pd.concat(parts, ignore_index=True).sort_values(["layer", "kv_head"], kind="stable", ignore_index=True)
    facts = {"signal": signal, "source": metadata.get("model"), "passes": round(passes, 2), "tokens": tokens}
    return HeadScores(name, rows, window=window, metadata={**facts, **metadata})
