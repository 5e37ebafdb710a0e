"""Choose the length at which a model is measured on a text: none at which the text has too little to tell."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from spkv_nas.data.sources import Document, encode_documents
from spkv_nas.data.tokenizer import Tokenizer

SAMPLED_DOCUMENTS = 256  # of a text, whose lengths choose the context
# Least share of a text's tokens with half a context or more of their own document before them
FAR_SHARE = 0.1
# Tokens, which have two windows that are measured: 32 and 64 keys (``window_costs``)
SHORTEST = 128
_CHARACTERS = 8  # read of a document per token of the longest context; few tokenizers reach 6


def far_share(lengths: Sequence[int], context: int) -> float:
    """Return the share of the tokens of documents, cut at ``context``, that have half of it or more before them.

    Args:
        lengths: tokens of each document.
        context: tokens of the longest sequence that a model reads.

    Returns:
        A share between 0 and 1/2; 0 without tokens.
    """
    half = context // 2
    far = total = 0
    for length in lengths:
        whole, rest = divmod(length, context)
        far += whole * (context - half) + max(0, rest - half)
        total += length
    return far / total if total else 0.0


def supported_context(documents: Iterable[Document], tokenizer: Tokenizer, longest: int) -> int:
    """Return the longest context at which a text tells what heads do with distant tokens.

    It is ``longest`` or a power of two below it: the largest with ``FAR_SHARE`` of the tokens in its farther half,
    counted in the beginnings of the first ``SAMPLED_DOCUMENTS`` documents. A text that supports none gets ``SHORTEST``,
    or ``longest`` if that is less.

    Args:
        documents: the text.
        tokenizer: of the model.
        longest: tokens, such as the model's context.
    """
    lengths = [
        _length(document, tokenizer, longest) for document in islice(documents, SAMPLED_DOCUMENTS)
    ]
    context = longest
    while context > SHORTEST and far_share(lengths, context) < FAR_SHARE:
        context = 1 << ((context - 1).bit_length() - 1)  # the next power of two below it
    return context


def _length(document: Document, tokenizer: Tokenizer, longest: int) -> int:
    """Return the tokens of a document, at most ``longest``."""
    if not document.is_chat:
        document = replace(document, text=document.text[: _CHARACTERS * longest])
    return min(longest, len(encode_documents([document], tokenizer)[0]))
