"""Measure which separator between documents a model knows, and what packing documents into blocks costs it.

A model that was trained with BOS before every document may never have seen EOS. A text packed with EOS between its
documents then disturbs full attention more than local heads, which forget the token, and the wrong heads look good.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.defaults import BLOCK_SIZE
from spkv_nas.base import files, progress, statistics
from spkv_nas.base.arrays import Float, Int, Tokens
from spkv_nas.base.errors import UserError
from spkv_nas.data import config, sources
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.data.tokenizer import Boundaries, boundaries, default_separator
from spkv_nas.model import cache_layers, loss, model_shape, modes
from spkv_nas.model.placement import input_device

SEPARATORS = "separators.json"  # in the folder of a model's runs
SEPARATOR_TOKENS = 3072  # of text; each is read five times
MAX_PACKING_COST = 1.0  # percent of NLL
_DOCUMENT = 256  # maximum tokens of a document; a separator matters most right after it
_CHARACTERS = 16  # read of a document per token that is used
_SIGNIFICANT = 2.0  # standard errors
_MIN_GAIN = 0.002  # share of NLL
_CHUNK_TOKENS = 4096  # per forward pass


@dataclass(frozen=True)
class SeparatorReport:
    """NLL (nats per token) of a model on short documents packed with each separator, over the tokens of all packings.

    ``best`` is the tokenizer's convention, unless another is better by two standard errors and 0.2 %; then the shortest
    that is not that much worse than the separator of the lowest NLL. ``nll`` is empty if the user chose ``best``;
    ``alone`` is that of each document alone, after what begins a text. ``documents`` are "joined" or "separate" in the
    text that is measured on, as the user chose.
    """

    best: str
    nll: Mapping[str, float] = field(default_factory=dict)
    alone: float = math.nan
    documents: str = config.JOINED

    @property
    def packing_cost(self) -> float:
        """Return how much higher the NLL is with the best separator than of each document alone, in percent, or NaN."""
        if self.documents == config.SEPARATE:
            return 0.0
        return 100.0 * (self.nll.get(self.best, math.nan) / self.alone - 1.0)

    def as_mapping(self) -> dict[str, object]:
        """Return the entries for a record."""
        record: dict[str, object] = {"best": self.best}
        if self.documents != config.JOINED:
            record["documents"] = self.documents
        if self.nll:
            rounded = {name: round(value, 4) for name, value in self.nll.items()}
            record |= {"nll": rounded, "alone": round(self.alone, 4)}
        return record

    @classmethod
    def parse(cls, content: Any) -> "SeparatorReport | None":
        """Return the report of a record; None for anything else."""
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError:
            return None


def measure_separator(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str | sources.Document],
    block_size: int = BLOCK_SIZE,
    bos: config.Bos = config.AUTO,
) -> SeparatorReport:
    """Measure the NLL of a model on the same documents, packed with no separator, EOS, BOS, and both.

    The beginnings of the first documents are read, 3,072 tokens in all, at most 256 of each and a quarter of a block,
    so that every block has several. The first token of a document is not counted.

    Args:
        model: the dense model.
        tokenizer: its tokenizer.
        texts: strings or documents.
        block_size: tokens per block.
        bos: whether every block begins with a BOS token, see ``data.tokenizer.boundaries``.

    Raises:
        UserError: there is no text, or it has tokens outside the model's vocabulary.

    Example::

        separator = spkv_nas.measure_separator(model, tokenizer, texts).best
        blocks = spkv_nas.build_blocks(texts, tokenizer, separator=separator)
    """
    # Read the beginnings of documents
    documents = _beginnings(
        sources.as_documents(texts, block_size), tokenizer, min(_DOCUMENT, max(2, block_size // 4))
    )
    model_shape.check_tokens(model, max(int(each.max()) for each in documents))
    # Leave out separators that the model's vocabulary lacks
    vocabulary = model_shape.vocabulary_size(model)
    variants = {
        name: limits
        for name, limits in _variants(tokenizer, bos, block_size).items()
        if max((*limits.opening, *limits.separator), default=0) < vocabulary
    }
    # Group the documents into blocks that have room for every separator's opening tokens
    groups = _groups(documents, block_size - max(len(each.opening) for each in variants.values()))

    # Measure packed documents with each separator, and single documents
    with modes.evaluation_mode(model):
        sums = {name: _sums(model, groups, limits) for name, limits in variants.items()}
        openings = {limits.opening for limits in variants.values()}
        alone = [
            _sums(model, [[each] for each in documents], Boundaries(opening))
            for opening in openings
        ]
    # Average over tokens
    count = sum(len(each) - 1 for each in documents)
    convention = default_separator(tokenizer, bos)
    return SeparatorReport(
        _best(sums, convention),
        {name: float(values.sum()) / count for name, values in sums.items()},
        min(float(values.sum()) for values in alone) / count,
    )


def text_blocks(
    model: PreTrainedModel, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase | None
) -> TokenBlocks:
    """Tokenize texts into blocks of the default size, or of the model's context length if shorter.

    Documents do not see each other, unless the model cannot keep them apart. All texts are checked before the model
    runs. Raises ``UserError``: one is no text, or there is no tokenizer.
    """
    if tokenizer is None:
        raise UserError(
            "strings need the model's tokenizer: give tokenizer=tokenizer, "
            "or blocks of build_blocks"
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    size = min(BLOCK_SIZE, positions or BLOCK_SIZE)
    documents = list(sources.as_documents(texts, size))
    separator = measure_separator(model, tokenizer, documents, size).best
    reading = config.JOINED if cache_layers.mixes_documents(model) else config.SEPARATE
    return build_blocks(documents, tokenizer, size, separator=separator, documents=reading)


def shared_separator(
    file: Path,
    checkpoint: str,
    measure: Callable[[], SeparatorReport],
    reporter: progress.Reporter = progress.SILENT,
) -> SeparatorReport:
    """Return what ``file``, which all commands share, says of a checkpoint hash; else measure it and add it."""
    # Look for an earlier report; an unreadable file counts as empty
    records: dict[str, object] = {}
    with suppress(UserError):
        records = files.read_json(file, "separators")
    if (known := SeparatorReport.parse(records.get(checkpoint))) is not None:
        return known
    # Measure, and keep the report
    reporter.announce("choosing what separates documents")
    report = measure()
    compared = ", ".join(f"{name} {value:.3f}" for name, value in report.nll.items())
    reporter.announce(
        f"documents are separated by '{report.best}' (NLL: {compared}; "
        f"each document alone {report.alone:.3f})"
    )
    files.write_json(file, {**records, checkpoint: report.as_mapping()})
    return report


def _best(sums: dict[str, Float], convention: str) -> str:
    """Return the first separator that is not clearly worse than the best: the convention, then the shortest."""
    best = min(sums.values(), key=lambda values: float(values.sum()))

    def is_close(values: Float) -> bool:
        ratio, error = statistics.jackknife_ratio(values - best, best)
        return not float(ratio) > max(_MIN_GAIN, _SIGNIFICANT * float(error))

    ordered = [name for name in (convention, *config.SEPARATORS) if name in sums]
    return next(name for name in ordered if is_close(sums[name]))


def _variants(
    tokenizer: PreTrainedTokenizerBase, bos: config.Bos, block_size: int
) -> dict[str, Boundaries]:
    """Return the boundaries of every separator that the tokenizer has, without repetitions."""
    variants: dict[str, Boundaries] = {}
    has = {
        "eos": tokenizer.eos_token_id is not None,
        "bos": bos is not False and tokenizer.bos_token_id is not None,
    }
    for name in config.SEPARATORS:
        if all(has[part] for part in name.split("+") if part in has):
            limits = boundaries(tokenizer, name, bos, block_size)
            if limits not in variants.values() and len(set(limits.separator)) == len(
                limits.separator
            ):
                variants[name] = limits
    return variants


def _beginnings(
    documents: Iterable[sources.Document], tokenizer: PreTrainedTokenizerBase, most: int
) -> list[Tokens]:
    """Return the beginnings of documents, of two to ``most`` tokens each, up to ``SEPARATOR_TOKENS`` in all."""
    beginnings: list[Tokens] = []
    for document in documents:
        if not document.is_chat:
            document = replace(document, text=document.text[: _CHARACTERS * most])
        tokens = sources.encode_documents([document], tokenizer)[0][:most]
        if len(tokens) > 1:
            beginnings.append(tokens)
        if sum(map(len, beginnings)) >= SEPARATOR_TOKENS:
            break
    if not beginnings:
        raise UserError(
            "no document has two tokens: the text is empty, or the tokenizer knows no word of it"
        )
    return beginnings


def _groups(documents: Sequence[Tokens], size: int) -> list[list[Tokens]]:
    """Return consecutive documents in groups of at most ``size`` tokens with three separators' tokens for each."""
    groups: list[list[Tokens]] = [[]]
    room = size
    for document in documents:
        room -= len(document) + 3
        if room < 0 and groups[-1]:
            groups.append([])
            room = size - len(document) - 3
        groups[-1].append(document)
    return groups


@torch.inference_mode()
def _sums(model: PreTrainedModel, groups: Sequence[Sequence[Tokens]], limits: Boundaries) -> Float:
    """Return the NLL of each document, without its first token, where the documents of a group are in one sequence."""
    # Lay the documents of each group out, and remember where they start
    sequences: list[Int] = []
    starts = []
    for group in groups:
        parts: list[Any] = [limits.opening]
        for document in group:
            starts.append((len(sequences), sum(map(len, parts)), len(document)))
            parts += [document, limits.separator]
        sequences.append(np.concatenate(parts).astype(np.int64))
    # Pad to the right, which earlier tokens do not see
    length = max(map(len, sequences))
    padded = torch.from_numpy(
        np.stack([np.pad(each, (0, length - len(each))) for each in sequences])
    )
    chunks = torch.split(padded, max(1, _CHUNK_TOKENS // length))
    losses = (
        torch.cat([loss.token_nll(model, chunk.to(input_device(model))).cpu() for chunk in chunks])
        .double()
        .numpy()
    )
    return np.array(
        [losses[row, first : first + number - 1].sum() for row, first, number in starts]
    )
