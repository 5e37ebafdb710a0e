"""Encode conversations by a model's chat template, and let a model answer them, with its cache kept between turns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from spkv_nas.base import errors, special_tokens
from spkv_nas.data import chats
from spkv_nas.evaluation import continuations
from spkv_nas.evaluation.answers.questions import Conversation, Turn
from spkv_nas.model import generation, model_shape

Answers = list[list[int]]  # tokens of the answer of each turn, an end-of-text token included

_TOGETHER = 1 << 14  # prompt tokens per batch
# Answers in whose place a template shows where the next question begins; they end differently
_PLACEHOLDERS = ("first answer: x", "another one: 7")


@dataclass(frozen=True)
class EncodedTurn:
    """Tokens that a turn adds to its context, and those of the possible answers; none: any answer."""

    tokens: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Encoded:
    """Conversation as tokens."""

    turns: tuple[EncodedTurn, ...]

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all questions."""
        return sum(len(turn.tokens) for turn in self.turns)


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Return a conversation as tokens.

    Raises ``UserError``, which names its place: it is a chat, and there is no chat template, or that refuses it.
    """
    tokens = _chat_tokens if conversation.messages else _text_tokens
    turns = []
    for number, turn in enumerate(conversation.turns):
        added = tokens(conversation, number, tokenizer)
        added += special_tokens.encode_text(turn.opening, tokenizer)["input_ids"]
        turns.append(EncodedTurn(tuple(added), _choices(turn, conversation, tokenizer)))
    return Encoded(tuple(turns))


def _text_tokens(
    conversation: Conversation, number: int, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return the tokens of a text that is continued."""
    text = conversation.turns[number].prompt
    encoded = list(special_tokens.encode_text(text, tokenizer)["input_ids"])
    return encoded if number else [*special_tokens.tokens_before(tokenizer), *encoded]


