"""Hash some RULER samples, in a separate process too; imports no torch."""

from __future__ import annotations

import hashlib

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spkv_nas.base.assets import EMBEDDED
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.tasks import available, generate


def embedded_tokenizer() -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast.from_pretrained(EMBEDDED / "dense")


def digest(tokenizer: PreTrainedTokenizerBase) -> str:
    result = hashlib.sha256()
    for task in available(Material()):
        for index in range(3):
            result.update(repr(generate(task, 0, index, 1024, tokenizer)).encode())
    return result.hexdigest()


if __name__ == "__main__":
    print(digest(embedded_tokenizer()))
