"""What the trainer takes its batches from: the text's blocks as it shuffles them, or a run's in their order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.mixture import Mixture
from spkv_nas.data.order import BlockOrder, library_order, mixed_order
from spkv_nas.data.ruler.haystacks import Essays
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample_blocks import RulerBlocks
from spkv_nas.data.ruler.tasks import NO_MATERIAL, available
from spkv_nas.model.loss import NO_TARGET
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.extension import Extension
from spkv_nas.training.recipe import BranchConfig, DenseConfig, Recipe

Item = dict[str, Tensor]  # "input_ids" and "labels", both int64 [T]


class BlockDataset(Dataset[Item]):
    """Blocks of text, to be shuffled."""

    def __init__(self, blocks: TokenBlocks) -> None:
        self._tokens = blocks.tokens

    def __len__(self) -> int:
        return int(self._tokens.shape[0])

    def __getitem__(self, index: int) -> Item:
        tokens = torch.from_numpy(self._tokens[index].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


class OrderedDataset(Dataset[Item]):
    """All ``length`` blocks of a run in their order, samples among the text where there are any."""

    def __init__(
        self, text: TokenBlocks, order: BlockOrder, mixture: Mixture, samples: RulerBlocks | None, length: int
    ) -> None:
        self._text, self._order, self._mixture, self._samples = BlockDataset(text), order, mixture, samples
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self._length:
            raise IndexError(index)
        is_sample, number = self._mixture.at(index)
        if not is_sample:
            return self._text[self._order.at(number)]
        assert self._samples is not None
        tokens, learned = map(torch.from_numpy, self._samples.block(number))
        return {"input_ids": tokens, "labels": tokens.where(learned, NO_TARGET)}


class ExtendedDataset(Dataset[Item]):
    """A run whose blocks are ``ratio`` times as long from the place ``start`` on.

    Places are those of short blocks throughout, ``ratio`` of them one long block; so a batch has as many tokens as
    before, and the trainer, which asks for so many places, gets fewer and longer blocks.
    """

    def __init__(self, short: OrderedDataset, long: OrderedDataset, ratio: int) -> None:
        self._short, self._long, self._ratio = short, long, ratio

    def __len__(self) -> int:
        return len(self._short) + self._ratio * len(self._long)

    def __getitem__(self, index: int) -> Item:
        if index < len(self._short):
            return self._short[index]
        number, part = divmod(index - len(self._short), self._ratio)
        return {
            key: tokens.view(self._ratio, -1)[part] for key, tokens in self._long[number].items()
        }  # of a long block

    def __getitems__(self, places: Sequence[int]) -> list[Item]:
        """The blocks of a batch of consecutive places, as torch's loader asks for them."""
        first = places[0] - len(self._short)
        if first < 0:
            return [self._short[place] for place in places]
        number, part = divmod(first, self._ratio)
        count, rest = divmod(len(places), self._ratio)
        assert not part
        assert not rest
        return [self._long[number + one] for one in range(count)]


def training_data(
    recipe: Recipe,
    corpus: Corpus,
    phase: DenseConfig | BranchConfig,
    seed: int,
    extension: Extension | None = None,
) -> Dataset[Item]:
    """The blocks of a phase of a recipe, whose order ``seed`` decides.

    Raises:
        UserError: a task of the mixture has no room in a block, or the text no batch of longer blocks.
    """
    text, batch = corpus.train, phase.batch_size
    if recipe.data.mix is None and extension is None:
        return BlockDataset(text)
    number = text.num_blocks
    if recipe.data.mix is None:
        order = BlockOrder(library_order, number, seed, number // batch * batch)
        mixture = Mixture(0.0)
    else:
        order = BlockOrder(mixed_order, number, seed, number)
        mixture = Mixture.drawn(recipe.data.mix.ruler.share, number, seed)
    start = batch * (phase.steps if extension is None else extension.step)
    short = OrderedDataset(
        text, order, mixture, ruler_blocks(recipe, corpus.tokenizer, corpus.essays, text.block_size, seed), start
    )
    if extension is None:
        return short
    size, ratio = extension.block_size, extension.block_size // text.block_size
    longer = text.cut(size)
    if longer.num_blocks < batch // ratio:
        raise UserError(
            f"branch.extend: the training text gives {longer.num_blocks} blocks of {size} tokens, fewer than one batch "
            f"of {batch // ratio}\ngive more text, or a smaller branch.extend.block_size"
        )
    order, places = order.longer(ratio, start - mixture.synthetic(start)), batch * phase.steps - start
    samples = ruler_blocks(recipe, corpus.tokenizer, corpus.essays, size, seed)
    long = OrderedDataset(longer, order, mixture.longer(ratio, start), samples, places // ratio)
    return ExtendedDataset(short, long, ratio)


def ruler_blocks(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, essays: Essays | None, size: int, seed: int
) -> RulerBlocks | None:
    """The samples that a recipe mixes into its text, in blocks of ``size`` tokens; None without a mixture.

    Raises:
        UserError: a task has no room in them.
    """
    if recipe.data.mix is None:
        return None
    mix = recipe.data.mix.ruler
    samples = RulerBlocks(
        tokenizer, size, tuple(mix.tasks_of(available(NO_MATERIAL))), tuple(mix.lengths or [size]),
        mix.loss == "all", seed, Material(essays),
    )  # fmt: skip
    samples.check()
    return samples
