"""Window costs: what each window of local heads costs each KV head, by one gradient for all limits of memory.

Every head attends with an equal mixture of K kinds of attention, several windows and global attention::

    out_h = sum_k share_hk out_hk,   share_hk = 1 / K
    loss  = KL(predictions of the unchanged model || predictions with mixtures), per token

The gradient of the loss with respect to share_hk is, to first order and up to a constant per head, what kind k alone
costs head h while all other heads are halfway between their kinds. Costs are differences to global attention. In full
attention the gradient would be 0, because the unchanged model is a minimum of the loss; and single-head ablations there
do not add up, because heads replace each other. The shares are not learned: after steps towards a limit of memory, the
gradients of shares that have reached 0 mislead (reports/LOG.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from spkv_nas.artifacts import defaults, head_scores, head_tables, kinds, local_layers
from spkv_nas.artifacts.grid import head_cells
from spkv_nas.base import arrays, distributed, statistics
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import block_tokens
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import nll
from spkv_nas.model import windows as model_windows
from spkv_nas.model.attention import LayerState, heads_per_layer
from spkv_nas.model.loss import mean_divergence
from spkv_nas.probing import frozen, head_gates, heads

WINDOWS = (32, 64, 128, 256, 512, 1024)  # those of at most half a block are measured
NUM_BLOCKS = 16  # whose gradients are averaged
NLL_BLOCKS = 4  # for the NLL of the unchanged model, which costs are compared with
Float = arrays.Float


def window_costs(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    windows: Sequence[int] = WINDOWS,
    sinks: int = 0,
    num_blocks: int = NUM_BLOCKS,
    seed: int = 0,
    name: str = "window-costs",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> head_scores.HeadScores:
    """Measure what windows cost every KV head on ``blocks``; the model is restored. Must be called on all ranks.

    Costs are those of ``windows``, in keys, of at most half a block, and of ``window``, which are the scores of the
    heads. ``num_blocks`` blocks are drawn at random by ``seed``. Other arguments are those of ``probe``.

    Returns:
        A table whose scores are the costs of ``window`` in nats per token, with standard errors over blocks, and whose
        ``window_costs`` are those of all windows.

    Raises ``UserError``: the blocks are not longer than the window, or the model cannot be hooked.
    """
    heads.check_window(blocks, window, sinks)
    measured = tuple(sorted({w for w in windows if w <= blocks.block_size // 2} | {window}))
    order = np.random.default_rng(seed).permutation(blocks.num_blocks)[:num_blocks]
    with model_windows.full_attention(model) as states:
        layers = local_layers.candidate_layers(states)
        gradients = _gradients(model, states, layers, blocks, order, measured, sinks, progress)
        native = local_layers.native_windows(states)
    unchanged = nll.document_nll(model, blocks.nested([min(NLL_BLOCKS, blocks.num_blocks)])[0], batch_size=1).mean
    # Costs against global attention, by block: [N, L, Hkv, W]
    costs = np.zeros((len(order), len(states), *gradients.shape[2:]))
    costs[:, layers] = gradients
    costs = costs[..., :-1] - costs[..., -1:]
    means, by_window = _means(blocks, order, costs, measured, window)
    costs_of_heads = np.where(head_cells(heads_per_layer(states))[..., None], by_window.values, np.nan)
    facts = {**(metadata or {}), "nll": round(unchanged, 4), "blocks": len(order), "seed": seed, **native}
    facts |= {"sinks": sinks} if sinks else {}
    record: dict[str, Any] = {"name": name, "metadata": facts, "kind": kinds.GAIN, "unit": kinds.NATS}
    record["heads_per_layer"] = heads_per_layer(states)
    num_passes = passes(len(measured)) * len(order) / blocks.num_blocks
    table = heads.signal_table("window-costs", means, window, passes=num_passes, tokens=blocks.tokens.size, **record)
    return replace(table, window_costs=replace(by_window, values=costs_of_heads))


def _means(
    blocks: TokenBlocks, order: arrays.Int, costs: Float, windows: tuple[int, ...], window: int
) -> tuple[list[heads.HeadMeans], head_tables.WindowCosts]:
    """Return the mean costs of one window, and of all, over the tokens to predict of every domain.

    ``costs`` [N, L, Hkv, W] are those of the blocks in ``order``, as ``_gradients`` returns them.
    """
    # The domain that most tokens of a block are of, or of several the first by name
    of_tokens = np.array([document.domain for document in blocks.documents])[blocks.document[order]]
    domain_of = np.array([pd.Series(row).mode()[0] for row in of_tokens])
    domains = tuple(sorted(set(domain_of.tolist())))
    means, by_domain = [], []
    for domain in domains:
        indices = order[domain_of == domain]
        some = np.moveaxis(costs[domain_of == domain], 0, -1)  # [L, Hkv, W, blocks]
        sizes = np.array([blocks.boundaries.num_measured(blocks.marked(index)[None]) for index in indices])
        mean, error = statistics.jackknife_ratio(some, sizes[:, 0] / (blocks.block_size - 1))
        score, tokens = windows.index(window), int(sizes[:, 1].sum())
        means.append(heads.HeadMeans(mean[..., score], domain, tokens, 0, error[..., score]))
        by_domain.append(mean)
    return means, head_tables.WindowCosts(windows, np.stack(by_domain), domains)


def _gradients(
    model: PreTrainedModel,
    states: Sequence[LayerState],
    layers: Sequence[int],
    blocks: TokenBlocks,
    order: arrays.Int,
    windows: Sequence[int],
    sinks: int,
    progress: Progress | None,
) -> Float:
    """Compute the gradients of the loss of every block in ``order`` [N, layers, Hkv, K]; must be called on all ranks.

    ``layers`` are those whose heads can be global. The loss is summed over the tokens to predict, of which blocks of
    separate documents have fewer than others, and divided by those of a block of one document.
    """
    grid = len(layers), max(heads_per_layer(states)), len(windows) + 1

    def gradients(part: range) -> list[Float]:
        """Compute those of some blocks in one pass."""
        indices = order[part.start : part.stop]
        shares = torch.full((len(layers), len(part), *grid[1:]), 1.0 / grid[2], device=model.device).requires_grad_()
        for layer, share in zip(layers, shares, strict=True):
            of_heads = share[:, : states[layer].num_kv_heads].to(model.dtype)
            states[layer].observer = frozen.Mixture(states[layer], of_heads, windows, sinks)
        inputs = blocks.boundaries.inputs(block_tokens(blocks.part(indices), 0, len(part), model.device))
        size = blocks.boundaries.num_measured(blocks.marked(indices))[0] / (blocks.block_size - 1)  # in whole blocks
        loss = mean_divergence(model, reference=partial(head_gates.unobserved, states), **inputs) * size
        (gradient,) = torch.autograd.grad(loss, shares)
        frozen.check_finite("window costs: the loss", float(loss.detach()), part.start + 1, gradient)
        return list(gradient.double().cpu().numpy().swapaxes(0, 1))

    # Each rank computes its share of the blocks
    rank_share = distributed.own_share(len(order))
    by_block = np.zeros((len(order), *grid))
    on_cpu = model.device.type == "cpu"  # where larger passes are no faster
    per_pass = max(1, defaults.LEARNING_TOKENS // blocks.block_size if on_cpu else len(rank_share))
    with frozen.frozen_within_memory(model, blocks.block_size, per_pass, attentions=grid[2]) as micro_batch:
        for index, gradient in zip(rank_share, micro_batch.run_all(gradients, rank_share, progress), strict=True):
            by_block[index] = gradient
    return distributed.sum_over_processes(by_block)


def passes(num_windows: int) -> float:
    """Return the passes over a block, for a mixture whose ``num_windows`` + 1 kinds take about as many passes again."""
    return defaults.FROZEN_STEP_PASSES + num_windows / 2
