"""KVzap: a small network per layer predicts the KVzip+ score of a key from its token alone (arXiv 2601.07891).

KVzip+ is how strongly a model attends to each key while it repeats its text: it reads a context, a prompt to repeat it,
and the context again, in one block. Kim et al. (arXiv 2505.23416), with the norms of the KVzap paper, as in kvpress
(0.5.5, ``KVzipPress``):

    score_s = max over queries t after the context, and over the G query heads, of
              softmax_s(q_t . k . scale) |W_O v_s| / |h_t|

where h_t is the hidden state that enters the layer's attention. Two linear layers with GELU, 512 wide, map these hidden
states to log KVzip+ of every KV head. They are fitted by squared error on training text; no weight of the model
changes. A key is kept if its prediction reaches a threshold, shared by all layers and heads, that is set to reach the
target density.

Differences from the paper: the text is the model's own training text and little of it (some ten thousand tokens
instead of 1.2 million), and the context to repeat is half a block, so that all positions lie in the range that the
model was trained on.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.base import errors, memory
from spkv_nas.base.progress import Progress, no_progress
from spkv_nas.contrib.evaluate.baselines import rules
from spkv_nas.data.batches import block_tokens
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.placement import input_device

PROMPT = "\n\nRepeat the previous context exactly.\n"
_QUERIES = 64  # queries per chunk
HIDDEN = 512
FIT_TOKENS = 32_768  # context tokens to fit on
_CHECKED = 8  # one context in N is held out to validate the fit
_EPOCHS = 8
_BATCH = 512  # tokens per step
_LEARNING_RATE = 3e-3  # AdamW's, with cosine decay to 0
_SMALLEST = 1e-12  # lower clamp of KVzip+ scores before the logarithm
_ROUNDS = 4  # passes to find a threshold
_CLOSE = 0.002  # tolerance of the density


def kvzip_scores(read: rules.Read, output: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return (scores float32 [B, Hkv, context] of the context's keys, the layer's attention [B, Hkv, G, T, D]).

    ``output`` [C, Hq Dv] is the output projection W_O; the context is the first ``context`` tokens.
    """
    batch, heads, length = read.keys_shape
    # Compute the norms |W_O v| [B, Hkv, G, context] and 1 / |h| [B, T]
    projection = output.float().view(len(output), heads, read.q.shape[2], -1)
    projection = projection.permute(1, 2, 0, 3)  # [Hkv, G, C, Dv]
    # Leave out the channels that pad values to the size of keys
    values = read.v[..., :context, : projection.shape[3]].float()
    squared_norms = ((values @ (projection.mT @ projection)) * values).sum(-1)
    norms = squared_norms.clamp(min=0).sqrt()
    inverse_norms = 1.0 / read.hidden.float().norm(dim=-1)
    scores = torch.zeros(batch, heads, context, device=read.k.device)

    # Keep each key's largest weight over the queries after the context
    def update_scores(chunk: rules.Chunk, weights: Tensor) -> None:
        if chunk.stop <= context:
            return
        # First query of the chunk after the context
        first = max(context - chunk.start, 0)
        inverse = inverse_norms[:, None, None, chunk.start + first : chunk.stop, None]
        normalized = weights[:, :, :, first:, :context] * inverse * norms[..., None, :]
        torch.maximum(scores, normalized.amax((2, 3)), out=scores)

    # Attend to all keys: the window covers the whole block, so that no key is ever decided on
    everything = rules.Protocol(window=length, sinks=0, chunk=_QUERIES)
    out, _ = rules.chunked_attention(read, everything, lambda _chunk: torch.empty(0), update_scores)
    return scores, out


def predictor(size: int, heads: int) -> nn.Sequential:
    """Create the network of one layer, from hidden states float32 [..., C] to log KVzip+ [..., Hkv]."""
    return nn.Sequential(nn.Linear(size, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, heads))


