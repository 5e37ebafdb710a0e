"""Measure the learned sinks from which a hybrid's training starts (``branch.sinks: learned``)."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.local_layers import takes_sinks
from spkv_nas.base.errors import UserError
from spkv_nas.data.batches import block_tokens
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import learned_sinks, model_shape, windows

TOKENS = 8192  # training tokens to measure on


@torch.inference_mode()
def measure_initial_sinks(model: PreTrainedModel, layout: Layout, blocks: TokenBlocks) -> list[torch.Tensor]:
    """Measure the mean score of the first token that the layout hides from its local heads, for each query head.

    Blocks of about ``TOKENS`` tokens of ``blocks``, the training text, are run with full attention, one at a time. A
    learned sink of this score does in the denominator what the first token does there. The log-sum-exp of all hidden
    keys would also stand for tokens whose values matter, and costs more on every model that was measured
    (``reports/LOG.md``).

    Returns:
        float32 [Hq] on the CPU for each attention layer; 0 for layers whose heads get none (``takes_sinks``).

    Raises ``UserError``: blocks are so short that no key is hidden, or the model has learned sinks of its own.
    """
    # Check that keys are hidden, by one window
    layout.check_one_window("branch.sinks: learned needs one; leave it out")
    if blocks.block_size <= layout.window + layout.sinks:
        raise UserError(
            f"branch.sinks: learned: a window of {layout.window} keys and {layout.sinks} sink tokens hide nothing in "
            f"blocks of {blocks.block_size} tokens\nuse a larger data.block_size, or leave branch.sinks out"
        )
    # Add up the means of blocks by layer
    part = blocks.spread(max(1, TOKENS // blocks.block_size))
    num_heads = model_shape.config_shape(model.config).num_heads
    with windows.full_attention(model) as states:
        sums = [torch.zeros(num_heads, dtype=torch.float64) for _ in states]
        for state, total in zip(states, sums, strict=True):
            if takes_sinks(state, layout.window):
                state.observer = _adder(total, layout, state.checkpoint_window)
        for index in range(part.num_blocks):
            model.get_decoder()(input_ids=block_tokens(part, index, 1, model.device), use_cache=False)
    return [(total / part.num_blocks).float() for total in sums]


def _adder(total: torch.Tensor, layout: Layout, native: int) -> Callable[..., None]:
    """Return an observer that adds the mean score of a block's first hidden token to ``total`` [Hq].

    The mean is over the queries from which the layout hides it, but not the window ``native`` of the checkpoint.
    """
    hidden = layout.sinks
    queries = slice(hidden + layout.window, hidden + native)

    def add(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sink_logits: torch.Tensor | None) -> None:
        if sink_logits is not None:
            raise learned_sinks.native_sinks_error()
        query = q[0, :, queries].cpu().double().mean(1)  # [Hq, D]; the mean of scores is the score of the mean
        key = k[0, :, hidden].cpu().double().repeat_interleave(len(query) // k.shape[1], 0)
        total.add_((query * key).sum(-1), alpha=scale)

    return add
