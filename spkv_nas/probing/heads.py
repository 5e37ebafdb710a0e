"""Shared helpers for probing signals: chunked attention weights, per-document sums and means, and result tables.

Every table records its cost as ``passes`` over ``tokens`` of text, in units of one forward pass of the whole model. A
pass through some of the layers counts as that fraction. A backward pass through a frozen model counts as one forward
pass, because it computes gradients of activations only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from spkv_nas.artifacts import grid, head_scores, head_tables, kinds
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base import arrays, distributed, errors, statistics
from spkv_nas.data.blocks import TokenBlocks

# Attention weights per chunk: about the size of the CPU cache, but at least 16 rows of queries
_CHUNK_BYTES = 4 << 20
_CHUNK_ROWS = 16


def check_window(blocks: TokenBlocks, window: int, sinks: int = 0) -> None:
    """Raise ``UserError`` unless blocks are longer than the window and the sink tokens together."""
    if blocks.block_size <= window + sinks:
        sinks_text = f" and {sinks} sink token{'s' if sinks > 1 else ''}" if sinks else ""
        keys = f"{window} key{'s' if window > 1 else ''}"
        raise errors.UserError(
            f"blocks of {blocks.block_size} tokens have no keys beyond a window of "
            f"{keys}{sinks_text}\n"
            "give a smaller --window, or a larger --context"
        )


def attention_weights(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    window: int,
    start: int = 0,
    sink_logits: Tensor | None = None,
    starts: Tensor | None = None,
    softcap: float | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield causal softmax attention weights in float32, in chunks of queries so that memory is O(T).

    Args:
        q: queries [B, Hq, T, D].
        k: keys [B, Hkv, T, D].
        scale: factor applied to the dot products.
        window: number of recent keys visible to a query, including its own; T or more means all keys.
        start: position of the first query to return.
        sink_logits: learned sinks [Hq], which are in the denominator; None: none.
        starts: first key that a query can see, where its document starts, int [B, T]; None: 0.
        softcap: cap of the scores, or None.

    Yields:
        (positions of the chunk's queries, int64 [c]; weights [B, Hkv, G, c, n] on keys 0 to n - 1, G = Hq / Hkv).
    """
    # Group the query heads by KV head, and bound the size of a chunk
    B, Hq, T, D = q.shape
    Hkv = k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.to(dtype).view(B, Hkv, -1, T, D)
    keys = k.to(dtype).transpose(2, 3)
    num_groups = groups.shape[2]
    step = max(_CHUNK_ROWS, _CHUNK_BYTES // (4 * B * Hq * T))
    for first in range(start, T, step):
        # Scores of one chunk of queries against all earlier keys: [B, Hkv, G, c, n]
        stop = min(first + step, T)
        query = torch.arange(first, stop, device=q.device)
        key = torch.arange(stop, device=q.device)
        rows = groups[:, :, :, first:stop].reshape(B, Hkv, -1, D)
        products = rows @ keys[..., :stop] * scale
        scores = products.view(B, Hkv, num_groups, stop - first, stop)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        # Causal window mask, then softmax
        age = query[:, None] - key[None, :]
        hidden = (age < 0) | (age >= window)
        if starts is not None:
            hidden = (hidden | (key < starts[:, first:stop, None]))[:, None, None]
        scores.masked_fill_(hidden, -torch.inf)
        if sink_logits is None:
            yield query, scores.softmax(-1)
            continue
        # Let the sink logit take part in the softmax
        sink_scores = sink_logits.to(dtype).view(1, Hkv, -1, 1, 1).expand_as(scores[..., :1])
        weights = torch.cat([scores, sink_scores], -1).softmax(-1)
        yield query, weights[..., :-1]


@dataclass(frozen=True)
class HeadMeans:
    """Mean score of every head [L, Hkv] on one domain, the amount of text, and standard errors if available."""

    values: arrays.Float
    domain: str
    num_tokens: int
    num_documents: int
    standard_error: arrays.Float | None = None


class HeadSums:
    """Accumulator of per-token, per-head values, summed by document."""

    def __init__(
        self, blocks: TokenBlocks, num_layers: int, num_heads: int, device: torch.device
    ) -> None:
        """Allocate zero sums on ``device`` for the documents of ``blocks``."""
        self._blocks = blocks
        # float64 [L, H, documents], sum of the values
        self.sums = torch.zeros(
            num_layers, num_heads, len(blocks.documents), dtype=torch.float64, device=device
        )
        # int64 [documents], number of tokens summed
        self.counts = np.zeros(len(blocks.documents), dtype=np.int64)

    def add(
        self,
        start: int,
        layers: Sequence[Tensor],
        positions: slice,
        counted: arrays.Mask | None = None,
    ) -> None:
        """Add the values of each layer, [B, H, tokens], at ``positions`` of the B blocks from ``start`` on.

        Filling does not count, nor do the tokens that ``counted``, bool [B, tokens], leaves out.
        """
        part = slice(start, start + len(layers[0]))
        is_filling = self._blocks.boundaries.is_filling(self._blocks.marked(part))
        is_counted = ~is_filling[:, positions]
        if counted is not None:
            is_counted &= counted
        # Tokens that count, in the flattened blocks, and the document of each
        tokens = np.flatnonzero(is_counted)
        documents = self._blocks.document[part, positions].ravel()[tokens]
        self.counts += np.bincount(documents, minlength=len(self.counts))
        device = self.sums.device
        columns = torch.from_numpy(tokens.astype(np.int64)).to(device)
        owners = torch.from_numpy(documents.astype(np.int64)).to(device)
        for layer, values in enumerate(layers):
            rows = values.transpose(0, 1).flatten(1).to(device, torch.float64)  # [H, B * tokens]
            self.sums[layer, : len(rows)].index_add_(1, owners, rows[:, columns])

    def add_up(self) -> None:
        """Sum over all ranks after the last ``add``; must be called on all ranks."""
        self.sums = distributed.sum_over_processes(self.sums)
        self.counts = distributed.sum_over_processes(self.counts)

    def means(self, sums: arrays.Float | None = None) -> list[HeadMeans]:
        """Return ``domain_means`` of the accumulated sums, or of ``sums`` [L, Hkv, documents] over the same tokens."""
        return domain_means(
            self._blocks, self.sums.cpu().numpy() if sums is None else sums, self.counts
        )


def domain_means(blocks: TokenBlocks, sums: arrays.Float, counts: arrays.Int) -> list[HeadMeans]:
    """Compute token means by domain, with jackknife standard errors of the ratio estimator over documents.

    ``sums`` [L, Hkv, documents] are over each document's ``counts`` [documents] of tokens. There is one entry for each
    domain that has at least one counted token.
    """
    domain_of = np.array([document.domain for document in blocks.documents])
    means = []
    for domain in blocks.domains:
        selected = (domain_of == domain) & (counts > 0)
        if selected.any():
            mean, error = statistics.jackknife_ratio(sums[..., selected], counts[selected])
            num_tokens = int(counts[selected].sum())
            num_documents = int(selected.sum())
            means.append(HeadMeans(mean, domain, num_tokens, num_documents, error))
    return means


def score_rows(means: Sequence[HeadMeans], heads_per_layer: Sequence[int] = ()) -> pd.DataFrame:
    """Return a table's rows, one per layer, KV head and domain; of all cells without ``heads_per_layer``."""
    parts = []
    for part in means:
        is_head = np.ones(part.values.shape, dtype=bool)
        if heads_per_layer:
            is_head = grid.head_cells(heads_per_layer)
        layer, head = np.nonzero(is_head)
        error = np.nan if part.standard_error is None else part.standard_error[layer, head]
        columns = (
            layer,
            head,
            part.values[layer, head],
            part.domain,
            part.num_tokens,
            part.num_documents,
            error,
        )
        parts.append(pd.DataFrame(dict(zip(head_tables.COLUMNS, columns, strict=True))))
    return pd.concat(parts, ignore_index=True).sort_values(
        ["layer", "kv_head"], kind="stable", ignore_index=True
    )


def signal_table(
    signal: str,
    means: Sequence[HeadMeans],
    window: int,
    *,
    passes: float,
    tokens: int,
    name: str,
    metadata: Mapping[str, object],
    kind: str = kinds.SHARE,
    unit: str = kinds.SHARE_UNIT,
    heads_per_layer: Sequence[int] = (),
) -> head_scores.HeadScores:
    """Build the ``HeadScores`` table of a signal from its means by domain, at the cost of ``passes`` over ``tokens``.

    Cells beyond the heads of a layer are left out; without ``heads_per_layer`` all are heads. Shares are clipped to
    [0, 1], against rounding. ``metadata["model"]`` becomes the source of proposed layouts; ``kind`` is one of
    ``artifacts.kinds.KINDS``, with its ``unit``. Raises ``UserError``: a value is not finite.
    """
    # Reject NaN and infinity
    low, high = (0.0, 1.0) if kind == kinds.SHARE else (-np.inf, np.inf)
    for part in means:
        wrong = np.argwhere(~np.isfinite(part.values))
        if len(wrong):
            what = f"the score '{signal}'"
            first = tuple(wrong[0])
            raise errors.UserError(errors.not_finite(what, len(wrong), part.values.size, first))
    rows = score_rows(means, heads_per_layer)
    rows["score"] = rows["score"].clip(low, high)
    facts = {"signal": signal, "kind": kind, "unit": unit, "source": metadata.get("model")}
    cost = {"passes": round(passes, 2), "tokens": tokens}
    record = ProbeRecord.of({**facts, **cost, **metadata})
    return head_scores.HeadScores(name, rows, window=window, record=record)