@dataclass(frozen=True)
class KVzap:
    """Fitted predictors, one network per layer.

    ``explained`` is the share of the variance of held-out log KVzip+ that they predict; one in eight of ``tokens``
    context tokens was held out.
    """

    predictors: list[nn.Sequential]
    explained: float
    tokens: int

    def scores(self, read: rules.Read) -> Tensor:
        """Predict scores [B, Hkv, T] of a layer's keys."""
        network = self.predictors[read.layer].to(read.hidden.device)
        scores: Tensor = network(read.hidden.float())
        return scores.transpose(1, 2)

    def rule(self, protocol: rules.Protocol, threshold: float) -> rules.Rule:
        """Return the rule that keeps keys whose score reaches the threshold."""
        return lambda read: rules.keeping(read, protocol, self.scores(read) >= threshold)

    def threshold(
        self,
        model: PreTrainedModel,
        blocks: TokenBlocks,
        protocol: rules.Protocol,
        density: float,
        *,
        batch_size: int,
    ) -> float:
        """Find the threshold at which the model reads ``blocks`` with the target density.

        Evicting keys in one layer changes the scores of the next ones, so this takes a few passes, the first of which
        evicts nothing.
        """
        threshold = -torch.inf
        best = (1.0, -torch.inf)
        seen: list[Tensor] = []  # [2, keys], scores and weights of keys, by layer and batch

        def rule(read: rules.Read) -> tuple[Tensor, rules.Until]:
            scores = self.scores(read)
            if read.decided is None:
                ranked = scores.double().cpu()
                ranked[..., : protocol.sinks] = torch.inf
                weights = protocol.num_outside(ranked.shape[-1]).expand_as(ranked)
                seen.append(torch.stack([ranked, weights]).flatten(1))
            return rules.keeping(read, protocol, scores >= threshold)

        for _ in range(_ROUNDS):
            seen = []
            _, reached = rules.pruned_nll(model, blocks, rule, protocol, batch_size=batch_size)
            # Keep the best threshold, and estimate a better one: the score that the target share of keys reaches
            best = min(best, (abs(reached - density), threshold))
            if best[0] <= _CLOSE:
                break
            scores, weights = torch.cat(seen, 1)
            scores, order = scores.sort(descending=True)
            share = weights[order].cumsum(0)
            position = int(torch.searchsorted(share, density * float(share[-1])))
            threshold = float(scores[min(position, len(scores) - 1)])
        return best[1]


