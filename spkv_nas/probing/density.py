"""Probing: one streaming pass over held-out text that measures what each KV head keeps.

SP-KV paper, "Measuring sparsity" (density rho: the share of tokens with u >= tau). Memory is O(layers x KV heads)
whatever the number of tokens: besides counts per domain, position and logit bin, moments over documents are kept, from
which the standard errors follow, and counts per document (per group of documents beyond 256), which are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.documents import DocumentCounts, group_documents
from spkv_nas.artifacts.histogram import LogitHistogram
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.checkpoint import gate_config
from spkv_nas.model.gates import keeps
from spkv_nas.model.hook import attention_layers, layer_predictor, layer_state, set_gate_mode

NUM_POSITION_BUCKETS = 16
BIN_LIMIT, BIN_WIDTH = 12.0, 0.05  # logits: u from 6e-6 to 1 - 6e-6; tau is resolved to 0.0125 at worst
DOCUMENT_CELLS = 20_000_000  # largest histogram by document: its bins are 2, 4, ... bins wide (0.1, 0.2, ... of logit)


@dataclass
class _Statistics:
    """Counts of one probe. ``P`` domains, ``L`` layers, ``H`` KV heads."""

    kept: Tensor  # [P, L, H] tokens kept
    kept_squared: Tensor  # [P, L, H] sum over documents of (kept tokens)^2
    kept_times_tokens: Tensor  # [P, L, H] sum over documents of kept tokens x tokens
    bins: Tensor  # [P * L * H * num_bins]
    position: Tensor  # [L, H, buckets]
    tokens: np.ndarray  # [P]
    tokens_squared: np.ndarray  # [P] sum over documents of tokens^2
    document_kept: Tensor  # [groups, L, H] tokens kept, by group of documents
    document_bins: Tensor  # int32 [groups, L, H, coarse bins]
    document_tokens: np.ndarray  # [groups]
    documents: list[set[int]] = field(default_factory=list)  # document numbers by domain


@torch.inference_mode()
def probe(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    tau: float | None = None,
    *,
    batch_size: int = 8,
    name: str = "probe",
    metadata: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DensityTable:
    """Density of every KV head of ``model`` on ``blocks``, with hard gates at ``tau`` as at inference.

    Args:
        model: a model with gates.
        blocks: held-out text; a document should be in consecutive blocks (it counts as a cluster per batch run).
        tau: threshold in [0, 1]; None takes the model's own.
        progress: called with (blocks done, blocks in all).

    Raises:
        UserError: the model has no gates, ``tau`` is outside [0, 1], or there is no text.
    """
    config = gate_config(model)
    if config is None:
        raise UserError("this model has no gates, so it has no density: train an SP-KV reference first")
    tau = config.tau if tau is None else tau
    if blocks.num_blocks == 0:
        raise UserError("there is no held-out text to probe")
    set_gate_mode(model, "hard", tau)
    was_training = model.training
    model.eval()
    collector = _Collector(model, blocks, tau)
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    try:
        for start in range(0, blocks.num_blocks, batch_size):
            stop = min(start + batch_size, blocks.num_blocks)
            collector.begin(start, stop)
            tokens = torch.from_numpy(blocks.tokens[start:stop].astype(np.int64)).to(model.device)
            body(input_ids=tokens, use_cache=False)
            collector.end()
            if progress is not None:
                progress(stop, blocks.num_blocks)
    finally:
        collector.close()
        model.train(was_training)
    return collector.table(name, tau, config.window, {**(metadata or {}), **_cache_format(model)})


def _cache_format(model: PreTrainedModel) -> dict[str, Any]:
    """What a cached key costs: the head dimension and the type of the model's weights."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"head_dim": int(head_dim), "dtype": str(model.dtype).removeprefix("torch.")}


