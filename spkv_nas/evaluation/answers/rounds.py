"""Score the answers that models write to the same questions, in rounds of conversations."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base import arrays
from spkv_nas.evaluation.answers import judges
from spkv_nas.evaluation.answers.questions import Conversation
from spkv_nas.evaluation.verdict import criterion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STREAM = 69  # separates the order of questions from other uses of the seed
LENGTHS = arrays.Array("lengths", "whole", "A", low=1)  # tokens of each answer of a round
_NOTHING = -1  # after the end of an answer
WRITTEN = arrays.Array("written", "whole", "A T", low=_NOTHING)  # answers of the dense model


class Questions(Protocol):
    """Conversations in random order."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __getitem__(self, part: slice, /) -> Sequence[Conversation]:
        """Return some of them."""


def in_random_order(
    conversations: Sequence[Conversation], setting: criterion.Setting, new_tokens: int
) -> tuple[list[Conversation], str]:
    """Return the conversations of a file in random order, and a text that tells them from others.

    Raises ``UserError``, which names the place of a conversation: the model has no chat template for it, or it is too
    long.
    """
    from spkv_nas.evaluation.answers.conversations import check_room, encode

    order = np.random.default_rng((setting.seed, _STREAM)).permutation(len(conversations))
    shuffled = [conversations[number] for number in order.tolist()]
    key = hashlib.sha256()
    for conversation in shuffled:
        encoded = encode(conversation, setting.tokenizer)
        check_room(setting.dense, encoded, new_tokens, conversation.where)
        judged = [judges.described(turn.judge) for turn in conversation.turns]
        key.update(f"{encoded} {judged}".encode())
    return shuffled, key.hexdigest()


class AnswerRounds(criterion.Rounds):
    """Mean scores of the answers of conversations, whose turns share a context.

    An answer without a judge is compared with the dense model's: the share of its tokens up to the first difference.
    """

    details = (LENGTHS,)
    reference = (WRITTEN,)

    def __init__(
        self, questions: Questions, setting: criterion.Setting, new_tokens: int, identity: str
    ) -> None:
        """Ask ``questions``, to which answers have at most ``new_tokens``; ``identity`` is a text that tells them."""
        self._questions = questions
        self._tokenizer = setting.tokenizer
        self._new_tokens = new_tokens
        # Answers of the dense model are part of what is measured
        self.identity = f"{identity} {setting.identity} {new_tokens}"
        self.num_samples = len(questions)

    def measure(
        self, index: int, model: "PreTrainedModel", prepared: criterion.Prepared
    ) -> criterion.Float:
        """Return the mean score of the answers of each conversation of a round."""
        return np.asarray(self.measure_all(index, model, prepared)[criterion.SCORE.name])

    def measure_all(
        self, index: int, model: "PreTrainedModel", prepared: criterion.Prepared
    ) -> dict[str, NDArray[Any]]:
        """Return the scores of a round with the lengths of its answers; of the dense model, its answers, too."""
        from spkv_nas.evaluation.answers.conversations import answer, encode

        conversations = self._questions[self.part(index)]
        encoded = [encode(conversation, self._tokenizer) for conversation in conversations]
        answers = answer(model, self._tokenizer, encoded, self._new_tokens)
        flat = [tokens for conversation in answers for tokens in conversation]
        measured: dict[str, NDArray[Any]] = {
            LENGTHS.name: np.array([len(tokens) for tokens in flat], dtype=np.int64)
        }
        written = prepared.get(WRITTEN.name)
        if written is None:
            written = _padded(flat)
            measured[WRITTEN.name] = written
        measured[criterion.SCORE.name] = self._scores(conversations, flat, written)
        return measured

    def _scores(
        self,
        conversations: Sequence[Conversation],
        answers: Sequence[list[int]],
        written: NDArray[np.int64],
    ) -> criterion.Float:
        """Return the mean score of each conversation, by its answers and those of the dense model, in order."""
        pairs = zip(answers, written, strict=True)
        scores = []
        for conversation in conversations:
            by_turn = []
            for turn in conversation.turns:
                tokens, dense = next(pairs)
                if turn.judge is None:
                    by_turn.append(_same_share(tokens, dense[dense != _NOTHING].tolist()))
                else:
                    text = self._tokenizer.decode(tokens, skip_special_tokens=True)
                    by_turn.append(turn.judge.score(text))
            scores.append(np.mean(by_turn))
        return np.array(scores, dtype=np.float64)

    def note(self, pairs: criterion.Float, details: criterion.Details) -> str:
        """Return how often both models are right, how long their answers are, and how many reach the limit."""
        lengths, dense_lengths = (np.concatenate(each) for each in details(LENGTHS.name))
        score, dense_score = 100.0 * pairs.mean(0)
        cut, dense_cut = (
            100.0 * (each == self._new_tokens).mean() for each in (lengths, dense_lengths)
        )
        return (
            f"score {score:.1f} %, dense model {dense_score:.1f} %; "
            f"answers {lengths.mean() / dense_lengths.mean():.2f} times as long, "
            f"{cut:.1f} % of them at the limit of {self._new_tokens} tokens, "
            f"dense model {dense_cut:.1f} %"
        )


def _same_share(tokens: Sequence[int], dense: Sequence[int]) -> float:
    """Return the share of the dense model's tokens before the first that an answer does not have."""
    same = 0
    for own, other in zip(tokens, dense, strict=False):
        if own != other:
            break
        same += 1
    return same / len(dense)


def _padded(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return rows of unequal length as an array [A, T], padded with ``_NOTHING``."""
    padded = np.full((len(rows), max(map(len, rows))), _NOTHING, dtype=np.int64)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded
