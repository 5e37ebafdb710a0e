"""DuoAttention's alpha: the share of a head's full attention needed to preserve the model's last hidden states.

Xiao et al., arXiv 2410.10819; repository mit-han-lab/duo-attention, commit 03dca84 (``duo_attn/train.py``,
``duo_attn/patch/llama.py``, ``scripts/train.sh``). The model is frozen and each KV head learns an alpha in [0, 1]:

    out_h = alpha_h full_h + (1 - alpha_h) local_h,   local: the first keys (attention sinks) and the window
    loss  = mean((hidden - hidden_full)^2) + lambda mean(alpha)

``hidden`` are the last hidden states, after the final norm. As in the original, ``full_h`` comes from a forward pass of
the unchanged model and carries no gradient; alpha starts at 1 and is clamped after every step; the optimizer is AdamW
without weight decay at a learning rate of 0.02, with a linear warm-up over the first fifth of the steps and a linear
decay over the last fifth, never below a tenth of the rate; lambda is 0.05.

Differences from the original:

- The loss covers every token of held-out text; theirs covers the repetition of ten passkeys in synthetic book text.
- The squared error is divided by the mean square of ``hidden_full``, so that lambda is comparable between models.
- 200 steps by default instead of 2,000; 4 sinks and the layout's window instead of 128 and 256.

Layouts of a table give their local heads the sinks that were measured on the model (``sinks``), and alpha is learned
with as many. On a model without attention sinks it is learned with 4 as in the original, though layouts have none.
"""

from collections import deque
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from spkv_nas.artifacts import defaults, head_scores, kinds
from spkv_nas.base import distributed, memory
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import shuffled_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.tokenizer import PLAIN, Boundaries
from spkv_nas.model import attention, modes, windows
from spkv_nas.model.placement import input_device
from spkv_nas.probing.frozen import (
    Mixture,
    check_finite,
    frozen,
    learned_table,
    ramp,
    rank_tokens,
    run_micro_batches,
)


class AlphaMixture(Mixture):
    """Mixture whose global attention is that of a recorded pass of the unchanged model."""

    def __init__(
        self, state: attention.LayerState, window: int, sinks: int, device: torch.device
    ) -> None:
        """Start with alpha at 1, or 0 in layers local by design; local heads see ``window`` keys and ``sinks``."""
        # alpha [Hkv], the share of global attention
        self.share = torch.full(
            (state.num_kv_heads,),
            float(not state.is_always_local),
            device=device,
            requires_grad=True,
        )
        super().__init__(state, self.share, [window], sinks)
        # True during the forward pass of the unchanged model, whose outputs are stored
        self.records = False
        # outputs of the layer, then of those that read its keys
        self._recorded: deque[Tensor] = deque(maxlen=1 + state.num_readers)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Record global attention or mix it with local attention; shapes as in ``Mixture``."""
        if self.records:
            output = self.attend(-1, q, k, v, scale, sink_logits, starts)
            self._recorded.append(output)
            return output
        self.shares = torch.stack([1.0 - self.share, self.share], -1)
        local = self.attend(0, q, k, v, scale, sink_logits, starts)
        return self.mix([local, self._recorded.popleft()])


def duo(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    sinks: int = 4,
    steps: int = defaults.DUO_STEPS,
    batch_size: int = defaults.DUO_STEP_BLOCKS,
    learning_rate: float = 0.02,
    regularisation: float = 0.05,
    seed: int = 0,
    name: str = "duo",
    metadata: dict[str, object] | None = None,
    progress: Progress | None = None,
) -> head_scores.HeadScores:
    """Learn alpha for every KV head on ``blocks``; the model is restored afterwards. Must be called on all ranks.

    Each of ``steps`` optimizer steps takes ``batch_size`` blocks, in an order by ``seed``; the micro-batch size is
    halved when a GPU runs out of memory. ``learning_rate`` is the peak of alpha's, ``regularisation`` lambda, the
    weight of mean(alpha) in the loss. Other arguments are those of ``probe``. Raises ``UserError``: the model cannot be
    hooked.
    """
    tokens_seen = steps * min(batch_size, blocks.num_blocks) * blocks.block_size
    compiling = modes.compiled_if_faster(model, tokens_seen // distributed.num_processes())
    with windows.full_attention(model) as states, frozen(model), compiling:
        # Attach an alpha per head
        mixtures = [AlphaMixture(state, window, sinks, input_device(model)) for state in states]
        for state, mixture in zip(states, mixtures, strict=True):
            state.observer = mixture
        loss = _learn_alphas(
            model,
            mixtures,
            blocks,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            regularisation=regularisation,
            seed=seed,
            progress=progress,
        )
    # Build the table
    values = pad_sequence([mixture.share.detach() for mixture in mixtures], batch_first=True)
    options = {"sink_size": sinks, "steps": steps, "regularisation": regularisation, "seed": seed}
    return learned_table(
        "duo",
        kinds.ALPHA_UNIT,
        values.double().cpu().numpy(),
        blocks,
        window,
        tokens_seen,
        name=name,
        metadata={**(metadata or {}), **options, "distillation_loss": float(f"{loss:.4g}")},
        heads_per_layer=attention.heads_per_layer(states),
    )


def _learn_alphas(
    model: PreTrainedModel,
    mixtures: list[AlphaMixture],
    blocks: TokenBlocks,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    regularisation: float,
    seed: int,
    progress: Progress | None,
) -> float:
    """Learn the alphas of the attached ``mixtures`` in place, and return the loss of the last step."""
    alphas = [mixture.share for mixture in mixtures]
    optimizer = torch.optim.AdamW(alphas, lr=learning_rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: ramp(step, steps))
    micro_batch = memory.AdaptiveBatchSize(batch_size)
    batches = shuffled_batches(blocks.num_blocks, batch_size, steps, seed)
    loss = 0.0
    for step, block_indices in enumerate(batches, 1):
        # Gradients on this rank's blocks
        tokens = rank_tokens(blocks, block_indices, input_device(model))
        loss = _add_gradients(
            model, mixtures, tokens, blocks.boundaries, regularisation, micro_batch
        )
        # Update and clamp alpha
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for alpha in alphas:
                alpha.clamp_(0.0, 1.0)
        check_finite("duo: the distillation loss", loss, step)
        if progress is not None:
            progress(step, steps)
    return loss


def _add_gradients(
    model: PreTrainedModel,
    mixtures: list[AlphaMixture],
    step_tokens: Tensor,
    boundaries: Boundaries,
    regularisation: float,
    micro_batch: memory.AdaptiveBatchSize,
) -> float:
    """Return the loss of a step and set alphas' gradients, on all ranks; ``step_tokens`` int64 [B, T], B may be 0."""
    alphas = [mixture.share for mixture in mixtures]

    def gradients(parts: Iterator[Tensor]) -> Tensor:
        for alpha in alphas:
            alpha.grad = None
        sums = torch.zeros(2, dtype=torch.float64)
        for tokens in parts:
            error, full = sums_of_squares(model, mixtures, tokens, boundaries)
            torch.autograd.backward(error)
            sums += torch.stack([error.detach(), full]).cpu()
        return sums

    # Gradients of the squared error, summed over ranks
    rank_sums = run_micro_batches(gradients, step_tokens, micro_batch)
    error, full = distributed.sum_over_processes(rank_sums).tolist()
    distributed.sum_gradients(alphas)
    # Divide by the full model's square, and add the gradient of the regularisation
    for alpha in alphas:
        assert alpha.grad is not None
        alpha.grad = alpha.grad / full + regularisation / (len(alphas) * alpha.numel())
    distance: float = error / full
    return distance


def sums_of_squares(
    model: PreTrainedModel,
    mixtures: list[AlphaMixture],
    tokens: Tensor,
    boundaries: Boundaries = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Compute the summed squared error of the mixture's last hidden states, and the summed square of the full model's.

    Both sum over the same tokens of blocks [B, T], without filling, so the distillation loss is their ratio. The error
    is differentiable in the alphas of the ``mixtures``, one per layer, which are attached to the model.
    """
    decoder = model.get_decoder()
    inputs = boundaries.inputs(tokens)
    for mixture in mixtures:
        mixture.records = True
    with torch.no_grad():
        target = decoder(**inputs, use_cache=False).last_hidden_state
    for mixture in mixtures:
        mixture.records = False
    hidden = decoder(**inputs, use_cache=False).last_hidden_state
    # Leave out filling
    is_filling = boundaries.is_filling(tokens.cpu().numpy())
    is_text = torch.from_numpy(~is_filling).to(hidden.device)
    hidden = hidden[is_text].float()
    target = target[is_text].float()
    return F.mse_loss(hidden, target, reduction="sum"), target.square().sum()
