"""Define the built-in criteria of a verdict, and read margins with the options of their criteria, and the risk."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.displacement import STATES, VALUES
from spkv_nas.base import arrays, limits, registry
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.evaluation.answers.criteria import Answers, Needles
from spkv_nas.evaluation.verdict.alternatives import Alternatives
from spkv_nas.evaluation.verdict.criterion import (
    POSITIONS,
    SCORE,
    Criterion,
    Details,
    MeanDivergence,
    MeanDrop,
    MeanShortfall,
    Prepared,
    RelativeRise,
    Rounds,
    Setting,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from spkv_nas.data.blocks import TokenBlocks

Margins = list[tuple[Criterion, float]]  # criteria with the largest loss allowed in each
_CUE = 4  # first tokens of a repeated passage, by which a model recognises it
# What stands before one
_CRITERION, _ALTERNATIVE, _OPTION = (
    re.compile(r",(?=\s*[\w-]+=)"),
    re.compile(r"\|(?=\s*[\w-]+=)"),
    re.compile(r":(?=[\w-]+=)"),
)
NewTokens = Annotated[
    int | None,
    Flag(
        "Maximum length of a continuation; the rest of a block is its prompt.",
        low=1,
        high=limits.MAX_BLOCK_SIZE,
    ),
]

Distance = Annotated[
    int | None,
    Flag("Tokens from a passage to its repetition.", low=2 * _CUE, high=limits.MAX_BLOCK_SIZE),
]


@dataclass(frozen=True)
class DocumentNLLs(Criterion):
    """Rise of the NLL of documents."""

    name = "nll"
    help = "rise of the NLL in percent"
    title = "NLL by document"
    test = RelativeRise()

    def prepare(self, setting: Setting) -> Rounds:
        """Return the documents of the text, in rounds of blocks."""
        return DocumentRounds(setting)


class DocumentRounds(Rounds):
    """NLL sums of documents, in rounds of blocks; a document is a sample once its last block is measured."""

    details = (POSITIONS, VALUES)
    reference = (STATES,)

    def __init__(self, setting: Setting) -> None:
        """Find the last block of each document of a text, whose documents are in random order (``in_random_order``)."""
        from spkv_nas.evaluation.micro_batch import fitting_batch

        self.blocks = setting.blocks
        self._dense = setting.dense
        # A candidate's displacement depends on the dense model
        self.identity = f"{setting.text_hash} {setting.identity}"
        self.batch_size = fitting_batch(setting.dense, setting.blocks)
        self._order(self.blocks.document[:, 1:])

    def _order(self, document: NDArray[np.integer]) -> None:
        """Order the documents of tokens [B, n] by the last block of each; -1 is no document."""
        present, first = np.unique(document[::-1], return_index=True)
        last = len(document) - 1 - first // document.shape[1]
        order = np.argsort(last, kind="stable")
        order = order[present[order] >= 0]
        self._present = present[order].astype(np.intp)
        self._last = last[order]
        self.num_samples = len(order)

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds of blocks."""
        return -(-self.blocks.num_blocks // self.size)

    def _documents(self, index: int) -> NDArray[np.intp]:
        """Return the documents of a round."""
        return np.unique(self.blocks.document[self.part(index)]).astype(np.intp)

    def measure(self, index: int, model: "PreTrainedModel", prepared: Prepared) -> arrays.Float:
        """Return the NLL sums of the documents of a round's blocks."""
        return self.measure_all(index, model, prepared)[SCORE.name]

    def measure_all(
        self, index: int, model: "PreTrainedModel", prepared: Prepared
    ) -> dict[str, NDArray[Any]]:
        """Return the NLL sums of the documents of a round's blocks, those by position, and the displacement."""
        from spkv_nas.evaluation.displacement import Comparison, StateRecorder
        from spkv_nas.evaluation.nll import PositionSums, document_nll

        blocks = self.blocks.part(self.part(index))
        positions = PositionSums(blocks)
        states = prepared.get(STATES.name)
        if states is None:
            comparison: StateRecorder | Comparison = StateRecorder(blocks)
        else:
            comparison = Comparison(blocks, states, self._dense)
        by_document = document_nll(
            model, blocks, batch_size=self.batch_size, positions=positions, comparison=comparison
        )
        measured: dict[str, NDArray[Any]] = {
            SCORE.name: by_document.total[self._documents(index)],
            POSITIONS.name: positions.result(),
        }
        return measured | comparison.result()

    def num_complete(self, number: int) -> int:
        """Return how many documents the first ``number`` rounds complete."""
        return int((self._last < number * self.size).sum())

    def scores(self, measured: Sequence[arrays.Float]) -> arrays.Float:
        """Return the NLL of every document whose last block has been measured."""
        totals = np.zeros(len(self.blocks.documents))
        for index, sums in enumerate(measured):
            totals[self._documents(index)] += sums
        is_complete = self._last < len(measured) * self.size
        return np.asarray(totals[self._present[is_complete]])


@dataclass(frozen=True)
class Divergence(Criterion):
    """KL divergence of predictions from the dense model's."""

    name = "kld"
    help = "KL divergence from the dense model's predictions, in nats per token"
    title = "KL divergence by document"
    test = MeanDivergence()

    def prepare(self, setting: Setting) -> Rounds:
        """Return the documents of the text, in rounds of blocks."""
        from spkv_nas.evaluation.displacement import DIVERGENCE

        return DisplacementRounds(setting, DIVERGENCE)


@dataclass(frozen=True)
class SameTop(Criterion):
    """Share of tokens whose most probable prediction is not the dense model's."""

    name = "same-top"
    help = "tokens whose most probable prediction differs, in percentage points"
    title = "Other top tokens by document"
    test = MeanShortfall()

    def prepare(self, setting: Setting) -> Rounds:
        """Return the documents of the text, in rounds of blocks."""
        from spkv_nas.evaluation.displacement import SAME_TOP

        return DisplacementRounds(setting, SAME_TOP)


class DisplacementRounds(DocumentRounds):
    """Means over the compared tokens of documents, in the passes of ``DocumentRounds``, whose files they share."""

    scored = VALUES

    def __init__(self, setting: Setting, value: int) -> None:
        """Take a value of ``VALUES``, by number; documents without a compared token are no samples."""
        from spkv_nas.evaluation.displacement import compared_documents

        super().__init__(setting)
        self._value = value
        self._document = compared_documents(self.blocks)
        self._order(self._document)

    def scores(self, measured: Sequence[arrays.Float]) -> arrays.Float:
        """Return the mean of every document whose last compared token has been measured.

        Raises ``UserError`` if the logits of the model depend on more than its last hidden states.
        """
        from spkv_nas.evaluation.displacement import is_measured

        if not is_measured(measured):
            raise UserError(
                "--margin: kld and same-top cannot be measured: "
                "the logits of this model depend on more than its last hidden states"
            )
        values = np.concatenate(measured, axis=1)[self._value]
        document = self._document[: len(values)]
        is_compared = document >= 0
        owner = document[is_compared]
        total = np.bincount(owner, values[is_compared], len(self.blocks.documents))
        count = np.bincount(owner, minlength=len(self.blocks.documents))
        complete = self._present[self._last < len(measured) * self.size]
        return np.asarray(total[complete] / count[complete])


@dataclass(frozen=True)
class Agreement(Criterion):
    """Share of tokens of the dense model's greedy continuations that a candidate does not predict."""

    name = "agreement"
    title = "Disagreement of greedy tokens"
    help = "greedy tokens that differ from the dense model's, in percentage points"
    test = MeanShortfall()
    temperature: ClassVar[float] = 0.0

    new_tokens: NewTokens = default(None, "half a block")

    def prepare(self, setting: Setting) -> Rounds:
        """Return one continuation per document, which the dense model writes; by default half a block."""
        length = setting.blocks.block_size
        temperature = self.temperature
        new_tokens = self.new_tokens or length // 2
        if new_tokens >= length:
            raise UserError(
                f"new-tokens {new_tokens} leaves no prompt in a block of {length} tokens: give fewer"
            )
        seed = f" seed {setting.seed}" if temperature else ""
        identity = (
            f"{setting.text_hash} {setting.identity} {new_tokens} temperature {temperature}{seed}"
        )
        blocks = one_per_document(setting.blocks, new_tokens)
        return ContinuationRounds(
            setting.tokenizer, blocks, new_tokens, temperature, setting.seed, identity
        )


@dataclass(frozen=True)
class Acceptance(Agreement):
    """Share of tokens that the dense model samples and that speculative sampling rejects of a candidate's draft."""

    name = "acceptance"
    title = "Rejection by speculative sampling"
    help = "sampled tokens that speculative sampling rejects, in percentage points"
    temperature = 1.0


def one_per_document(blocks: "TokenBlocks", new_tokens: int) -> "TokenBlocks":
    """Return the first block of each document, as continuations of the same document are not independent."""
    _, first = np.unique(blocks.document[:, blocks.block_size - new_tokens - 1], return_index=True)
    return blocks.part(first)


class ContinuationRounds(Rounds):
    """Scores in [0, 1] of continuations that the dense model writes; its own scores are 1.

    Greedy continuations: the share of tokens that equal the model's most probable ones. Sampled ones: the mean of
    min(1, q(x) / p(x)) over the tokens x, drawn from the dense model's distribution p, with the model's q. Its expected
    value is that of sum_x min(p, q), the share of tokens that speculative sampling accepts.
    """

    # Continuations, padded with 0, and the dense model's predictions of them
    prepared = (
        arrays.Array("tokens", "whole", "N T"),
        arrays.Array("predicted", "number", "N T", low=-math.inf),
        arrays.Array("length", "whole", "N", low=1),
    )

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        blocks: "TokenBlocks",
        new_tokens: int,
        temperature: float,
        seed: int,
        identity: str,
    ) -> None:
        """Continue the beginning of each block, of which there is one per document, in random order."""
        self._tokenizer = tokenizer
        self._blocks = blocks
        self._new_tokens = new_tokens
        self._temperature = temperature
        self._seed = seed
        self.identity = identity
        self.num_samples = blocks.num_blocks

    def prepare(self, index: int, dense: "PreTrainedModel") -> dict[str, NDArray[Any]]:
        """Continue the prompts of a round with the dense model, and predict the continuations with it."""
        from spkv_nas.evaluation.continuations import predict, write_continuations

        sampling: dict[str, Any] = {
            "temperature": self._temperature,
            "seed": self._seed,
            "first": index * self.size,
        }
        blocks = self._blocks.part(self.part(index))
        lines = write_continuations(dense, self._tokenizer, blocks, self._new_tokens, **sampling)
        predicted = predict(dense, blocks, lines, self._new_tokens, temperature=self._temperature)
        # Pad the records to arrays, and keep their lengths
        return {
            "tokens": _padded([line["tokens"] for line in lines]).astype(np.int64),
            "predicted": _padded([line["predicted"] for line in predicted]),
            "length": np.array([len(line["tokens"]) for line in lines], dtype=np.int64),
        }

    def measure(self, index: int, model: "PreTrainedModel", prepared: Prepared) -> arrays.Float:
        """Return the score of each continuation of a round."""
        from spkv_nas.evaluation.continuations import predict

        rows = zip(prepared["tokens"].tolist(), prepared["length"].tolist(), strict=True)
        lines = [
            {"block": block, "tokens": tokens[:length]}
            for block, (tokens, length) in enumerate(rows)
        ]
        blocks = self._blocks.part(self.part(index))
        predicted = predict(model, blocks, lines, self._new_tokens, temperature=self._temperature)
        scores = []
        for line, dense in zip(predicted, prepared["predicted"], strict=True):
            values = np.array(line["predicted"])
            difference = values - dense[: len(values)]
            score = (
                difference == 0 if self._temperature == 0 else np.exp(np.minimum(difference, 0.0))
            )
            scores.append(score.mean())
        return np.array(scores, dtype=np.float64)


