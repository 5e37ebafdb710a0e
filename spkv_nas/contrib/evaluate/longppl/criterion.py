"""Criterion ``longppl``: the NLL of the key tokens of documents, which the dense model selects.

The text of a document is what blocks hold of it, each part read by itself. All models have the same tokenizer, so key
tokens are positions, not spans of characters as in ``evaluate longppl``.
"""

from dataclasses import dataclass

from spkv_nas.base import flag
from spkv_nas.contrib.evaluate.longppl.options import SHORT_CONTEXT, ShortContext
from spkv_nas.evaluation.verdict import criterion


@dataclass(frozen=True)
class KeyTokenNLL(criterion.Criterion):
    """Rise of the NLL of key tokens."""

    name = "longppl"
    title = "NLL of key tokens (LongPPL)"
    help = "rise of the NLL of key tokens, which need a long context, in percent"
    test = criterion.RelativeRise()

    short_context: ShortContext = flag.default(None, f"{SHORT_CONTEXT:,}, at most 1/4 of a block")

    def prepare(self, setting: criterion.Setting) -> criterion.Rounds:
        """Return the documents of the text whose parts in a block are longer than the short context."""
        from spkv_nas.contrib.evaluate.longppl import reading

        key = reading.Criterion.of(setting.blocks.block_size, self.short_context)
        return reading.KeyTokenRounds(
            setting.blocks, key, f"{setting.text_hash} {setting.identity} {key}"
        )


LONGPPL = KeyTokenNLL()
