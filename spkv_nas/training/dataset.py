"""Training datasets: blocks of text that the trainer shuffles, or all blocks of a run in a fixed order."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from spkv_nas.base.errors import UserError
from spkv_nas.data.batches import BlockOrder, Mixture, library_order, mixed_order
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.ruler.material import Essays, Material
from spkv_nas.data.ruler.sample_blocks import RulerBlocks
from spkv_nas.data.ruler.tasks import NO_MATERIAL, available
from spkv_nas.model.loss import NO_TARGET
from spkv_nas.training.branch_config import BranchConfig
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.recipe import DenseConfig, Recipe

_MIN_SAMPLES = 2  # minimum number of held-out RULER blocks, so that a domain has a standard error

Item = dict[str, torch.Tensor]  # "input_ids", "labels", and "position_ids" of separate documents, all int64 [T]


class BlockDataset(Dataset[Item]):
    """Dataset of text blocks, to be shuffled by the trainer."""

    def __init__(self, blocks: TokenBlocks) -> None:
        """Wrap ``blocks``."""
        self._tokens, self._boundaries = blocks.tokens, blocks.boundaries

    def __len__(self) -> int:
        """Return the number of blocks."""
        return int(self._tokens.shape[0])

    def __getitem__(self, index: int) -> Item:
        """Return block ``index``, with all tokens as labels but those that begin a text."""
        tokens = self._tokens[index].astype(np.int64)
        labels = np.where(self._boundaries.begins_text(tokens), NO_TARGET, tokens)
        return {**self._boundaries.inputs(torch.from_numpy(tokens)), "labels": torch.from_numpy(labels)}


class OrderedDataset(Dataset[Item]):
    """Dataset of all blocks of a run in training order, with synthetic samples mixed into the text."""

    def __init__(
        self, text: TokenBlocks, order: BlockOrder, mixture: Mixture, samples: RulerBlocks | None, length: int
    ) -> None:
        """Combine blocks of ``text`` in ``order`` with ``samples`` where ``mixture`` places them, ``length`` in all."""
        self._text, self._order, self._mixture, self._samples = BlockDataset(text), order, mixture, samples
        self._length = length

    def __len__(self) -> int:
        """Return the number of blocks in the run."""
        return self._length

    def __getitem__(self, index: int) -> Item:
        """Return the block at position ``index``; in samples, only answer tokens may be labels."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        is_sample, number = self._mixture.at(index)
        if not is_sample:
            return self._text[self._order.at(number)]
        assert self._samples is not None
        tokens, learned = map(torch.from_numpy, self._samples.block(number))
        return {**self._samples.boundaries.inputs(tokens), "labels": tokens.where(learned, NO_TARGET)}


class ExtendedDataset(Dataset[Item]):
    """Dataset of a run that switches from short blocks to blocks ``ratio`` times as long.

    Indices count short blocks throughout, and ``ratio`` consecutive indices make one long block. The trainer therefore
    asks for the same number of indices per batch, and gets fewer and longer blocks with the same number of tokens.
    """

    def __init__(self, short: OrderedDataset, long: OrderedDataset, ratio: int) -> None:
        """Concatenate ``short`` and ``long`` blocks."""
        self._short, self._long, self._ratio = short, long, ratio

    def __len__(self) -> int:
        """Return the length of the run in short blocks."""
        return len(self._short) + self._ratio * len(self._long)

    def __getitem__(self, index: int) -> Item:
        """Return short block ``index``, or the corresponding part of a long block."""
        if index < len(self._short):
            return self._short[index]
        number, part = divmod(index - len(self._short), self._ratio)
        return {key: tokens.view(self._ratio, -1)[part] for key, tokens in self._long[number].items()}

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return the blocks for a batch of consecutive indices; called by torch's ``DataLoader``."""
        first = indices[0] - len(self._short)
        if first < 0:
            return [self._short[index] for index in indices]
        number, part = divmod(first, self._ratio)
        count, remainder = divmod(len(indices), self._ratio)
        assert not part
        assert not remainder
        return [self._long[number + offset] for offset in range(count)]


def training_data(recipe: Recipe, corpus: Corpus, phase: DenseConfig | BranchConfig, seed: int) -> Dataset[Item]:
    """Build the dataset of a phase of a recipe, in the order drawn by ``seed``.

    Raises ``UserError``: a task of the mixture does not fit in a block, or the text has less than a batch of longer
    blocks.
    """
    # Plain text, which the trainer shuffles
    text, batch = corpus.train, phase.batch_size
    extend = phase.extend if isinstance(phase, BranchConfig) else None
    if recipe.data.mix is None and extend is None:
        return BlockDataset(text)
    # Order of the text blocks, and positions of the samples
    number = text.num_blocks
    if recipe.data.mix is None:
        order = BlockOrder(library_order, number, seed, number // batch * batch)
        mixture = Mixture(0.0)
    else:
        order = BlockOrder(mixed_order, number, seed, number)
        mixture = Mixture.drawn(recipe.data.mix.ruler.share, number, seed)
    # Blocks up to the extension, or all
    start = batch * (phase.steps if extend is None else extend.first_step(phase.steps))
    short = OrderedDataset(
        text, order, mixture, ruler_blocks(recipe, corpus.tokenizer, corpus.essays, text, seed), start
    )
    if extend is None:
        return short
    # Longer blocks from the extension on
    size, ratio = extend.block_size, extend.block_size // text.block_size
    longer = text.cut(size)
    if longer.num_blocks < batch // ratio:
        raise UserError(
            f"branch.extend: the training text gives {longer.num_blocks} blocks of {size} tokens, fewer than one batch "
            f"of {batch // ratio}\ngive more text, or a smaller branch.extend.block_size"
        )
    order, num_indices = order.longer(ratio, start - mixture.synthetic(start)), batch * phase.steps - start
    samples = ruler_blocks(recipe, corpus.tokenizer, corpus.essays, longer, seed)
    long = OrderedDataset(longer, order, mixture.longer(ratio, start), samples, num_indices // ratio)
    return ExtendedDataset(short, long, ratio)


def ruler_blocks(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, essays: Essays | None, text: TokenBlocks, seed: int
) -> RulerBlocks | None:
    """Return the samples that a recipe mixes into its text, in blocks like those of ``text``; None without a mixture.

    Raises ``UserError``: a task does not fit in a block.
    """
    if recipe.data.mix is None:
        return None
    mix = recipe.data.mix.ruler
    # Choose the tasks, and cap their lengths at the room in a block
    size, longest = text.block_size, text.block_size - len(text.opening)
    tasks = tuple(mix.tasks_of(available(NO_MATERIAL)))
    lengths = tuple(min(length, longest) for length in mix.lengths or [size])
    samples = RulerBlocks(tokenizer, size, tasks, lengths, mix.loss == "all", seed, Material(essays), text.boundaries)
    samples.check()
    return samples


def mixed_heldout(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, essays: Essays | None, text: TokenBlocks, num_blocks: int
) -> TokenBlocks:
    """Return ``num_blocks`` blocks of held-out text and RULER samples, mixed as the recipe's training text is.

    Raises ``UserError``: a task does not fit in a block.
    """
    samples = ruler_blocks(recipe, tokenizer, essays, text, recipe.seed)
    assert samples is not None
    assert recipe.data.mix is not None
    # Draw the mixture's share of samples, but not too few, and fill the rest with text
    number = max(min(_MIN_SAMPLES, num_blocks), round(recipe.data.mix.ruler.share * num_blocks))
    held_out = samples.held_out(number)
    return held_out if number == num_blocks else text.spread(num_blocks - number).and_(held_out)
