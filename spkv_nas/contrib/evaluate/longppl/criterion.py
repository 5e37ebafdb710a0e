"""Criterion ``longppl``: the NLL of the key tokens of documents, which the dense model selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spkv_nas.base.flag import default
from spkv_nas.contrib.defaults import LONGPPL_SHORT
from spkv_nas.contrib.evaluate.longppl.options import ShortContext
from spkv_nas.evaluation.verdict.criterion import Criterion, Setting
from spkv_nas.evaluation.verdict.loss_tests import RelativeRise

if TYPE_CHECKING:
    from spkv_nas.evaluation.verdict.rounds import Rounds


@dataclass(frozen=True)
class KeyTokenNLL(Criterion):
    """Rise of the NLL of key tokens."""

    name, title = "longppl", "NLL of key tokens (LongPPL)"
    help = "rise of the NLL of key tokens, which need a long context, in percent"
    test = RelativeRise()

    short_context: ShortContext = default(None, f"{LONGPPL_SHORT:,}, at most 1/4 of a block")

    def prepare(self, setting: Setting) -> Rounds:
        """Return the documents of the text whose parts in a block are longer than the short context."""
        from spkv_nas.contrib.evaluate.longppl.reading import Criterion as KeyTokens
        from spkv_nas.contrib.evaluate.longppl.rounds import KeyTokenRounds

        criterion = KeyTokens.of(setting.blocks.block_size, self.short_context)
        return KeyTokenRounds(setting.blocks, criterion, f"{setting.text_hash} {setting.identity} {criterion}")


LONGPPL = KeyTokenNLL()
