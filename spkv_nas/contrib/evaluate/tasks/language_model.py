"""Answer the requests of lm-eval with a checkpoint, with correct gates, KV cache and density.

lm-eval's own class pads without a mask, computes the logits of all positions, and generates with a cache of every key,
continuing rows that have ended. Here a text that several requests share is read once, generation uses the cache that
suits the model, and the density counts neither padding nor tokens after the end of an answer. Log-likelihoods are
computed in float32, where lm-eval computes them in the model's dtype. The caller sets the gates. Must be called on all
ranks: each answers its share, and all get all answers.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from spkv_nas.base import distributed, errors, memory, progress
from spkv_nas.model import config_section, density_tracker, generation

BATCH_SIZE = 16  # texts per batch, fewer if memory is too small
_SHOWN = 40  # characters of an answer in an error

# lm-eval's key, tokens of the context, tokens of the continuation
Request = tuple[Any, list[int], list[int]]
Answer = tuple[float, bool]  # log-probability of the continuation, and whether it is the greedy one
Text = tuple[int, ...]  # tokens
Tell = Callable[[Tensor], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


class CheckpointLM(HFLM):
    """A checkpoint as a model for ``lm_eval.evaluator.evaluate``; ``progress`` receives (requests answered, in all)."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        """Wrap a model and its tokenizer, which needs an end-of-text token; at most ``batch_size`` texts per batch."""
        if tokenizer.eos_token_id is None:
            raise errors.UserError(
                "tasks need a tokenizer with an end-of-text token, which ends answers and is an "
                "empty context\n"
                "set eos_token in tokenizer_config.json"
            )
        super().__init__(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size
        )
        self.progress: progress.Progress = lambda done, total: None
        self._micro_batch = memory.AdaptiveBatchSize(batch_size)
        self._watch = density_tracker.DensityTracker(model)  # which only counts if there are gates
        self._keeps_some = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self._done = 0
        self._total = 0

    def start(self) -> None:
        """Start counting density."""
        if config_section.gate_config(self.model) is not None:
            self._watch.start()

    def stop(self) -> float:
        """Return the density since ``start``, mean over the heads, NaN for a dense model; call on all ranks."""
        head_densities = self._watch.stop()
        if head_densities is None:
            return density_tracker.layout_density(self.model)
        return float(np.nanmean(head_densities))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Answer]:
        """Answer log-likelihood requests as lm-eval does; ``UserError`` for an answer without tokens."""
        if any(request.args[:2] == ("", "") for request in requests):
            raise _bad_length("answer ''", 0, self.max_length)
        return list(super().loglikelihood(requests, disable_tqdm=True))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Answer rolling log-likelihood requests as lm-eval does, without its progress bars."""
        return list(super().loglikelihood_rolling(requests, disable_tqdm=True))

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[Answer]:
        """Answer tokenized requests, reading each text once, longest first."""
        # Group the requests by the text that they read, the last token left out
        requests_of: dict[Text, list[int]] = {}
        for number, (strings, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                answer = f"answer {strings[1][:_SHOWN]!r}"
                raise _bad_length(answer, len(continuation), self.max_length)
            text = tuple((context + continuation)[-self.max_length - 1 : -1])
            requests_of.setdefault(text, []).append(number)
        self._warn_of_truncation(
            len(context) + len(continuation) > self.max_length + 1
            for _, context, continuation in requests
        )
        # Read the texts, each rank its share
        texts = sorted(requests_of, key=lambda text: (-len(text), text))
        answers_of: dict[int, Answer] = {}

        def read(rank_texts: Sequence[Text]) -> list[dict[int, Answer]]:
            return self._in_batches(
                rank_texts, lambda batch: [self._read(batch, requests_of, requests)]
            )

        for answers in self._shared(texts, read):
            answers_of |= answers
        return [answers_of[number] for number in range(len(requests))]

    def _read(
        self, texts: Sequence[Text], requests_of: dict[Text, list[int]], requests: Sequence[Request]
    ) -> dict[int, Answer]:
        """Answer all requests that read a batch of texts, longest first."""
        longest = len(texts[0])
        tokens = torch.zeros(len(texts), longest, dtype=torch.long)
        real = torch.zeros(len(texts), longest, dtype=torch.bool)
        # Pad on the right, where causal attention ignores it
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
            real[row, : len(text)] = True
        # Compute only the last logits that some continuation needs
        num_logits = 0
        for text in texts:
            for number in requests_of[text]:
                _, _, continuation = requests[number]
                num_logits = max(num_logits, longest - len(text) + len(continuation))
        run = partial(self.model, logits_to_keep=num_logits) if self._keeps_some else self.model
        self._watch.only(real)
        logits = run(input_ids=tokens.to(self.device), use_cache=False).logits
        # Sum the log-probabilities of each continuation
        answers = {}
        for text, text_logits in zip(texts, logits, strict=True):
            end = len(text_logits) - (longest - len(text))
            for number in requests_of[text]:
                answer = torch.tensor(requests[number][2], device=text_logits.device)
                scores = text_logits[end - len(answer) : end].float().log_softmax(-1)
                total = float(scores.gather(1, answer[:, None]).sum())
                if not math.isfinite(total):
                    raise errors.UserError(generation.NOT_FINITE)
                is_greedy = bool((scores.argmax(-1) == answer).all())
                answers[number] = (total, is_greedy)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Generate as lm-eval does, by ``_model_generate``; warn if prompts had to be truncated."""
        # Check that prompts and answers fit into the context
        new_tokens = []
        for request in requests:
            options = normalize_gen_kwargs(request.args[1], self.max_gen_toks)
            new_tokens.append(options["max_gen_toks"])
        max_new = max(new_tokens, default=0)
        if max_new >= self.max_length:
            raise errors.UserError(
                f"task {requests[0].task_name} generates up to {max_new} tokens, but the model's "
                f"context of {self.max_length} tokens must hold the prompt too\n"
                "leave the task out, or set a smaller max_gen_toks in your own YAML file of the "
                "task"
            )
        lengths = [len(self.tok_encode(request.args[0])) for request in requests]
        if 0 in lengths:
            raise _bad_length("prompt ''", 0, self.max_length)
        self._warn_of_truncation(
            length > self.max_length - num_new
            for length, num_new in zip(lengths, new_tokens, strict=True)
        )
        # Generate, each rank its share
        generate = super().generate_until

        def generate_share(rank_requests: Sequence[Instance]) -> list[str]:
            return generate(list(rank_requests), disable_tqdm=True) if rank_requests else []

        return self._shared(requests, generate_share)

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: list[str],
        *,
        attention_mask: Tensor,
        **options: Any,
    ) -> Tensor:
        """Return ``context`` [B, T], padded on the left, with its continuation: int64 [B, at most ``max_length``]."""
        # Apply the task's options
        config = generation.generation_config(
            self.model, self.tokenizer, max_length - context.shape[1]
        )
        if not options.get("do_sample"):
            options.pop("temperature", None)
        unknown = config.update(**options)
        if unknown:
            raise errors.UserError(
                "the generation_kwargs of a task have options that transformers does not know: "
                f"{', '.join(unknown)}"
            )
        config.pad_token_id = self.tokenizer.pad_token_id
        # Generate in batches, and pad the rows to one length
        rows = list(zip(context, attention_mask, strict=True))
        generated = self._in_batches(rows, partial(self._generate, config=config, stops=stop))
        return torch.nn.utils.rnn.pad_sequence(
            generated, batch_first=True, padding_value=config.pad_token_id
        )

    def _generate(
        self, rows: Sequence[tuple[Tensor, Tensor]], *, config: Any, stops: list[str]
    ) -> list[Tensor]:
        """Generate for one batch of (prompt, mask), both [T]; return prompts with continuations."""
        tokens = torch.stack([prompt for prompt, _ in rows])
        mask = torch.stack([prompt_mask for _, prompt_mask in rows])
        self._watch.only(mask.bool())
        ends = _Ends(self.tokenizer, stops, config.eos_token_id, tokens, self._watch.only)
        return list(
            self.model.generate(
                input_ids=tokens,
                attention_mask=mask,
                past_key_values=generation.fitting_cache(self.model),
                generation_config=config,
                stopping_criteria=transformers.StoppingCriteriaList([ends]),
                logits_processor=transformers.LogitsProcessorList([generation.OnlyFinite()]),
            )
        )

    def _warn_of_truncation(self, are_cut: Iterable[bool]) -> None:
        """Warn if texts are longer than the model's maximum length."""
        number = sum(are_cut)
        if number:
            warnings.warn(
                f"{number} prompts do not fit, with their continuations, in the model's context "
                f"of {self.max_length} tokens: their beginnings are truncated",
                stacklevel=2,
            )

    def _shared(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], list[Result]]
    ) -> list[Result]:
        """Apply ``work`` to each process's share of ``items``, and gather the results; must be called on all ranks."""
        share = distributed.own_share(len(items))
        # Processes with the same seed would draw the same samples
        if share.start:
            torch.manual_seed(torch.initial_seed() + share.start)
        self._done = 0
        self._total = len(share)
        results = work(items[share.start : share.stop])
        return [result for part in distributed.gathered(results) for result in part]

    def _in_batches(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], list[Result]]
    ) -> list[Result]:
        """Apply ``work`` to as many items at once as fit in memory, retrying with fewer where they do not."""
        first = self._done

        def attempt(part: range) -> list[Result]:
            with self._watch.whole_pass():
                return work(items[part.start : part.stop])

        def step(done: int, _total: int) -> None:
            self._done = first + done
            self.progress(self._done, self._total)

        return self._micro_batch.run_all(attempt, range(len(items)), step)


