"""Continue held-out text with a dense model, and predict the continuations with others by teacher forcing."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.base import distributed, errors, memory
from spkv_nas.base.progress import Progress
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import generation, model_shape, modes
from spkv_nas.model.placement import input_device

Line = dict[str, Any]

_TOGETHER = 1 << 14  # tokens per batch of prompts and continuations


def write_continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    blocks: TokenBlocks,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    first: int = 0,
    progress: Progress | None = None,
) -> list[Line]:
    """Continue the beginning of every block, all but its last ``new_tokens`` tokens; must be called on all ranks.

    Of separate documents, the last one is continued. Temperature 0 decodes greedily. A block's sample depends on
    nothing but ``seed`` and its index, to which ``first`` adds the number of blocks of the text before these. Returns a
    record per block: block; document and name, of the document of its last prompt token; tokens, of which an
    end-of-text token is the last.
    """
    prompt_length = blocks.block_size - new_tokens
    names = [document.name for document in blocks.documents]

    def run(part: range) -> list[Line]:
        """Continue consecutive blocks."""
        # Read the prompts, each with a seed of its own
        prompts = blocks.tokens[part.start : part.stop, :prompt_length].astype(np.int64)
        marked = blocks.marked(slice(part.start, part.stop))[:, :prompt_length]
        in_last = (
            np.arange(prompt_length)
            >= prompt_length - 1 - blocks.boundaries.positions(marked)[:, -1:]
        )
        seeds = [(seed, first + index) for index in part]
        with modes.evaluation_mode(model):
            inputs = torch.from_numpy(prompts), torch.from_numpy(in_last.astype(np.int64))
            rows = generation.continue_tokens(
                model, tokenizer, *inputs, new_tokens, temperature=temperature, seeds=seeds
            )
        # Name the document of each prompt's last token
        documents = blocks.document[part.start : part.stop, prompt_length - 1].tolist()
        return [
            {"block": index, "document": document, "name": names[document], "tokens": tokens}
            for index, document, tokens in zip(part, documents, rows, strict=True)
        ]

    return in_batches(run, blocks.num_blocks, _TOGETHER // blocks.block_size, progress)


def predict(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    continuations: Sequence[Line],
    new_tokens: int,
    *,
    temperature: float,
) -> list[Line]:
    """Predict the tokens of continuations with one model, by teacher forcing; must be called on all ranks.

    Returns a record per continuation: block, and predicted, by token the most probable one if greedy, else the
    logarithm of the probability of the continuation's own. Two models' records tell whether their most probable tokens
    are equal, or min(1, q(x) / p(x)) of the tokens x that the dense model drew, whose mean is the acceptance.
    """

    def columns(tokens: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        if temperature == 0:
            return {"predicted": logits.argmax(-1).cpu()}
        following = tokens[..., None].to(logits.device)
        return {
            "predicted": (logits.float() / temperature)
            .log_softmax(-1)
            .gather(-1, following)[..., 0]
            .cpu()
        }

    return by_continuation((model,), blocks, continuations, new_tokens, columns, None)


def by_continuation(
    models: tuple[PreTrainedModel, ...],
    blocks: TokenBlocks,
    continuations: Sequence[Line],
    new_tokens: int,
    columns: Callable[..., dict[str, torch.Tensor]],
    progress: Progress | None,
) -> list[Line]:
    """Return the columns [B, N] of each continuation, from its tokens and each model's logits; call on all ranks."""
    prompt_length = blocks.block_size - new_tokens

    def run(part: range) -> list[Line]:
        batch = continuations[part.start : part.stop]
        tokens = _continued(blocks, batch, prompt_length)
        inputs = _inputs(blocks, [line["block"] for line in batch], tokens, prompt_length)
        with ExitStack() as evaluating:
            for model in models:
                evaluating.enter_context(modes.evaluation_mode(model))
            values = columns(
                tokens[:, prompt_length:],
                *(_last_logits(model, inputs, new_tokens) for model in models),
            )
        return [
            {
                **{key: line[key] for key in ("block", "document", "name") if key in line},
                **{
                    name: rows[row, : len(line["tokens"])].tolist() for name, rows in values.items()
                },
            }
            for row, line in enumerate(batch)
        ]

    logit_tokens = memory.chunk_tokens(model_shape.vocabulary_size(models[0])) // new_tokens
    together = max(1, min(_TOGETHER // blocks.block_size, logit_tokens))
    return in_batches(run, len(continuations), together, progress)


def _continued(
    blocks: TokenBlocks, continuations: Sequence[Line], prompt_length: int
) -> torch.Tensor:
    """Return prompts with their continuations, int64 [B, T], padded on the right, which earlier positions ignore."""
    tokens = torch.zeros(len(continuations), blocks.block_size, dtype=torch.long)
    for row, line in zip(tokens, continuations, strict=True):
        row[:prompt_length] = torch.from_numpy(
            blocks.tokens[line["block"], :prompt_length].astype(np.int64)
        )
        row[prompt_length : prompt_length + len(line["tokens"])] = torch.tensor(line["tokens"])
    return tokens


def _inputs(
    blocks: TokenBlocks, indices: Sequence[int], tokens: torch.Tensor, prompt_length: int
) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of a pass over the prompts of blocks, ``indices`` [B], with continuations.

    A continuation belongs to the last document of its prompt; ``tokens`` [B, T] are those of both.
    """
    prompts = blocks.marked(np.array(indices, dtype=np.int64))[:, :prompt_length]
    inputs = blocks.boundaries.inputs(torch.from_numpy(prompts.astype(np.int64)))
    if (positions := inputs.get("position_ids")) is not None:
        following = positions[:, -1:] + torch.arange(1, tokens.shape[1] - prompt_length + 1)
        inputs["position_ids"] = torch.cat([positions, following], 1)
    return {**inputs, "input_ids": tokens}


@torch.inference_mode()
def _last_logits(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], number: int
) -> torch.Tensor:
    """Return the logits [B, number, V] by which a model predicts the last ``number`` tokens of its inputs [B, T]."""
    # A dense model of a larger vocabulary wrote them
    model_shape.check_tokens(model, int(inputs["input_ids"].max()))
    is_possible = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    only = {"logits_to_keep": number + 1} if is_possible else {}
    inputs = {name: values.to(input_device(model)) for name, values in inputs.items()}
    logits: torch.Tensor = model(**inputs, use_cache=False, **only).logits[:, -number - 1 : -1]
    if not bool(torch.isfinite(logits.amax(-1)).all()):
        raise errors.UserError(generation.NOT_FINITE)
    return logits


def in_batches(
    run: Callable[[range], list[Line]], number: int, together: int, progress: Progress | None
) -> list[Line]:
    """Collect the records of ``run`` for 0 to ``number`` - 1, shared by all ranks, in order."""
    lines = memory.AdaptiveBatchSize(together).run_all(run, distributed.own_share(number), progress)
    return [line for part in distributed.gathered(lines) for line in part]
