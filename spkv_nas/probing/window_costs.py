"""Window costs: what each window of local heads costs each KV head, by a second-order expansion around the model.

The loss of a layout is the divergence of its predictions from the unchanged model's, which is the minimum of it, so the
first derivatives are 0. To second order, with z_h the change of the attention of head h::

    KL(layout) = sum_h 1/2 z_h F_hh z_h  +  sum_{h < j} z_h F_hj z_j        F: Fisher information of the predictions

The cost of window k to head h is the first term, what it costs the head alone, and half of the second with all other
heads at the widest window, as most heads are in layouts that lose little. The sum of the costs of the widest window is
then the loss of that layout; others are predicted as if their heads disturbed each other as little.

* The head alone: the mean square of the gradients of the NLL of tokens that the model itself draws, which is the Fisher
  information (``loss.sampled_nlls``). No single head is ever made local, so all heads take as long as one.
* Other heads: the gradient of the divergence halfway to the widest window, without the head's own part.

Single-head ablations would measure the first term head by head. An equal mixture of all windows, one gradient of which
gave the costs before, leaves most of the first term out: on SmolLM2-135M-Instruct 13 heads at 32 keys were predicted to
gain and lost .05 nats (reports/LOG.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.artifacts import defaults, head_scores, head_tables, kinds, local_layers
from spkv_nas.artifacts.grid import head_cells
from spkv_nas.base import arrays, distributed, statistics
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import block_tokens
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import nll
from spkv_nas.model import loss
from spkv_nas.model import windows as model_windows
from spkv_nas.model.attention import LayerState, heads_per_layer
from spkv_nas.model.placement import input_device
from spkv_nas.probing import frozen, head_gates, heads

NARROWEST = 32  # keys, of the narrowest window; the others are its doubles up to half a block
# Blocks whose costs are averaged: 16, or fewer with 32,768 tokens in all, but at least 4
MOST_BLOCKS = 16
NUM_TOKENS = 32_768
FEWEST_BLOCKS = 4
# Draws of tokens after every prefix: of all blocks together, and of each, at least. The mean of the squares of a
# gradient has a relative error of sqrt(2 / draws), however long the blocks are
ALL_DRAWS = 16
DRAWS = 2
NLL_BLOCKS = 4  # for the NLL of the unchanged model, which costs are compared with
Float = arrays.Float


def measured_windows(block_size: int) -> tuple[int, ...]:
    """Return the windows that are measured on blocks of ``block_size`` tokens, ascending: none beyond half a block.

    More of a block's keys than half are visible to most of its queries, which would leave nothing to measure.
    """
    octaves = max(0, (block_size // (2 * NARROWEST)).bit_length())
    return tuple(NARROWEST << octave for octave in range(octaves))


def usual_blocks(block_size: int) -> int:
    """Return the number of blocks of ``block_size`` tokens whose costs are averaged, if a text has them."""
    return min(MOST_BLOCKS, max(FEWEST_BLOCKS, NUM_TOKENS // block_size))


def num_draws(num_blocks: int) -> int:
    """Return the draws of tokens for each of ``num_blocks`` blocks."""
    return max(DRAWS, ALL_DRAWS // num_blocks)


def window_costs(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    windows: Sequence[int] | None = None,
    sinks: int = 0,
    num_blocks: int | None = None,
    seed: int = 0,
    name: str = "window-costs",
    metadata: dict[str, object] | None = None,
    progress: Progress | None = None,
) -> head_scores.HeadScores:
    """Measure what windows cost every KV head on ``blocks``; the model is restored. Must be called on all ranks.

    Costs are those of ``windows``, in keys (None: ``measured_windows``), and of ``window``, which are the scores of the
    heads. ``num_blocks`` blocks (None: ``usual_blocks``) are drawn at random by ``seed``. Other arguments are those of
    ``probe``.

    Returns:
        A table whose scores are the costs of ``window`` in nats per token, with standard errors over blocks, and whose
        ``window_costs`` are those of all windows.

    Raises ``UserError``: the blocks are not longer than the window, or the model cannot be hooked.
    """
    heads.check_window(blocks, window, sinks)
    known = measured_windows(blocks.block_size) if windows is None else windows
    measured = tuple(sorted({*known, window}))
    num_blocks = usual_blocks(blocks.block_size) if num_blocks is None else num_blocks
    order = np.random.default_rng(seed).permutation(blocks.num_blocks)[:num_blocks]
    with model_windows.full_attention(model) as states:
        expansion = _Expansion(model, states, blocks, order, measured, sinks, seed)
        costs = expansion.measure(progress)
        native = local_layers.native_windows(states)
    nll_text = blocks.nested([min(NLL_BLOCKS, blocks.num_blocks)])[0]
    unchanged = nll.document_nll(model, nll_text, batch_size=1).mean
    # Build the table
    means, by_window = _means(blocks, order, costs, measured, window)
    facts = {**(metadata or {}), "nll": round(unchanged, 4), "blocks": len(order), "seed": seed}
    facts |= native
    facts |= {"sinks": sinks} if sinks else {}
    table = heads.signal_table(
        "window-costs",
        means,
        window,
        passes=passes(len(measured), len(order)) * len(order) / blocks.num_blocks,
        tokens=blocks.tokens.size,
        name=name,
        metadata=facts,
        kind=kinds.GAIN,
        unit=kinds.NATS,
        heads_per_layer=heads_per_layer(states),
    )
    is_head = head_cells(heads_per_layer(states))[..., None]
    of_heads = np.where(is_head, by_window.values, np.nan)
    return replace(table, window_costs=replace(by_window, values=of_heads))


def _means(
    blocks: TokenBlocks, order: arrays.Int, costs: Float, windows: tuple[int, ...], window: int
) -> tuple[list[heads.HeadMeans], head_tables.WindowCosts]:
    """Return the mean costs of one window, and of all, over the tokens to predict of every domain.

    ``costs`` [N, L, Hkv, W] are those of the blocks in ``order``, as ``_costs`` returns them.
    """
    # The domain that most tokens of a block are of, or of several the first by name
    domain_of_document = np.array([document.domain for document in blocks.documents])
    domain_of_token = domain_of_document[blocks.document[order]]  # [N, T]
    domain_of_block = np.array([_most_frequent(row) for row in domain_of_token])
    domains = tuple(sorted(set(domain_of_block.tolist())))
    score = windows.index(window)
    means = []
    by_domain = []
    for domain in domains:
        is_selected = domain_of_block == domain
        block_costs = np.moveaxis(costs[is_selected], 0, -1)  # [L, Hkv, W, blocks]
        # Tokens to predict, and those of text, of each block [blocks, 2]
        sizes = np.array(
            [
                blocks.boundaries.num_measured(blocks.marked(index)[None])
                for index in order[is_selected]
            ]
        )
        weights = sizes[:, 0] / (blocks.block_size - 1)
        mean, error = statistics.jackknife_ratio(block_costs, weights)
        num_tokens = int(sizes[:, 1].sum())
        means.append(heads.HeadMeans(mean[..., score], domain, num_tokens, 0, error[..., score]))
        by_domain.append(mean)
    return means, head_tables.WindowCosts(windows, np.stack(by_domain), domains)


def _most_frequent(names: NDArray[np.str_]) -> str:
    """Return the name that occurs most often; the first in alphabetical order of several."""
    distinct, counts = np.unique(names, return_counts=True)
    return str(distinct[counts.argmax()])


@dataclass(frozen=True)
class _Expansion:
    """Second-order expansion of the loss of windows, on a model whose attention is hooked."""

    model: PreTrainedModel
    states: Sequence[LayerState]
    blocks: TokenBlocks
    order: arrays.Int  # [N], the blocks to measure on
    windows: Sequence[int]  # [W] ascending, in keys
    sinks: int  # first tokens that local heads see as well
    seed: int  # of the tokens that are drawn

    @property
    def layers(self) -> list[int]:
        """Return the layers whose heads can be global."""
        return local_layers.candidate_layers(self.states)

    @property
    def num_heads(self) -> int:
        """Return the KV heads Hkv of a layer, the most if layers differ."""
        return max(heads_per_layer(self.states))

    def measure(self, progress: Progress | None) -> Float:
        """Compute the costs of every block in ``order`` [N, L, Hkv, W]; must be called on all ranks.

        Costs in layers that are local by design are 0. Losses are summed over the tokens to predict, of which blocks of
        separate documents have fewer than others, and divided by those of a block of one document.
        """
        # Each rank computes its share of the blocks
        rank_share = distributed.own_share(len(self.order))
        by_block = np.zeros((len(self.order), len(self.layers), self.num_heads, len(self.windows)))
        length = self.blocks.block_size
        num_blocks = len(rank_share)
        if input_device(self.model).type == "cpu":  # where larger passes are no faster
            num_blocks = max(1, defaults.LEARNING_TOKENS // length)
        with frozen.frozen_within_memory(
            self.model, length, max(1, num_blocks), attentions=len(self.windows) + 1
        ) as micro_batch:
            computed = micro_batch.run_all(self._block_costs, rank_share, progress)
            for index, block_costs in zip(rank_share, computed, strict=True):
                by_block[index] = block_costs
        costs = np.zeros((len(self.order), len(self.states), *by_block.shape[2:]))
        costs[:, self.layers] = distributed.sum_over_processes(by_block)
        return costs

    def _block_costs(self, part: range) -> list[Float]:
        """Compute the costs [layers, Hkv, W] of a ``part`` of ``order``, in one pass of each kind."""
        indices = self.order[part.start : part.stop]
        tokens = block_tokens(self.blocks.part(indices), 0, len(part), input_device(self.model))
        inputs = self.blocks.boundaries.inputs(tokens)
        number = part.start + 1
        alone, with_widest = self._single_heads(indices, inputs, number)
        beside_others = self._halfway_slope(indices, inputs, number) - with_widest
        return list((alone + beside_others).swapaxes(0, 1))

    def _single_heads(
        self, indices: arrays.Int, inputs: dict[str, torch.Tensor], number: int
    ) -> tuple[Float, Float]:
        """Compute what a window costs a head alone, and its product with the widest window, [layers, B, Hkv, W] each.

        ``inputs`` are those of the B blocks with ``indices``, of which the first is the one with ``number`` from 1.
        """
        draws = num_draws(len(self.order))
        num_targets = self.blocks.block_size - 1
        numbers = [
            np.random.default_rng([self.seed, index]).random((draws, num_targets))
            for index in indices
        ]
        uniforms = torch.from_numpy(np.stack(numbers, 1))
        shares = self._observe(len(indices), is_halfway=False)
        alone = np.zeros(shares.shape)
        with_widest = np.zeros(shares.shape)
        for draw, total in enumerate(loss.sampled_nlls(self.model, uniforms=uniforms, **inputs), 1):
            slope = _slope(total, shares, number, retain_graph=draw < draws)
            alone += slope**2 / (2.0 * draws * num_targets)
            with_widest += slope * slope[..., -1:] / (2.0 * draws * num_targets)
        return alone, with_widest

    def _halfway_slope(
        self, indices: arrays.Int, inputs: dict[str, torch.Tensor], number: int
    ) -> Float:
        """Compute the slope of the divergence halfway to the widest window [layers, B, Hkv, W]; arguments as above."""
        shares = self._observe(len(indices), is_halfway=True)
        num_targets, _ = self.blocks.boundaries.num_measured(self.blocks.marked(indices))
        divergence = loss.mean_divergence(
            self.model, reference=partial(head_gates.unobserved, self.states), **inputs
        )
        weight = num_targets / (self.blocks.block_size - 1)
        return _slope(divergence * weight, shares, number)

    def _observe(self, num_blocks: int, *, is_halfway: bool) -> torch.Tensor:
        """Observe attention by ``frozen.Differences``, and return their shares [layers, B, Hkv, W], which are 0."""
        size = (len(self.layers), num_blocks, self.num_heads, len(self.windows))
        shares = torch.zeros(size, device=input_device(self.model)).requires_grad_()
        for layer, share in zip(self.layers, shares, strict=True):
            state = self.states[layer]
            of_heads = share[:, : state.num_kv_heads].to(self.model.dtype)
            state.observer = frozen.Differences(
                state, of_heads, self.windows, self.sinks, is_halfway=is_halfway
            )
        return shares


def _slope(
    total: torch.Tensor, shares: torch.Tensor, number: int, *, retain_graph: bool = False
) -> Float:
    """Return the gradient of a loss in its ``shares``; ``UserError`` with the ``number`` of a block if not finite."""
    (gradient,) = torch.autograd.grad(total, shares, retain_graph=retain_graph)
    frozen.check_finite("window costs: the loss", float(total.detach()), number, gradient)
    return gradient.double().cpu().numpy()


def passes(num_windows: int, num_blocks: int = MOST_BLOCKS) -> float:
    """Return the passes over each of several blocks: forward, and back for every draw; then a step of a frozen model.

    Windows are computed twice without gradients, which takes about a twentieth of a pass each.
    """
    return 1.0 + num_draws(num_blocks) + defaults.FROZEN_STEP_PASSES + num_windows / 10.0
