"""Probing: one streaming pass over held-out text that measures what each KV head keeps.

SP-KV paper, "Measuring sparsity" (density rho: the share of tokens with u >= tau).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.defaults import BLOCK_SIZE
from spkv_nas.artifacts.document_counts import DocumentCounts
from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.histogram import LogitHistogram
from spkv_nas.base.device import dtype_name
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.base.statistics import clustered_error
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.model.attention import LayerState, layer_states
from spkv_nas.model.config_section import gate_config
from spkv_nas.model.hooks import watch_logits
from spkv_nas.model.model_shape import config_shape
from spkv_nas.model.modes import evaluation_mode, gate_mode
from spkv_nas.probing.counting import GateCounter


@torch.inference_mode()
def probe(
    model: PreTrainedModel,
    blocks: TokenBlocks | Iterable[str],
    tau: float | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 8,
    name: str = "probe",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> HeadScores:
    """Density of every KV head of ``model`` on ``blocks``, with hard gates at ``tau`` as at inference.

    Collective: each process of torchrun runs its share of the blocks, and all have the whole table.

    Args:
        model: a model with gates, which are left as they were.
        blocks: held-out text; a document should be in consecutive blocks (it counts as a cluster per batch run).
            Strings are made into blocks of the default size, or of the model's length if that is less.
        tau: threshold in [0, 1]; None takes the model's own.
        tokenizer: the model's, needed with strings.
        progress: called with (blocks done, in all) of this process.

    Raises:
        UserError: the model has no gates, ``tau`` is outside [0, 1], there is no text, or no tokenizer for it.
    """
    config = gate_config(model)
    if config is None:
        raise UserError("this model has no gates, so it has no density: train an SP-KV reference first")
    tau = config.tau if tau is None else tau
    blocks = blocks if isinstance(blocks, TokenBlocks) else text_blocks(model, blocks, tokenizer)
    if blocks.num_blocks == 0:
        raise UserError("there is no held-out text to probe")
    states = layer_states(model)
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    with gate_mode(model, "hard", tau), evaluation_mode(model):
        counter = GateCounter(blocks, (len(states), states[0].num_kv_heads), tau, model.device)

        def run(_start: int, tokens: Tensor) -> int:
            counter.begin()
            body(input_ids=tokens, use_cache=False)
            return len(tokens)

        with watch_logits(model, counter.see):
            run_own_batches(run, counter.end, blocks, batch_size, model.device, progress)
    counts = counter.finish()
    present = [i for i, number in enumerate(counts.tokens) if number]
    table = HeadScores(
        name=name,
        rows=_rows(counter, blocks.domains, present),
        tau=tau,
        window=config.window,
        positions=_positions(counter, blocks.block_size),
        histogram=_histogram(counter, blocks.domains, present),
        documents=_documents(counter, blocks.domains, present),
        metadata={**_cache_format(model), **_price(config), **(metadata or {})},
    )
    return table if config.target_density is None else _with_reached(table, config, states)


def text_blocks(model: PreTrainedModel, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase | None) -> TokenBlocks:
    """Make texts into blocks of the default size, or of the model's length if that is less. Raises ``UserError``."""
    if tokenizer is None:
        raise UserError("texts need the model's tokenizer: probe(model, texts, tokenizer=tokenizer)")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return build_blocks(texts, tokenizer, min(BLOCK_SIZE, positions or BLOCK_SIZE))


def _price(config: GateConfig) -> dict[str, Any]:
    """What the gates learned at."""
    known = {"target_density": config.target_density, "price": config.price or None}
    return {name: value for name, value in known.items() if value is not None}


def _with_reached(table: HeadScores, config: GateConfig, states: Sequence[LayerState]) -> HeadScores:
    """Record the density that gates reach at their own threshold, to be held against the target of their price."""
    with_gates = [state.gate_window is not None for state in states]  # layers that are local by design have none
    reached = float(table.at_tau(config.tau).density[with_gates].mean())
    return replace(table, metadata={**table.metadata, "reached_density": round(reached, 4)})


def _cache_format(model: PreTrainedModel) -> dict[str, Any]:
    """What a cached key costs: the head dimension and the type of the model's weights."""
    return {"head_dim": config_shape(model.config).head_dim, "dtype": dtype_name(model.dtype)}


def _rows(counter: GateCounter, domains: tuple[str, ...], present: list[int]) -> pd.DataFrame:
    """The rows of the density table, of the domains of which there was text."""
    counts = counter.counts
    num_documents = np.bincount(counter.domain_of[counts.seen > 0], minlength=len(domains))
    kept = counts.kept.cpu().numpy()
    tokens = counts.tokens.reshape(-1, 1, 1)
    density = kept / np.maximum(tokens, 1)
    squares = (
        counts.kept_squared.cpu().numpy()
        - 2 * density * counts.kept_times_tokens.cpu().numpy()
        + density**2 * counts.tokens_squared.reshape(-1, 1, 1)
    )
    error = clustered_error(squares, num_documents.reshape(-1, 1, 1), tokens)
    rows = [
        {
            "layer": layer,
            "kv_head": head,
            "density": float(density[domain, layer, head]),
            "domain": domains[domain],
            "num_tokens": int(counts.tokens[domain]),
            "num_documents": int(num_documents[domain]),
            "standard_error": float(error[domain, layer, head]),
        }
        for layer, head in np.ndindex(density.shape[1:])
        for domain in present
    ]
    return pd.DataFrame(rows)


def _histogram(counter: GateCounter, domains: tuple[str, ...], present: list[int]) -> LogitHistogram:
    counts = counter.counts
    bins = counts.bins.reshape(*counts.kept.shape, counter.bins.num_fine).cpu().numpy()
    return LogitHistogram(
        edges=counter.bins.fine_edges, counts=bins[present], domains=tuple(domains[i] for i in present)
    )


def _documents(counter: GateCounter, domains: tuple[str, ...], present: list[int]) -> DocumentCounts:
    counts = counter.counts
    domain = np.empty(len(counts.document_tokens), dtype=np.int64)
    domain[counter.group_of] = counter.domain_of
    seen = counts.document_tokens > 0
    return DocumentCounts(
        kept=counts.document_kept.cpu().numpy()[seen],
        tokens=counts.document_tokens[seen],
        domain=np.searchsorted(present, domain[seen]),
        domains=tuple(domains[i] for i in present),
        bins=counts.document_bins.cpu().numpy()[seen],
        edges=counter.bins.coarse_edges,
    )


def _positions(counter: GateCounter, block_size: int) -> pd.DataFrame:
    """Density by position in the block."""
    width = np.bincount(counter.bucket_of.cpu().numpy())
    start = np.concatenate([[0], np.cumsum(width)[:-1]])
    num_tokens = width * (int(counter.counts.tokens.sum()) // block_size)
    kept = counter.counts.position.cpu().numpy()
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