class _Ends(StoppingCriteria):
    """Stopping criterion by row: at the end-of-text token, or once a stop string was generated."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: list[str],
        eos: Any,
        prompts: Tensor,
        tell: Tell,
    ) -> None:
        """Stop at tokens ``eos`` or a stop string after ``prompts`` [B, T], and ``tell`` which next tokens are real."""
        self._tokenizer = tokenizer
        self._stops = stops
        self._start = prompts.shape[1]
        self._tell = tell
        ends = [eos] if isinstance(eos, int) else eos or []
        self._eos = torch.tensor(ends, dtype=torch.long)
        # Maximum number of tokens that a stop string spans
        self._most = 2 + max((len(stop.encode()) for stop in stops), default=0)
        self._done = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return bool [B], the rows of ``input_ids`` [B, T] that have ended."""
        self._done |= torch.isin(input_ids[:, -1], self._eos.to(input_ids.device))
        last_tokens = input_ids[:, self._start :][:, -self._most :]
        for row in (~self._done).nonzero()[:, 0].tolist():
            text = self._tokenizer.decode(last_tokens[row])
            self._done[row] = any(stop in text for stop in self._stops)
        self._tell(~self._done[:, None])
        return self._done


def _bad_length(text: str, num_tokens: int, most: int) -> errors.UserError:
    """Return the error for an answer or a prompt of a task without tokens, or of too many."""
    return errors.UserError(
        f"a task has the {text} of {num_tokens} tokens; it needs at least one, and at most the "
        f"model's context of {most}\n"
        "leave the task out, or correct its YAML file"
    )
