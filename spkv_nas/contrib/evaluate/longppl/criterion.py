"""Criterion ``longppl``: the NLL of the key tokens of documents, which the dense model selects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spkv_nas.evaluation.verdict.paired_test import RelativeRise
from spkv_nas.stages.verdict.criterion import Criterion, Setting

if TYPE_CHECKING:
    from spkv_nas.evaluation.verdict.rounds import Rounds


def _key_tokens(setting: Setting) -> Rounds:
    """Return the documents of the text whose parts in a block are longer than the short context."""
    from spkv_nas.contrib.evaluate.longppl.reading import Criterion as KeyTokens
    from spkv_nas.contrib.evaluate.longppl.rounds import KeyTokenRounds
    from spkv_nas.model.checkpoint import checkpoint_hash

    options = setting.options
    criterion = KeyTokens.of(setting.blocks.block_size, options.short_context)
    identity = f"{setting.text_hash} {checkpoint_hash(options.model)} {criterion}"
    return KeyTokenRounds(setting.blocks, criterion, identity)


LONGPPL = Criterion("longppl", "documents", RelativeRise(), _key_tokens)