def _padded(rows: Sequence[Sequence[float]]) -> arrays.Float:
    """Return rows of unequal length as an array [N, T], padded with 0."""
    padded = np.zeros((len(rows), max(map(len, rows))))
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


@dataclass(frozen=True)
class Recall(Criterion):
    """Share of the tokens of a passage that are predicted when it occurs again, far from where it occurred first."""

    name = "recall"
    title = "Recall of repeated passages"
    help = (
        "drop of the share of tokens predicted where a passage occurs again, in percentage points"
    )
    test = MeanDrop()

    distance: Distance = default(None, "nearly a block, less where documents are shorter")

    def prepare(self, setting: Setting) -> Rounds:
        """Return the documents that are longer than the distance, with a passage of each repeated at the end."""
        blocks = setting.blocks
        size = setting.blocks.block_size
        length = max(2 * _CUE, min(64, size // 16))
        # Tokens of the last document of each block
        last = (blocks.document == blocks.document[:, -1:]).sum(1)
        farthest = max(length, min(size - size // 16, int(np.median(last))) - length)
        distance = farthest if self.distance is None else self.distance
        if not length <= distance <= last.max() - length:
            raise UserError(
                f"recall: passages of {length} tokens cannot be {distance} apart: blocks of {size} have up to "
                f"{last.max()} tokens of one document"
            )
        long = one_per_document(blocks.part(np.flatnonzero(last >= distance + length)), length)
        return RecallRounds(long, size - length - distance, length, setting.text_hash)


class RecallRounds(Rounds):
    """Shares of the tokens of passages that a model predicts where they occur again, at the end of a block."""

    def __init__(self, blocks: "TokenBlocks", first: int, length: int, identity: str) -> None:
        """Repeat the ``length`` tokens from position ``first`` on at the end of each block, in random order."""
        self._blocks = blocks
        self._passages = blocks.tokens[:, first : first + length]
        self.identity = f"{identity} {first} {length}"
        self.num_samples = blocks.num_blocks

    def note(self, pairs: arrays.Float, details: Details) -> str:
        """Return how much of the passages both models recall."""
        own, dense = 100.0 * pairs.mean(0)
        return f"predicts {own:.1f} % of passages that occur again, dense model {dense:.1f} %"

    def measure(self, index: int, model: "PreTrainedModel", prepared: Prepared) -> arrays.Float:
        """Return the share of each passage of a round whose tokens, but for the first four, are the most probable."""
        from spkv_nas.evaluation.continuations import predict

        passages = self._passages[self.part(index)]
        lines = [
            {"block": block, "tokens": passage.tolist()} for block, passage in enumerate(passages)
        ]
        predicted = predict(
            model, self._blocks.part(self.part(index)), lines, passages.shape[1], temperature=0.0
        )
        is_right = np.array([line["predicted"] for line in predicted]) == passages
        return np.asarray(is_right[:, _CUE:].mean(1))


CRITERIA: registry.Registry[Criterion] = registry.Registry(
    "spkv_nas.criteria",
    "criterion",
    Criterion,  # type: ignore[type-abstract]
    (
        DocumentNLLs(),
        Divergence(),
        SameTop(),
        Agreement(),
        Acceptance(),
        Recall(),
        Answers(),
        Needles(),
    ),
)


def parse_margins(text: str) -> Margins:
    """Return the criteria with their margins, in the order of "nll=1%,ruler=2:lengths=512,4k:tasks=vt".

    Of criteria that "|" separates, such as "needles=5|recall=10", the first that the dense model can be judged by
    counts. Raises ``UserError`` if a criterion is unknown or named twice, a margin is no positive number below 100, or
    an option is wrong.
    """
    margins: Margins = []
    named: list[str] = []
    for part in _CRITERION.split(text):
        options = [_parse_margin(alternative) for alternative in _ALTERNATIVE.split(part)]
        named += [criterion.name for criterion, _ in options]
        margins.append(options[0] if len(options) == 1 else (Alternatives(tuple(options)), 0.0))
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--margin {text}: {twice} has two margins")
    return margins


def _parse_margin(text: str) -> tuple[Criterion, float]:
    """Return one criterion with its margin."""
    # Split the margin and the options from the name
    loss, *options = _OPTION.split(text.strip())
    name, _, amount = (word.strip() for word in loss.partition("="))
    criterion = CRITERIA[name]
    number = _number(amount.removesuffix("%"))
    if not 0.0 < number < 100.0:
        raise UserError(f"--margin {loss}: expected NAME=LOSS with a loss above 0 and below 100")
    return criterion.with_words(options), number


def parse_risk(text: str | float) -> float:
    """Return a risk as a share: 0.05 for "5%" and for 0.05; ``UserError`` unless it is above 0 and up to 50 %."""
    text = str(text)
    risk = _number(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    if not 0.0 < risk <= 0.5:
        raise UserError(f"--risk {text}: expected a probability above 0 and up to 50%, such as 5%")
    return risk


def criteria_help() -> str:
    """Return the criteria with what their loss is, for the help of ``--margin``."""
    return "; ".join(f"{criterion.name}: {criterion.help}" for criterion in CRITERIA)


def options_help() -> str:
    """Return the options of all criteria with their help, a paragraph for each criterion that has some."""
    helps = {criterion.name: criterion.options_help() for criterion in CRITERIA}
    return "\n\n".join(f"Options of {name}: {text}" for name, text in helps.items() if text)


def _number(text: str) -> float:
    """Return a number; NaN for other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan
