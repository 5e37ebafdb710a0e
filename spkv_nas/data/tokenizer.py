"""Cut long texts into pieces, encode text with any tokenizer, and train a byte-level BPE tokenizer.

Pieces serve as documents: a single file with a whole corpus can then be held out in part, counts as several clusters
for a standard error, and is never in memory as a whole. A piece is four blocks long at about four characters per token,
so that three of four blocks lie inside one piece, and has at least 8,192 characters, the length of a short article.

A tokenizer needs 180 bytes of memory per character while it encodes a text, so long texts are passed to it in pieces:
20 million characters then need 0.3 GB beyond the tokens instead of 3.4 GB.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from spkv_nas.base import errors, special_tokens
from spkv_nas.data.config import AUTO, BOS, EOS, EOS_BOS, JOINED, NO_SEPARATOR, SEPARATE, Bos

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    Tokenizer: TypeAlias = PreTrainedTokenizerBase
else:
    Tokenizer = Any  # of annotations, which need not import transformers

END_OF_TEXT = "<|endoftext|>"
BEGIN_OF_TEXT = "<|beginoftext|>"
MAX_ENCODED_CHARACTERS = 1_000_000  # maximum length of a text encoded at once
# Characters per piece in training, as the time of a merge grows with the length of words
TRAINING_PIECE = 1_000
PIECE = 8_192  # minimum characters of a piece that serves as a document
_BEGINNING = (BOS, EOS_BOS)  # separators that begin the next text
_BLOCKS = 4
_CHARACTERS_PER_TOKEN = 4


def piece_size(block_size: int) -> int:
    """Return the characters per piece of a text with blocks of ``block_size`` tokens."""
    return max(PIECE, _BLOCKS * _CHARACTERS_PER_TOKEN * block_size)


def cut(chunks: Iterable[str], size: int) -> Iterator[str]:
    """Cut the text that ``chunks`` make up into pieces of at most ``size`` characters, the last of up to half more.

    The pieces do not depend on the chunk boundaries, nor on later text.
    """
    remainder = ""
    for chunk in chunks:
        text = remainder + chunk
        start = 0
        while len(text) - start > size + size // 2:
            end = _end_of_piece(text, start, size)
            yield text[start:end]
            start = end
        remainder = text[start:]
    yield remainder


def _end_of_piece(text: str, start: int, size: int) -> int:
    """Return where a piece ends: in its second half after a paragraph, a line or before a space, else at ``size``."""
    middle = start + size // 2
    end = start + size
    for mark in ("\n\n", "\n"):
        position = text.rfind(mark, middle, end)
        if position >= 0:
            return position + len(mark)
    return max(text.rfind(" ", middle, end), 0) or end


def pieces(text: str, most: int = MAX_ENCODED_CHARACTERS) -> Iterator[str]:
    """Yield ``text``, or pieces of up to ``most`` characters if it has more than ``MAX_ENCODED_CHARACTERS``."""
    start = 0
    if len(text) <= MAX_ENCODED_CHARACTERS:
        most = len(text)
    while len(text) - start > most:
        end = _end_of_piece(text, start, most)
        yield text[start:end]
        start = end
    yield text[start:]


def encode(texts: list[str], tokenizer: Tokenizer) -> list[NDArray[np.int32]]:
    """Return the tokens, int32 [tokens], of each text, without special tokens.

    A special token that a text spells out is text, and encoded as such: a page on tokenizers that contains "</s>" does
    not end there. Texts of more than ``MAX_ENCODED_CHARACTERS`` are encoded piece by piece, which may lose one merge at
    every cut.
    """
    if max(map(len, texts), default=0) <= MAX_ENCODED_CHARACTERS:
        return _ids(texts, tokenizer)
    encoded = []
    for text in texts:
        parts = [_ids([piece], tokenizer)[0] for piece in pieces(text)]
        encoded.append(np.concatenate(parts))
    return encoded


def _ids(texts: list[str], tokenizer: Tokenizer) -> list[NDArray[np.int32]]:
    """Encode texts that are short enough."""
    if not texts:
        return []
    encoded = special_tokens.encode_text(texts, tokenizer)["input_ids"]
    return [np.array(ids, dtype=np.int32) for ids in encoded]


def unmarked(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return tokens without marks: a marked token is stored as its complement, ``~token``, which is negative."""
    return np.maximum(tokens, ~tokens)


@dataclass(frozen=True)
class Boundaries:
    """Special tokens of packed text.

    Where documents begin is known when they are packed, and is kept with the tokens (``TokenBlocks.begins``), because
    token ids do not tell it: a text may hold the id of a special token, as chats do. Methods that take tokens expect
    those of ``TokenBlocks.marked``, in which the first token of each separate document is marked.
    """

    opening: tuple[int, ...] = ()  # tokens that every block begins with
    separator: tuple[int, ...] = ()  # tokens after every document

    def ended(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the tokens of a document with its separator, in which those that begin a text are marked.

        These are the opening tokens that a separator holds for the next document.
        """
        end = np.array(self.separator, dtype=np.int32)
        num_opening = len(self.opening)
        if num_opening and self.separator[-num_opening:] == self.opening:
            end[-num_opening:] = ~end[-num_opening:]
        return np.concatenate([ids, end])

    @property
    def filling(self) -> int:
        """Return the token that fills up a block of samples, marked if it is an opening token."""
        end = self.ended(np.empty(0, dtype=np.int32))
        return int(end[-1]) if len(end) else 0

    def without_filling(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the tokens of a document in blocks as ``ended`` returned them, without the filling of a block."""
        return tokens

    def with_starts(
        self, tokens: NDArray[np.int32], begins: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """Return tokens [..., T] of blocks, the first of each separate document marked, given which begin a text."""
        return tokens

    def begins_text(self, tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which tokens [..., T] after the first of a block begin a text, as read from their ids.

        They are read, but not predicted. ``TokenBlocks.begins_text`` knows it without the ids.
        """
        begins: NDArray[np.bool_] = np.isin(tokens, self.opening) | (self.positions(tokens) == 0)
        begins[..., 0] = False
        return begins

    def is_filling(self, tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which tokens [..., T] only fill up a block: each is a document, and nothing is measured on it."""
        starts: NDArray[np.bool_] = self.positions(tokens) == 0
        # The token after the last one is the first of the block, which is a start, too
        is_before_start = np.roll(starts, -1, -1).astype(np.bool_)
        return starts & is_before_start

    def num_measured(self, tokens: NDArray[np.integer]) -> tuple[int, int]:
        """Return how many of the tokens [B, T] of blocks are predicted, and how many are text; at least 1 each."""
        num_targets = (self.positions(tokens)[:, 1:] > 0).sum()
        num_text = (~self.is_filling(tokens)).sum()
        return max(1, int(num_targets)), max(1, int(num_text))

    def positions(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the position of each token [..., T] in its block, or in a separate document."""
        return np.broadcast_to(np.arange(tokens.shape[-1]), tokens.shape)

    def inputs(self, tokens: "Tensor") -> "dict[str, Tensor]":
        """Return the keyword arguments of a model's pass over tokens [..., T]."""
        return {"input_ids": tokens}


class SeparateDocuments(Boundaries):
    """Special tokens of packed text whose documents do not see each other.

    Every document begins with the opening tokens. One that continues from the block before starts anew in its block.
    """

    def ended(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the tokens of a document with its separator, in which those that begin a text are marked.

        Without opening tokens, the first token of the document is.
        """
        return self.begun(super().ended(ids))

    def begun(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the tokens of a document, or of the rest of one, with the first marked if there is no opening."""
        if self.opening or not len(tokens):
            return tokens
        return np.concatenate([~unmarked(tokens[:1]), tokens[1:]])

    @property
    def filling(self) -> int:
        """Return the marked token that fills up a block; token 0 where no token stands between documents."""
        return ~(self.separator[-1] if self.separator else 0)

    def without_filling(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the tokens of a document in blocks as ``ended`` returned them, without the filling of a block."""
        last = np.flatnonzero(tokens >= 0).max(initial=-1)  # before the marked tokens at its end
        tokens = tokens[: last + 1 + len(self.opening)]
        if self.opening:
            return tokens
        return self.begun(unmarked(tokens))  # its parts in other blocks are marked as well

    def with_starts(
        self, tokens: NDArray[np.int32], begins: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """Return tokens [..., T] of blocks, the first of each separate document marked, given which begin a text."""
        return np.where(self.starts(begins), ~tokens, tokens)

    def starts(self, begins: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which tokens [..., T] are the first of a document in their block, given which ``begins`` a text.

        Documents without text, as at the end of a filled block, are divided into single tokens.
        """
        length = begins.shape[-1]
        num_opening = max(1, len(self.opening))
        columns = np.arange(length)
        # Find the next token of text: the opening tokens right before it belong to its document
        later = np.where(begins, length + num_opening, columns)
        next_text = np.minimum.accumulate(later[..., ::-1], -1)[..., ::-1]
        starts: NDArray[np.bool_] = begins & (next_text - columns >= num_opening)
        starts[..., 0] = True
        return starts

    def positions(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the position of each token [..., T] in its document.

        Documents of tokens without marks, which come from elsewhere, are divided at the ids of the separator.
        """
        is_marked = bool((tokens[..., 0] < 0).all())
        starts = tokens < 0 if is_marked else self._starts_by_id(tokens)
        columns = np.arange(tokens.shape[-1])
        first: NDArray[np.int64] = np.maximum.accumulate(np.where(starts, columns, 0), -1)
        return columns - first

    def inputs(self, tokens: "Tensor") -> "dict[str, Tensor]":
        """Return the keyword arguments of a pass over tokens [..., T]: positions tell the model the documents.

        The pass needs ``use_cache=False``, too: with a cache, transformers does not look for documents.
        """
        positions = tokens.new_tensor(self.positions(tokens.cpu().numpy()))
        return {"input_ids": tokens.maximum(~tokens), "position_ids": positions}

    def _starts_by_id(self, tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which tokens [..., T] without marks are the first of a document: those after a separator's end.

        Documents without text, as at the end of a filled block, are divided into single tokens. Without a separator, a
        row is one document.
        """
        starts = np.zeros(tokens.shape, dtype=np.bool_)
        if not self.separator:
            starts[..., 0] = True
            return starts
        stretches = sliding_window_view(tokens, len(self.separator), -1)
        is_separator = (stretches == self.separator).all(-1)
        # From a separator to the document that it begins
        first = len(self.separator) - len(self.opening)
        is_separator = is_separator[..., : tokens.shape[-1] - first]
        starts[..., first : first + is_separator.shape[-1]] = is_separator
        starts[..., 0] = True
        # Divide documents of special tokens alone
        is_special = np.isin(tokens, (*self.opening, *self.separator))
        first_tokens = np.flatnonzero(starts)
        is_empty = np.logical_and.reduceat(is_special.ravel(), first_tokens)
        sizes = np.diff(first_tokens, append=tokens.size)
        return starts | is_empty.repeat(sizes).reshape(tokens.shape)


PLAIN = Boundaries()  # text without special tokens


def default_separator(tokenizer: Tokenizer, bos: Bos = AUTO) -> str:
    """Return the separator to assume where no model measures it: what begins a text, else EOS, else none."""
    if bos is not False and special_tokens.tokens_before(tokenizer):
        return BOS
    return NO_SEPARATOR if tokenizer.eos_token_id is None else EOS


def boundaries(
    tokenizer: Tokenizer, separator: str, bos: Bos, block_size: int, documents: str = JOINED
) -> Boundaries:
    """Return the tokens that every block of text begins with, and those after every document.

    Models that were trained with a BOS token put much of their attention on it, so that blocks without one show
    another model than users run; and a token that a model never saw between documents disturbs it where it stands.

    Args:
        tokenizer: tokenizer of the model.
        separator: "none", "eos", "bos" (what begins a text), "eos+bos", another token of the vocabulary, or "auto"
            (``default_separator``). With BOS after documents, every block begins with it as well.
        bos: "auto" for the special tokens that the tokenizer puts before a text by itself, none for many; True for
            these or else its BOS token; False for none.
        block_size: tokens per block; ``UserError`` if one has no room for text, or the tokenizer lacks a token.
        documents: "joined", or "separate" if they do not see each other; all of these begin as a block does.
    """
    if documents not in (JOINED, SEPARATE):
        raise errors.UserError(f"unknown documents '{documents}'; expected {JOINED} or {SEPARATE}")
    if separator == AUTO:
        separator = default_separator(tokenizer, bos)
    if separator in _BEGINNING and bos is False:
        raise errors.UserError(
            f"data.separator is {separator}, but data.bos is false: leave one of them out"
        )
    opening = _opening(tokenizer, separator, bos)
    if len(opening) >= block_size:
        raise errors.UserError(
            f"blocks of {block_size} tokens have no room for text "
            f"after the {len(opening)} that begin every text\n"
            "use larger blocks (--context; data.block_size in a recipe; "
            "block_size in Python), or data.bos: false"
        )
    end = _end(tokenizer, separator)
    if documents == SEPARATE:
        return SeparateDocuments(opening, (*end, *opening))
    if separator in _BEGINNING:
        return Boundaries(opening, (*end, *opening))
    return Boundaries(opening, end)


def _opening(tokenizer: Tokenizer, separator: str, bos: Bos) -> tuple[int, ...]:
    """Return the tokens that begin a block."""
    if bos is False:
        return ()
    opening = special_tokens.tokens_before(tokenizer)
    if opening:
        return opening
    if bos is True:
        return (_special(tokenizer.bos_token_id, "BOS", "data.bos is true"),)
    if separator in _BEGINNING:
        return (_special(tokenizer.bos_token_id, "BOS", separator),)
    return ()


def _end(tokenizer: Tokenizer, separator: str) -> tuple[int, ...]:
    """Return the tokens that end a document, without those that begin the next one."""
    if separator in (NO_SEPARATOR, BOS):
        return ()
    if separator in (EOS, EOS_BOS):
        return (_special(tokenizer.eos_token_id, "EOS", separator),)
    return (_special(tokenizer.get_vocab().get(separator), repr(separator), separator),)


def _special(token: int | None, name: str, asked_for: str) -> int:
    """Return a token. Raises ``UserError`` if the tokenizer lacks it."""
    if token is None:
        raise errors.UserError(
            f"the tokenizer has no {name} token, "
            "but the separator of documents, or what begins a block, is set to "
            f"{asked_for}\nexpected none, eos, bos, "
            "eos+bos or a token of its vocabulary (--separator; data.separator)"
        )
    return int(token)


def train_bpe(texts: Iterable[str], vocab_size: int, bos: bool = False) -> Tokenizer:
    """Train a fast tokenizer of ``vocab_size`` entries, special tokens included; deterministic in the texts.

    With ``bos``, every text begins with a BOS token, ``<|beginoftext|>``, as in the tokenizers of most pretrained
    models.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    # Configure byte-level BPE
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, BEGIN_OF_TEXT] if bos else [END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if not bos:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
    # Put the BOS token before every text
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN_OF_TEXT} $A",
        special_tokens=[(BEGIN_OF_TEXT, tokenizer.token_to_id(BEGIN_OF_TEXT))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=BEGIN_OF_TEXT
    )
