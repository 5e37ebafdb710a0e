"""What lm-eval asks a checkpoint, answered so that its gates, its cache and its density are what they are meant to be.

lm-eval's own class pads without a mask, makes the logits of all positions, and generates with a cache of every key, on
for rows that have ended. Here a text that several requests read passes once, generation has the cache that suits the
model, and the density is that of real tokens: neither padding nor what follows the end of an answer. Log-likelihoods
are computed in float32 from the logits, where lm-eval computes them in the model's dtype. Gates are the caller's
business, hard as a rule.

Collective: each process of torchrun answers its share, and all have all answers.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from spkv_nas.base.distributed import gathered, own_share
from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import AdaptiveBatchSize
from spkv_nas.base.progress import Progress
from spkv_nas.model.config_section import gate_config
from spkv_nas.model.density_tracker import DensityTracker, layout_density
from spkv_nas.model.generation import NOT_FINITE, OnlyFinite, fitting_cache, generation_config

BATCH_SIZE = 16  # texts that pass at once, where there is memory for them

Request = tuple[Any, list[int], list[int]]  # lm-eval's name of it, tokens of the context and of what follows
Answer = tuple[float, bool]  # log-probability of what follows, and whether it is the likeliest
Text = tuple[int, ...]
Of = TypeVar("Of")
Given = TypeVar("Given")


class CheckpointLM(HFLM):
    """A checkpoint, for ``lm_eval.evaluator.evaluate``.

    Attributes:
        progress: called with (requests answered, in all) of this process.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, batch_size: int = BATCH_SIZE
    ) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
        self.progress: Progress = lambda done, total: None
        self._together = AdaptiveBatchSize(batch_size)
        self._watch = DensityTracker(model) if gate_config(model) is not None else None
        self._keeps_some = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self._done = self._total = 0

    def start(self) -> None:
        """Count density from now on."""
        if self._watch is not None:
            self._watch.start()

    def stop(self) -> float:
        """Density since ``start``, mean over the heads: of gates the share of tokens kept, of a layout that of global
        heads, NaN of a dense model.

        Collective.
        """
        if self._watch is None:
            return layout_density(self.model)
        found = self._watch.stop()
        return math.nan if found is None else float(np.nanmean(found))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Answer]:
        """As lm-eval's, without its bars."""
        answers: list[Answer] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """As lm-eval's, without its bars."""
        answers: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=True)
        return answers

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[Answer]:
        asked: dict[Text, list[int]] = {}  # requests by the text that they read, the last token left out
        for number, (_, context, continuation) in enumerate(requests):
            asked.setdefault(tuple((context + continuation)[-self.max_length - 1 : -1]), []).append(number)
        self._say_cut(len(context) + len(continuation) > self.max_length + 1 for _, context, continuation in requests)
        texts = sorted(asked, key=lambda text: (-len(text), text))
        found: dict[int, Answer] = {}

        def read(own: Sequence[Text]) -> list[dict[int, Answer]]:
            return self._in_batches(own, lambda batch: [self._read(batch, asked, requests)])

        for answers in self._shared(texts, read):
            found |= answers
        return [found[number] for number in range(len(requests))]

    def _read(
        self, texts: Sequence[Text], asked: dict[Text, list[int]], requests: Sequence[Request]
    ) -> dict[int, Answer]:
        """The answers to all requests that read ``texts``, the longest first."""
        longest = len(texts[0])
        tokens = torch.zeros(len(texts), longest, dtype=torch.long)
        real = torch.zeros(len(texts), longest, dtype=torch.bool)
        for row, text in enumerate(texts):  # padded on the right, where no token sees it
            tokens[row, : len(text)] = torch.tensor(text)
            real[row, : len(text)] = True
        most = max(longest - len(text) + len(requests[number][2]) for text in texts for number in asked[text])
        last = {"logits_to_keep": most} if self._keeps_some else {}
        self._count_only(real.to(self.device))
        logits = self.model(input_ids=tokens.to(self.device), use_cache=False, **last).logits
        found = {}
        for text, own in zip(texts, logits, strict=True):
            end = len(own) - (longest - len(text))
            for number in asked[text]:
                following = torch.tensor(requests[number][2], device=own.device)
                scores = own[end - len(following) : end].float().log_softmax(-1)
                total = float(scores.gather(1, following[:, None]).sum())
                if not math.isfinite(total):
                    raise UserError(NOT_FINITE)
                found[number] = total, bool((scores.argmax(-1) == following).all())
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """As lm-eval's, by ``_model_generate``.

        Raises:
            UserError: the model has no room for what is to be generated, or its logits are not finite.

        Warns:
            UserWarning: prompts had to be cut.
        """
        numbers = [normalize_gen_kwargs(one.args[1], self.max_gen_toks)["max_gen_toks"] for one in requests]
        if (most := max(numbers, default=0)) >= self.max_length:
            raise UserError(
                f"{requests[0].task_name} has up to {most} tokens generated, and the model has room for "
                f"{self.max_length} with the prompt\nleave the task out, or give max_gen_toks in a YAML of your own"
            )
        self._say_cut(
            len(self.tok_encode(one.args[0])) > self.max_length - number
            for one, number in zip(requests, numbers, strict=True)
        )
        generate = super().generate_until

        def own(mine: Sequence[Instance]) -> list[str]:
            return generate(list(mine), disable_tqdm=True) if mine else []

        return self._shared(requests, own)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], *, attention_mask: Tensor, **options: Any
    ) -> Tensor:
        """``context`` [B, T], padded on the left, with what follows: int64 [B, at most ``max_length``]."""
        config = generation_config(self.model, self.tokenizer, max_length - context.shape[1])
        if not options.get("do_sample"):
            options.pop("temperature", None)
        unknown = config.update(**options)
        if unknown:
            raise UserError(f"generation_kwargs of a task: transformers knows no {', '.join(unknown)}")
        config.pad_token_id = self.tokenizer.pad_token_id
        rows = list(zip(context, attention_mask, strict=True))
        found = self._in_batches(rows, partial(self._generate, config=config, stops=stop))
        longest = max(map(len, found))
        return torch.stack([_padded(row, longest, config.pad_token_id) for row in found])

    def _generate(self, rows: Sequence[tuple[Tensor, Tensor]], *, config: Any, stops: list[str]) -> list[Tensor]:
        """What follows each of a few prompts and their masks, both [T], the prompts with it."""
        tokens, mask = (torch.stack(each) for each in zip(*rows, strict=True))
        self._count_only(mask.bool())
        ends = _Ends(self.tokenizer, stops, config.eos_token_id, tokens.shape[1], self._count_only)
        return list(
            self.model.generate(
                input_ids=tokens, attention_mask=mask, past_key_values=fitting_cache(self.model),
                generation_config=config, stopping_criteria=StoppingCriteriaList([ends]),
                logits_processor=LogitsProcessorList([OnlyFinite()]),
            )
        )  # fmt: skip

    def _say_cut(self, are_cut: Iterable[bool]) -> None:
        """Warns of texts that are longer than the model's positions reach."""
        number = sum(are_cut)
        if number:
            warnings.warn(
                f"{number} texts are longer than the model's {self.max_length} positions with what is to follow: their "
                "beginning is left out", stacklevel=2,
            )  # fmt: skip

    def _count_only(self, real: Tensor) -> None:
        if self._watch is not None:
            self._watch.only(real)

    def _shared(self, asked: Sequence[Of], work: Callable[[Sequence[Of]], list[Given]]) -> list[Given]:
        """What ``work`` gives for each process's share of ``asked``, together; collective."""
        share = own_share(len(asked))
        self._done, self._total = 0, len(share)
        own = work(asked[share.start : share.stop])
        return [one for part in gathered(own) for one in part]

    def _in_batches(self, items: Sequence[Of], work: Callable[[Sequence[Of]], list[Given]]) -> list[Given]:
        """What ``work`` gives for as many at once as there is memory for, and is begun again where there is not."""
        given: list[Given] = []
        place = 0
        while place < len(items):

            def attempt(size: int, place: int = place) -> tuple[int, list[Given]]:
                if self._watch is None:
                    return size, work(items[place : place + size])
                with self._watch.whole_pass():
                    return size, work(items[place : place + size])

            size, found = self._together.run(attempt, len(items) - place)
            given += found
            place += size
            self._done += size
            self.progress(self._done, self._total)
        return given


class _Ends(StoppingCriteria):
    """Which rows have ended: at the end-of-text token, or once they have said one of the stop strings."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: list[str], eos: Any, start: int, tell: Callable[[Tensor], None]
    ) -> None:
        """``start``: tokens of the prompts; ``tell`` is told of the next pass which of its tokens [B, 1] are real."""
        self._tokenizer, self._stops, self._start, self._tell = tokenizer, stops, start, tell
        self._eos = torch.tensor([eos] if isinstance(eos, int) else eos or [], dtype=torch.long)
        self._most = 2 + max((len(stop.encode()) for stop in stops), default=0)  # tokens that a stop may be part of
        self._done: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """bool [B] of ``input_ids`` [B, T]."""
        if self._done is None:
            self._done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        self._done |= torch.isin(input_ids[:, -1], self._eos.to(input_ids.device))
        new = input_ids[:, self._start :][:, -self._most :]
        for row in (~self._done).nonzero()[:, 0].tolist():
            text = self._tokenizer.decode(new[row])
            self._done[row] = any(stop in text for stop in self._stops)
        self._tell(~self._done[:, None])
        return self._done


def _padded(row: Tensor, length: int, token: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, length - len(row)), value=token)