class _Collector:
    """Forward hooks on the predictors that add each layer's logits to the statistics."""

    def __init__(self, model: PreTrainedModel, blocks: TokenBlocks, tau: float) -> None:
        self._blocks = blocks
        self._tau = tau
        self._domains = blocks.domains
        numbers = {domain: i for i, domain in enumerate(self._domains)}
        self._domain_of = np.array([numbers[d.domain] for d in blocks.documents])
        layers = list(attention_layers(model).values())
        self._heads = layer_state(layers[0]).num_kv_heads
        self._layers = len(layers)
        shape = (len(self._domains), self._layers, self._heads)
        self._num_bins = round(2 * BIN_LIMIT / BIN_WIDTH) + 2
        device = model.device
        length = blocks.block_size
        self._buckets = min(NUM_POSITION_BUCKETS, length)
        self._bucket_of = torch.arange(length, device=device) * self._buckets // length
        zeros = torch.zeros(shape, dtype=torch.float64, device=device)
        self._group_of, groups = group_documents(self._domain_of, len(self._domains))
        grid = (groups, self._layers, self._heads)
        self._coarse = next(
            width for width in (2, 4, 8, 16, 32)
            if width == 32 or math.prod(grid) * (self._num_bins // width + 2) <= DOCUMENT_CELLS
        )  # fmt: skip
        self._num_coarse = (self._num_bins - 2) // self._coarse + 2
        self._stats = _Statistics(
            kept=zeros,
            kept_squared=zeros.clone(),
            kept_times_tokens=zeros.clone(),
            bins=torch.zeros((*shape, self._num_bins), dtype=torch.int64, device=device).flatten(),
            position=torch.zeros(self._layers, self._heads, self._buckets, dtype=torch.float64, device=device),
            tokens=np.zeros(len(self._domains), dtype=np.int64),
            tokens_squared=np.zeros(len(self._domains)),
            document_kept=torch.zeros(grid, dtype=torch.float64, device=device),
            document_bins=torch.zeros((*grid, self._num_coarse), dtype=torch.int32, device=device),
            document_tokens=np.zeros(groups, dtype=np.int64),
            documents=[set() for _ in self._domains],
        )
        self._open: tuple[int, Tensor, int] | None = None  # last document: number, kept [L, H], tokens
        gated = [(i, layer_predictor(layer)) for i, layer in enumerate(layers)]
        self._handles = [p.register_forward_hook(self._hook(i)) for i, p in gated if p is not None]

    def begin(self, start: int, stop: int) -> None:
        """Prepare for the blocks ``start:stop``."""
        owner = self._blocks.document[start:stop]
        self._numbers, index = np.unique(owner, return_inverse=True)
        device = self._stats.kept.device
        index = index.reshape(-1)
        self._counts = np.bincount(index, minlength=len(self._numbers))
        self._membership = torch.zeros(index.size, len(self._numbers), device=device)
        self._membership[torch.arange(index.size), torch.from_numpy(index).to(device)] = 1.0
        domain = torch.from_numpy(self._domain_of[owner]).to(device)  # [B, T]
        self._bin_base = domain * (self._layers * self._heads * self._num_bins)
        self._batch_kept = torch.zeros(self._layers, self._heads, len(self._numbers), device=device)
        column = torch.from_numpy(index.reshape(owner.shape)).to(device)
        self._column_base = (column * (self._heads * self._num_coarse))[:, None, :]  # [B, 1, T]
        self._groups = torch.from_numpy(self._group_of[self._numbers]).to(device)
        np.add.at(self._stats.document_tokens, self._group_of[self._numbers], self._counts)

    def _hook(self, layer: int) -> Callable[[Any, Any, Tensor], None]:
        def collect(_module: Any, _args: Any, logits: Tensor) -> None:
            kept = keeps(logits, self._tau).float().transpose(0, 1)  # [H, B, T]
            self._batch_kept[layer] = kept.flatten(1) @ self._membership
            self._stats.position[layer].index_add_(1, self._bucket_of, kept.sum(1).double())
            bins = ((logits + BIN_LIMIT) / BIN_WIDTH).floor_().clamp_(-1, self._num_bins - 2).long() + 1
            head = torch.arange(self._heads, device=logits.device)[None, :, None]
            flat = bins + (head + layer * self._heads) * self._num_bins + self._bin_base[:, None, :]
            self._stats.bins += torch.bincount(flat.flatten(), minlength=self._stats.bins.numel())
            flat = (bins - 1).div(self._coarse, rounding_mode="floor") + 1 + head * self._num_coarse + self._column_base
            coarse = torch.bincount(flat.flatten(), minlength=len(self._numbers) * self._heads * self._num_coarse)
            coarse = coarse.view(len(self._numbers), self._heads, self._num_coarse)
            self._stats.document_bins[:, layer].index_add_(0, self._groups, coarse.int())

        return collect

    def end(self) -> None:
        """Close the batch: documents that ended are added to the moments, the last one stays open."""
        self._stats.document_kept.index_add_(0, self._groups, self._batch_kept.permute(2, 0, 1).double())
        for column, number in enumerate(self._numbers.tolist()):
            kept, tokens = self._batch_kept[:, :, column].double(), int(self._counts[column])
            if self._open is not None and self._open[0] == number:
                kept, tokens = kept + self._open[1], tokens + self._open[2]
                self._open = None
            self._close_document()
            self._open = (number, kept, tokens)

    def _close_document(self) -> None:
        if self._open is None:
            return
        number, kept, tokens = self._open
        domain = int(self._domain_of[number])
        self._stats.kept[domain] += kept
        self._stats.kept_squared[domain] += kept**2
        self._stats.kept_times_tokens[domain] += kept * tokens
        self._stats.tokens[domain] += tokens
        self._stats.tokens_squared[domain] += tokens**2
        self._stats.documents[domain].add(number)
        self._open = None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def table(self, name: str, tau: float, window: int, metadata: dict[str, Any]) -> DensityTable:
        """The density table of everything seen."""
        self._close_document()
        stats = self._stats
        present = [i for i, tokens in enumerate(stats.tokens) if tokens]
        num_documents = np.array([len(seen) for seen in stats.documents])
        kept = stats.kept.cpu().numpy()
        tokens = stats.tokens.reshape(-1, 1, 1)
        density = kept / np.maximum(tokens, 1)
        spread = (
            stats.kept_squared.cpu().numpy()
            - 2 * density * stats.kept_times_tokens.cpu().numpy()
            + density**2 * stats.tokens_squared.reshape(-1, 1, 1)
        )
        clusters = num_documents.reshape(-1, 1, 1)
        error = np.sqrt(np.maximum(spread, 0.0) * clusters / np.maximum(clusters - 1, 1)) / np.maximum(tokens, 1)
        rows = [
            {
                "layer": layer,
                "kv_head": head,
                "density": float(density[domain, layer, head]),
                "domain": self._domains[domain],
                "num_tokens": int(stats.tokens[domain]),
                "num_documents": int(num_documents[domain]),
                "standard_error": float(error[domain, layer, head]) if num_documents[domain] > 1 else np.nan,
            }
            for layer in range(self._layers)
            for head in range(self._heads)
            for domain in present
        ]
        counts = stats.bins.reshape(len(self._domains), self._layers, self._heads, self._num_bins).cpu().numpy()
        histogram = LogitHistogram(
            edges=np.linspace(-BIN_LIMIT, BIN_LIMIT, self._num_bins - 1),
            counts=counts[present],
            domains=tuple(self._domains[i] for i in present),
        )
        return DensityTable(
            name=name,
            rows=pd.DataFrame(rows),
            tau=tau,
            window=window,
            positions=self._positions(),
            histogram=histogram,
            documents=self._documents(present),
            metadata=metadata,
        )

    def _documents(self, present: list[int]) -> DocumentCounts:
        stats = self._stats
        domain = np.empty(len(stats.document_tokens), dtype=np.int64)
        domain[self._group_of] = self._domain_of
        seen = stats.document_tokens > 0
        return DocumentCounts(
            kept=stats.document_kept.cpu().numpy()[seen],
            tokens=stats.document_tokens[seen],
            domain=np.searchsorted(present, domain[seen]),
            domains=tuple(self._domains[i] for i in present),
            bins=stats.document_bins.cpu().numpy()[seen],
            edges=np.linspace(-BIN_LIMIT, BIN_LIMIT, self._num_coarse - 1),
        )

    def _positions(self) -> pd.DataFrame:
        bucket_of = self._bucket_of.cpu().numpy()
        width = np.bincount(bucket_of)
        start = np.concatenate([[0], np.cumsum(width)[:-1]])
        num_tokens = width * (int(self._stats.tokens.sum()) // self._blocks.block_size)
        kept = self._stats.position.cpu().numpy()
        layer, head, bucket = (axis.ravel() for axis in np.indices(kept.shape))
        return pd.DataFrame(
            {
                "layer": layer,
                "kv_head": head,
                "start": start[bucket],
                "end": (start + width)[bucket],
                "density": kept.ravel() / np.maximum(num_tokens[bucket], 1),
                "num_tokens": num_tokens[bucket],
            }
        )
