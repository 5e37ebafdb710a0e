"""Criterion ``longppl``: the NLL of the key tokens of documents, which the dense model selects.

The text of a document is what blocks hold of it, each part read by itself. All models have the same tokenizer, so key
tokens are positions, not spans of characters as in ``evaluate longppl``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base import arrays, errors, flag
from spkv_nas.contrib.evaluate.longppl.options import SHORT_CONTEXT, ShortContext
from spkv_nas.evaluation.verdict import criterion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from spkv_nas.contrib.evaluate.longppl.reading import Criterion as KeyCriterion
    from spkv_nas.data.blocks import TokenBlocks


@dataclass(frozen=True)
class KeyTokenNLL(criterion.Criterion):
    """Rise of the NLL of key tokens."""

    name, title = "longppl", "NLL of key tokens (LongPPL)"
    help = "rise of the NLL of key tokens, which need a long context, in percent"
    test = criterion.RelativeRise()

    short_context: ShortContext = flag.default(None, f"{SHORT_CONTEXT:,}, at most 1/4 of a block")

    def prepare(self, setting: criterion.Setting) -> criterion.Rounds:
        """Return the documents of the text whose parts in a block are longer than the short context."""
        from spkv_nas.contrib.evaluate.longppl.reading import Criterion as KeyCriterion

        key = KeyCriterion.of(setting.blocks.block_size, self.short_context)
        return KeyTokenRounds(setting.blocks, key, f"{setting.text_hash} {setting.identity} {key}")


class KeyTokenRounds(criterion.Rounds):
    """NLL sums of the key tokens of documents, in rounds of documents; those without key tokens are left out."""

    # 1 for key tokens, else 0, over all parts of the documents of a round
    prepared = (arrays.Array("is_key", "whole", "T", high=1),)

    def __init__(self, blocks: "TokenBlocks", key: "KeyCriterion", identity: str) -> None:
        """Collect the parts of each document that are longer than the short context; ``UserError`` without any."""
        self.identity, self._key, self._opening = identity, key, blocks.opening
        parts: dict[int, list[NDArray[np.int64]]] = {}
        for document, ids in _parts(blocks):
            if len(ids) > key.short:
                parts.setdefault(document, []).append(ids)
        if not parts:
            raise errors.UserError(
                f"no document has more than the short context of {key.short} tokens in a block\n"
                "use longer text, a larger --block-size, or a smaller short-context"
            )
        self._documents = [parts[document] for document in sorted(parts)]
        self.num_samples = len(self._documents)  # including those that turn out to have no key tokens

    def prepare(self, index: int, dense: "PreTrainedModel") -> dict[str, NDArray[Any]]:
        """Select the key tokens of a round with the dense model."""
        from spkv_nas.contrib.evaluate.longppl.reading import key_mask
        from spkv_nas.model.modes import evaluation_mode

        documents = self._documents[self.part(index)]
        with evaluation_mode(dense):
            masks = [key_mask(dense, ids, self._key, self._opening) for parts in documents for ids in parts]
        return {"is_key": np.concatenate(masks).astype(np.int64)}

    def measure(self, index: int, model: "PreTrainedModel", prepared: criterion.Prepared) -> criterion.Float:
        """Return the NLL sum of each document's key tokens; ``NO_SCORE`` without any."""
        from spkv_nas.contrib.evaluate.longppl.reading import sequence_nll
        from spkv_nas.model.modes import evaluation_mode

        is_key, position, sums = prepared["is_key"] > 0, 0, []
        with evaluation_mode(model):
            for parts in self._documents[self.part(index)]:
                total, num_keys = 0.0, 0
                for ids in parts:
                    part = is_key[position : position + len(ids)]
                    position, num_keys = position + len(ids), num_keys + int(part.sum())
                    if part.any():  # the first token has no NLL, and is no key token
                        total += float(sequence_nll(model, ids[None], self._opening)[0][part[1:]].sum())
                sums.append(total if num_keys else criterion.NO_SCORE)
        return np.array(sums, dtype=np.float64)


def _parts(blocks: "TokenBlocks") -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (document, its tokens) of each stretch of a document in a block, without opening tokens."""
    first = len(blocks.opening)
    for tokens, document in zip(blocks.tokens[:, first:], blocks.document[:, first:], strict=True):
        starts = np.flatnonzero(np.diff(document)) + 1
        for ids, owner in zip(np.split(tokens, starts), np.split(document, starts), strict=True):
            yield int(owner[0]), ids.astype(np.int64)


LONGPPL = KeyTokenNLL()
