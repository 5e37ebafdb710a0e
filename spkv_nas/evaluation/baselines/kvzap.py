"""KVzap: a small network per layer predicts what KVzip+ says of a key, from the token alone (arXiv 2601.07891).

Two linear layers with GELU between, 512 wide, take what enters a layer's attention to log KVzip+ of every KV head; they
are fitted by squared error on training text, no weight of the model moves. A key is kept if its prediction reaches a
threshold, the same for all layers and heads, that is set by the density wanted.

What differs from its paper: the text is the model's own training text and little of it (some ten thousand tokens,
theirs 1.2 million), the context to repeat is half a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import require
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import block_tokens
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.baselines.kvzip import PROMPT, repeating
from spkv_nas.evaluation.baselines.protocol import Protocol
from spkv_nas.evaluation.baselines.rules import Read, Reading, Rule, keeping, reading

HIDDEN = 512
FIT_TOKENS = 32_768  # of contexts
_CHECKED = 8  # of so many contexts, one is not fitted on but says how good the fit is
_EPOCHS, _BATCH, _LEARNING_RATE = 8, 512, 3e-3  # tokens a step; AdamW's, falling to 0 as a cosine
_SMALLEST = 1e-12  # of a KVzip+ score, whose logarithm is learned
_ROUNDS, _CLOSE = 4, 0.002  # passes to find a threshold; how close a density need not be bettered


class Surrogate(nn.Module):
    """The network of one layer: hidden states [..., C] to log KVzip+ [..., Hkv], in float32."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, HIDDEN), nn.Linear(HIDDEN, heads)

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        scores: Tensor = self.down(F.gelu(self.up(hidden.float())))
        return scores


@dataclass(frozen=True)
class KVzap:
    """The networks of all layers.

    Attributes:
        explained: share of the variance of log KVzip+ that they predict on text they were not fitted on.
        tokens: of the contexts, one in eight of which was not fitted on.
    """

    surrogates: list[Surrogate]
    explained: float
    tokens: int

    def scores(self, read: Read) -> Tensor:
        """[B, Hkv, T] of a layer's keys."""
        scores: Tensor = self.surrogates[read.layer].to(read.hidden.device)(read.hidden)
        return scores.transpose(1, 2)

    def rule(self, protocol: Protocol, threshold: float) -> Rule:
        """The rule that keeps keys of at least the threshold."""
        return lambda read: keeping(read, protocol, self.scores(read) >= threshold)

    @torch.inference_mode()
    def threshold(
        self, model: PreTrainedModel, blocks: TokenBlocks, protocol: Protocol, density: float, *, batch_size: int
    ) -> float:
        """The threshold at which the model reads ``blocks`` with a density as wanted.

        What is evicted in one layer moves the scores of the next ones, so it takes a few passes, the first of which
        evicts nothing.
        """
        weight = protocol.num_outside(blocks.block_size).double()
        found, reached, best = -torch.inf, 1.0, (1.0, -torch.inf)
        with reading(model) as read:
            for _ in range(_ROUNDS):
                scores, reached = self._read(read, model, blocks, protocol, found, batch_size)
                best = min(best, (abs(reached - density), found))
                if best[0] <= _CLOSE:
                    break
                found = _weighted_quantile(scores, weight, density, protocol.sinks)
        return best[1]

    def _read(
        self,
        read: Reading,
        model: PreTrainedModel,
        blocks: TokenBlocks,
        protocol: Protocol,
        threshold: float,
        batch_size: int,
    ) -> tuple[Tensor, float]:
        """(scores [keys, T] of all blocks, layers and heads; the density reached)."""
        seen: list[Tensor] = []

        def rule(one: Read) -> tuple[Tensor, Tensor]:
            scores = self.scores(one)
            seen.append(scores.flatten(0, 1).cpu())
            return keeping(one, protocol, scores >= threshold)

        read.rule = rule
        kept = 0
        for start in range(0, blocks.num_blocks, batch_size):
            read.begin(start)
            tokens = block_tokens(blocks, start, batch_size, model.device)
            model.get_decoder()(input_ids=tokens, use_cache=False)
            kept += sum(int(one) for one in read.kept)
        outside = int(protocol.num_outside(blocks.block_size).sum()) * read.num_heads * blocks.num_blocks
        return torch.cat(seen), kept / outside


def _weighted_quantile(scores: Tensor, weight: Tensor, density: float, sinks: int) -> float:
    """The score that a share ``density`` of the keys reaches: scores [n, T], each key by its weight [T]."""
    scores = scores.clone()
    scores[:, :sinks] = torch.inf
    order, index = scores.flatten().sort(descending=True)
    share = weight.expand_as(scores).flatten()[index].cumsum(0)
    at = int(torch.searchsorted(share, density * float(share[-1])).clamp(max=len(order) - 1))
    return float(order[at])


def fit_kvzap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    blocks: TokenBlocks,
    *,
    seed: int,
    batch_size: int,
    progress: Progress | None = None,
) -> KVzap:
    """Fit the networks on ``blocks`` of training text.

    Args:
        progress: called with (steps done, in all), of reading and of fitting layers.

    Raises:
        UserError: blocks are too short for the prompt, too few, or there is no memory for their hidden states.
    """
    prompt = torch.tensor(tokenizer.encode(PROMPT, add_special_tokens=False))
    context = (blocks.block_size - len(prompt)) // 2
    if context < 1:
        raise UserError(f"kvzap needs blocks of more than {len(prompt) + 2} tokens; these have {blocks.block_size}")
    chosen = blocks.spread(-(-FIT_TOKENS // context))
    if chosen.num_blocks < 2:
        raise UserError("kvzap needs at least two blocks of training text: give more text, or smaller blocks")
    starts = range(0, chosen.num_blocks, batch_size)
    batches = (block_tokens(chosen, start, batch_size, model.device)[:, :context] for start in starts)
    texts = (torch.cat([one, prompt.to(one.device).expand(len(one), -1), one], 1) for one in batches)
    num_layers = int(model.config.get_text_config().num_hidden_layers)

    def step(done: int) -> None:
        if progress is not None:
            progress(done, len(starts) + num_layers)

    number = chosen.num_blocks * context
    hidden, target = _targets(model, texts, context, number, step)
    fits = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while hidden:  # what a layer learned from goes with it
            fits.append(_fit(torch.cat(hidden.pop(0)), torch.cat(target.pop(0)), model.device))
            step(len(starts) + len(fits))
    error, spread = (sum(part) for part in zip(*((fit[1], fit[2]) for fit in fits), strict=True))
    return KVzap([fit[0] for fit in fits], 1.0 - error / spread, number)


def _targets(
    model: PreTrainedModel, texts: Iterable[Tensor], context: int, number: int, step: Callable[[int], None]
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """(hidden states [B, context, C], log KVzip+ [B, context, Hkv]) of every layer, a list of batches each.

    Args:
        texts: int64 [B, T], contexts with their repetitions.
        number: of tokens in all contexts.

    Raises:
        UserError: there is no memory for them, or a model without what KVzip+ needs.
    """
    with reading(model) as read, torch.inference_mode():
        size = number * len(read.layers) * int(model.config.get_text_config().hidden_size) * model.dtype.itemsize
        what = f"hidden states of {number:,} tokens in {len(read.layers)} layers, which kvzap learns from"
        require(size, what, "leave it out of --methods, or use a smaller model")
        hidden: list[list[Tensor]] = [[] for _ in read.layers]
        target: list[list[Tensor]] = [[] for _ in read.layers]

        def see(one: Read, scores: Tensor) -> None:
            hidden[one.layer].append(one.hidden[:, :context].cpu())
            target[one.layer].append(scores.clamp(min=_SMALLEST).log().transpose(1, 2).cpu())

        read.rule = repeating(read.layers, context, see)
        for done, tokens in enumerate(texts, 1):
            model.get_decoder()(input_ids=tokens, use_cache=False)
            step(done)
    return hidden, target


def _fit(hidden: Tensor, target: Tensor, device: torch.device) -> tuple[Surrogate, float, float]:
    """(the network of hidden states [N, n, C] and targets [N, n, Hkv]; its squared error on those not fitted on, and
    their spread).
    """
    checked = torch.arange(len(hidden)) % _CHECKED == min(_CHECKED, len(hidden)) - 1
    x, y = hidden[~checked].flatten(0, 1), target[~checked].flatten(0, 1)
    mean, deviation = y.mean(0), y.std(0).clamp(min=1e-6)
    surrogate = Surrogate(x.shape[1], y.shape[1]).to(device)
    steps = _EPOCHS * -(-len(x) // _BATCH)
    optimizer = torch.optim.AdamW(surrogate.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    wanted = (y - mean) / deviation
    for batch in itertools.islice(_batches(len(x)), steps):
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(surrogate(x[batch].to(device)), wanted[batch].to(device)))
        optimizer.step()
        schedule.step()
    with torch.no_grad():  # from now on in the targets' own unit
        surrogate.down.weight *= deviation.to(device)[:, None]
        surrogate.down.bias.mul_(deviation.to(device)).add_(mean.to(device))
        rest = target[checked].flatten(0, 1)
        predicted = surrogate(hidden[checked].flatten(0, 1).to(device)).cpu()
    surrogate.requires_grad_(False)
    return surrogate, float((predicted - rest).square().sum()), float((rest - rest.mean(0)).square().sum())


def _batches(number: int) -> Iterator[Tensor]:
    """Numbers of ``_BATCH`` tokens, epoch after epoch."""
    while True:
        yield from torch.split(torch.randperm(number), _BATCH)