def fit_kvzap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    blocks: TokenBlocks,
    *,
    seed: int,
    batch_size: int,
    progress: Progress = no_progress,
) -> KVzap:
    """Fit the predictors on ``blocks`` of training text; ``progress`` counts batches read and layers fitted."""
    # Build texts of context, prompt and repeated context [B, 2 context + prompt]
    prompt = torch.tensor(tokenizer.encode(PROMPT, add_special_tokens=False))
    context = (blocks.block_size - len(prompt)) // 2
    if context < 1:
        raise errors.UserError(
            f"kvzap needs blocks of at least {len(prompt) + 2} tokens; found {blocks.block_size}"
        )
    num_contexts = -(-FIT_TOKENS // context)
    chosen = blocks.spread(num_contexts)
    if chosen.num_blocks < 2:
        raise errors.UserError(
            "kvzap needs at least two blocks of training text: use more text, or smaller blocks"
        )
    starts = range(0, chosen.num_blocks, batch_size)
    device = input_device(model)
    num_layers = int(model.config.get_text_config().num_hidden_layers)

    def texts() -> Iterator[Tensor]:
        """Yield batches of texts."""
        for start in starts:
            tokens = block_tokens(chosen, start, batch_size, device)
            batch = chosen.boundaries.inputs(tokens)["input_ids"][:, :context]
            prompts = prompt.to(batch.device).expand(len(batch), -1)
            yield torch.cat([batch, prompts, batch], 1)

    def step(done: int) -> None:
        progress(done, len(starts) + num_layers)

    # Read hidden states and KVzip+ scores of all layers
    num_tokens = chosen.num_blocks * context
    hidden, target = _targets(model, texts(), context, num_tokens, step)
    # Fit each layer, and free its training data
    fits = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while hidden:
            fits.append(_fit(torch.cat(hidden.pop(0)), torch.cat(target.pop(0)), device))
            step(len(starts) + len(fits))
    # Compute the explained variance on held-out contexts
    networks, errors_of_layers, variances = zip(*fits, strict=True)
    return KVzap([*networks], 1.0 - sum(errors_of_layers) / sum(variances), num_tokens)


def _targets(
    model: PreTrainedModel,
    texts: Iterable[Tensor],
    context: int,
    number: int,
    step: Callable[[int], None],
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return (hidden states [B, context, C], log KVzip+ [B, context, Hkv]) of every layer, each as a list of batches.

    ``texts`` are contexts, ``number`` tokens in all, with their repetitions. Raises ``UserError`` if memory is too
    small.
    """
    with rules.reading(model) as reader, torch.inference_mode():
        # Check that the hidden states fit into memory
        num_layers = len(reader.layers)
        hidden_size = int(model.config.get_text_config().hidden_size)
        memory.require(
            number * num_layers * hidden_size * model.dtype.itemsize,
            f"hidden states of {number:,} tokens in {num_layers} layers, on which kvzap is trained",
            "leave kvzap out of --methods, or use a smaller model",
        )
        projections = [_output_projection(layer) for layer in reader.layers]
        hidden: list[list[Tensor]] = [[] for _ in reader.layers]
        target: list[list[Tensor]] = [[] for _ in reader.layers]

        # Read with full attention, collecting the inputs and scores of every layer
        def collect(read: rules.Read) -> tuple[Tensor, rules.Until]:
            scores, out = kvzip_scores(read, projections[read.layer], context)
            if read.decided is None:
                log_scores = scores.clamp(min=_SMALLEST).log()
                hidden[read.layer].append(read.hidden[:, :context].cpu())
                target[read.layer].append(log_scores.transpose(1, 2).cpu())
            return out, scores

        reader.rule = collect
        for done, tokens in enumerate(texts, 1):
            model.get_decoder()(input_ids=tokens, use_cache=False)
            step(done)
    return hidden, target


def _output_projection(layer: nn.Module) -> Tensor:
    """Return the output projection W_O [C, Hq Dv] of an attention layer. Raises ``UserError`` without any."""
    weight = getattr(getattr(layer, "o_proj", None), "weight", None)
    if not isinstance(weight, Tensor):
        raise errors.UserError(
            "kvzap needs attention layers with a linear layer 'o_proj', which this model does not "
            "have\n"
            "leave kvzap out of --methods"
        )
    return weight


def _fit(
    hidden: Tensor, target: Tensor, device: torch.device
) -> tuple[nn.Sequential, float, float]:
    """Fit the network of one layer to hidden states [N, n, C] and targets [N, n, Hkv].

    Return it with its squared error on held-out contexts, and the sum of squares of their targets.
    """
    is_held_out = torch.arange(len(hidden)) % _CHECKED == min(_CHECKED, len(hidden)) - 1
    # Normalize the targets
    x = hidden[~is_held_out].flatten(0, 1)
    y = target[~is_held_out].flatten(0, 1)
    mean = y.mean(0)
    deviation = y.std(0).clamp(min=1e-6)
    # Fit by AdamW with cosine decay
    network = predictor(x.shape[1], y.shape[1]).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE)
    num_steps = _EPOCHS * -(-len(x) // _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    normalized = (y - mean) / deviation
    for _ in range(_EPOCHS):
        for batch in torch.split(torch.randperm(len(x)), _BATCH):
            optimizer.zero_grad()
            predicted = network(x[batch].to(device).float())
            torch.autograd.backward(F.mse_loss(predicted, normalized[batch].to(device)))
            optimizer.step()
            schedule.step()
    # Fold the normalization into the last layer, then validate
    weight, bias = network[-1].parameters()
    with torch.no_grad():
        weight.mul_(deviation.to(device)[:, None])
        bias.mul_(deviation.to(device)).add_(mean.to(device))
        held_out = target[is_held_out].flatten(0, 1)
        predicted = network(hidden[is_held_out].flatten(0, 1).to(device).float()).cpu()
    network.requires_grad_(False)
    squared_error = (predicted - held_out).square().sum()
    squared_deviation = (held_out - held_out.mean(0)).square().sum()
    return network, float(squared_error), float(squared_deviation)
