"""Density probe: measure the share of tokens that each KV head keeps, in one streaming pass over held-out text.

SP-KV paper, "Measuring sparsity": density rho is the share of tokens whose utility u is at least tau.
"""

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.histogram import DocumentCounts, LogitHistogram
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base import errors, statistics
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import attention, config_section, modes
from spkv_nas.model.placement import input_device
from spkv_nas.probing.counting import GateCounter
from spkv_nas.probing.heads import HeadMeans, score_rows


@torch.inference_mode()
def probe(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    tau: float | None = None,
    *,
    batch_size: int = 8,
    name: str = "probe",
    metadata: dict[str, object] | None = None,
    progress: Progress | None = None,
) -> HeadScores:
    """Measure the density of every KV head on ``blocks``, with hard gates at ``tau`` as at inference.

    Must be called on all ranks: each rank runs its share of the blocks and returns the whole table.

    Each document is one cluster of the standard errors. ``batch_size`` blocks make a forward pass. Other arguments are
    those of ``measure.probe``.

    Raises ``UserError``: the model has no gates, or ``tau`` is outside [0, 1].
    """
    config = config_section.gate_config(model)
    if config is None:
        raise errors.UserError(
            "this model has no gates, so it has no density: train an SP-KV reference model first"
        )
    tau = config.tau if tau is None else tau
    # Count kept tokens while the model runs with hard gates
    states = attention.layer_states(model)
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    with modes.gate_mode(model, "hard", tau), modes.evaluation_mode(model):
        counter = GateCounter(blocks, attention.heads_per_layer(states), tau, input_device(model))

        def run(_start: int, tokens: torch.Tensor) -> int:
            counter.begin()
            body(**blocks.boundaries.inputs(tokens), use_cache=False)
            return len(tokens)

        with attention.watch_logits(model, counter.see):
            run_own_batches(run, counter.end, blocks, batch_size, input_device(model), progress)

    counter.finish()
    record = ProbeRecord.of({**_price(config), **(metadata or {})})
    table = _table(counter, blocks, config, tau, name, record)
    if config.target_density is None:
        return table
    # Add the density reached at the gates' own threshold, to compare with the target density. Sliding-window layers
    # have no gates
    has_gates = np.array([state.gate_window is not None for state in states])
    density = table.at_tau(config.tau).density
    reached = float(density[table.is_head & has_gates[:, None]].mean())
    return table.with_record(reached_density=round(reached, 4))


def _table(
    counter: GateCounter,
    blocks: TokenBlocks,
    config: GateConfig,
    tau: float,
    name: str,
    record: ProbeRecord,
) -> HeadScores:
    """Build the density table of finished counts, with the domains that have text."""
    present = np.flatnonzero(counter.counts.tokens).tolist()
    return HeadScores(
        name=name,
        rows=_rows(counter, blocks.domains, present),
        tau=tau,
        window=config.window,
        positions=_positions(counter),
        histogram=_histogram(counter, blocks.domains, present),
        documents=_documents(counter, blocks.domains, present),
        record=record,
    )


def _price(config: GateConfig) -> dict[str, object]:
    """Return the target density and the price of keys that the gates were trained with, if any."""
    settings = {"target_density": config.target_density, "price": config.price or None}
    return {name: value for name, value in settings.items() if value is not None}


def _rows(counter: GateCounter, domains: tuple[str, ...], present: list[int]) -> pd.DataFrame:
    """Build the rows of the density table, with clustered standard errors, for the domains ``present``."""
    counts = counter.counts
    num_documents = np.bincount(counter.domain_of[counts.seen > 0], minlength=len(domains))
    kept = counts.kept.cpu().numpy()
    kept_squared = counts.kept_squared.cpu().numpy()
    kept_times_tokens = counts.kept_times_tokens.cpu().numpy()
    tokens = counts.tokens.reshape(-1, 1, 1)
    tokens_squared = counts.tokens_squared.reshape(-1, 1, 1)
    density = kept / np.maximum(tokens, 1)
    # Sum over documents of (kept - density * tokens)^2
    squares = kept_squared - 2 * density * kept_times_tokens + density**2 * tokens_squared
    error = statistics.clustered_error(squares, num_documents.reshape(-1, 1, 1), tokens)
    means = [
        HeadMeans(
            values=density[index],
            domain=domains[index],
            num_tokens=int(counts.tokens[index]),
            num_documents=int(num_documents[index]),
            standard_error=error[index],
        )
        for index in present
    ]
    return score_rows(means, counter.is_head.sum(1).tolist())


def _histogram(
    counter: GateCounter, domains: tuple[str, ...], present: list[int]
) -> LogitHistogram:
    """Build the histogram of utility logits for the domains ``present``."""
    counts = counter.counts
    num_bins = counter.bins.num_fine
    bins = counts.bins.reshape(*counts.kept.shape, num_bins).cpu().numpy()
    return LogitHistogram(
        edges=counter.bins.edges(num_bins),
        counts=bins[present],
        domains=tuple(domains[index] for index in present),
    )


def _documents(
    counter: GateCounter, domains: tuple[str, ...], present: list[int]
) -> DocumentCounts:
    """Build the counts per document (or group of documents), which bootstrap resampling uses."""
    counts = counter.counts
    # Find the domain of each group of documents
    domain = np.empty(len(counts.document_tokens), dtype=np.int64)
    domain[counter.group_of] = counter.domain_of
    has_text = counts.document_tokens > 0
    return DocumentCounts(
        kept=counts.document_kept.cpu().numpy()[has_text],
        tokens=counts.document_tokens[has_text],
        domain=np.searchsorted(present, domain[has_text]),
        domains=tuple(domains[index] for index in present),
        bins=counts.document_bins.cpu().numpy()[has_text],
        edges=counter.bins.edges(counter.bins.num_coarse),
    )


def _positions(counter: GateCounter) -> pd.DataFrame:
    """Build the table of density by position in the block, or in separate documents."""
    width = np.bincount(counter.bucket_of.cpu().numpy())
    start = np.concatenate([[0], np.cumsum(width)[:-1]])
    num_tokens = counter.counts.position_tokens
    kept = counter.counts.position.cpu().numpy()
    # List heads and buckets that have tokens as rows
    layer, head, bucket = np.nonzero(counter.is_head[..., None] & (num_tokens > 0))
    return pd.DataFrame(
        {
            "layer": layer,
            "kv_head": head,
            "start": start[bucket],
            "end": (start + width)[bucket],
            "density": kept[layer, head, bucket] / num_tokens[bucket],
            "num_tokens": num_tokens[bucket],
        }
    )