def _chat_tokens(
    conversation: Conversation, number: int, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return the tokens that a template writes before an answer: of the first one all, else after the last answer."""

    def rendered(answer: str) -> list[int]:
        messages = [*conversation.messages]
        for turn in conversation.turns[1 : number + 1]:
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": turn.prompt})
        return chats.template_tokens(
            messages,
            conversation.where,
            tokenizer,
            add_generation_prompt=True,
            tools=list(conversation.tools) or None,
        )

    if number == 0:
        return rendered("")
    first, other = map(rendered, _PLACEHOLDERS)
    return first[len(first) - _common(first[::-1], other[::-1]) :]


def _common(first: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common beginning."""
    pairs = zip(first, other, strict=False)
    return next(
        (number for number, (one, two) in enumerate(pairs) if one != two),
        min(len(first), len(other)),
    )


def _choices(
    turn: Turn, conversation: Conversation, tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the possible answers; those that continue a text begin with a space, as its words do."""
    space = "" if conversation.messages or turn.prompt[-1:].isspace() else " "
    texts = [f"{space}{choice}" for choice in turn.choices]
    return tuple(tuple(special_tokens.encode_text(text, tokenizer)["input_ids"]) for text in texts)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Encoded],
    new_tokens: int,
) -> list[Answers]:
    """Answer conversations greedily, each answer of at most ``new_tokens``; the caller sets gates and layout.

    Conversations of one turn share batches; those of several go one by one, as a cache cannot hold what a longer answer
    of another row leaves empty. Must be called on all ranks. Raises ``UserError`` for logits that are not finite.
    """
    answers: dict[int, Answers] = {}
    # The longest question comes first, because the batch size is chosen by it
    single = [number for number, each in enumerate(conversations) if len(each.turns) == 1]
    single.sort(key=lambda number: -conversations[number].num_tokens)

    def run_batch(part: range) -> list[continuations.Line]:
        numbers = [single[position] for position in part]
        turns = [conversations[number].turns[0] for number in numbers]
        rows = _continue(model, tokenizer, turns, [turn.tokens for turn in turns], new_tokens)
        return [
            {"number": number, "answers": [row]} for number, row in zip(numbers, rows, strict=True)
        ]

    several = [number for number, each in enumerate(conversations) if len(each.turns) > 1]

    def run_one(part: range) -> list[continuations.Line]:
        return [
            {
                "number": several[position],
                "answers": _converse(
                    model, tokenizer, conversations[several[position]], new_tokens
                ),
            }
            for position in part
        ]

    if single:
        together = _TOGETHER // conversations[single[0]].num_tokens
        for line in continuations.in_batches(run_batch, len(single), together, None):
            answers[line["number"]] = line["answers"]
    if several:
        for line in continuations.in_batches(run_one, len(several), 1, None):
            answers[line["number"]] = line["answers"]
    return [answers[number] for number in range(len(conversations))]


def _converse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Encoded,
    new_tokens: int,
) -> Answers:
    """Answer the turns of one conversation, each on the cache that the turns before it left."""
    cache = generation.fitting_cache(model)
    ends = _ends(model, tokenizer)
    context: tuple[int, ...] = ()
    answers: Answers = []
    for turn in conversation.turns:
        added = turn.tokens
        # A model that ended its answer may have written the token that a template puts after it
        if answers and answers[-1][-1] in ends and added[:1] == (answers[-1][-1],):
            added = added[1:]
        context += added
        [written] = _continue(model, tokenizer, [turn], [context], new_tokens, cache)
        answers.append(written)
        context += tuple(written)
    return answers


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[EncodedTurn],
    contexts: Sequence[Sequence[int]],
    new_tokens: int,
    cache: Cache | None = None,
) -> list[list[int]]:
    """Continue contexts, each with the answer to its turn."""
    inputs, mask = generation.pad_left(contexts)
    processors = []
    if any(turn.choices for turn in turns):
        ends = _ends(model, tokenizer)
        if not ends:
            raise errors.UserError(
                "choices: this model has no end-of-text token, which ends one: judge by pattern"
            )
        choices = [turn.choices for turn in turns]
        processors.append(_OnlyChoices(choices, inputs.shape[1], ends[0]))
    return generation.continue_tokens(
        model, tokenizer, inputs, mask, new_tokens, processors=processors, cache=cache
    )


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the end-of-text tokens; empty if there are none."""
    end = generation.generation_config(model, tokenizer, 1).eos_token_id
    if end is None:
        return []
    return list(end) if isinstance(end, list) else [end]


class _OnlyChoices(transformers.LogitsProcessor):
    """Leave of each row's logits those of the tokens by which one of its choices goes on; a row may have none."""

    def __init__(
        self, choices: Sequence[Sequence[tuple[int, ...]]], prompt_length: int, end: int
    ) -> None:
        self._choices = [[(*choice, end) for choice in row] for row in choices]
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return logits [B, V], -inf for all other tokens."""
        scores = scores.clone()
        for row, choices in enumerate(self._choices):
            written = tuple(input_ids[row, self._prompt_length :].tolist())
            number = len(written)
            following = [
                choice[number] for choice in choices if choice[:number] == written != choice
            ]
            if following:
                kept = scores[row, following].clone()
                scores[row] = -torch.inf
                scores[row, following] = kept
        return scores


def check_room(model: PreTrainedModel, conversation: Encoded, new_tokens: int, where: str) -> None:
    """Raise ``UserError`` if the model cannot read a conversation with its answers, or one of them is too long."""
    length = conversation.num_tokens + len(conversation.turns) * new_tokens - 1
    remedy = f"{where}: give a shorter text, or fewer new-tokens than {new_tokens}"
    model_shape.check_length(model, length, remedy, warns=False)
    longest = max((len(each) for turn in conversation.turns for each in turn.choices), default=0)
    if longest >= new_tokens:
        raise errors.UserError(
            f"{where}: a choice has {longest} tokens: give more new-tokens than {new_tokens}"
        )
