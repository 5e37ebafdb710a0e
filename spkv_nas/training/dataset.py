"""What the trainer takes its batches from: the text's blocks as it shuffles them, or a run's in their order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.mixture import Mixture
from spkv_nas.data.ruler.blocks import RulerBlocks
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.tasks import NO_MATERIAL, available
from spkv_nas.model.loss import NO_TARGET
from spkv_nas.training.corpus import Corpus
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


class MixedDataset(Dataset[Item]):
    """All blocks of a run in their order, samples among the text."""

    def __init__(self, text: TokenBlocks, samples: RulerBlocks, mixture: Mixture, length: int) -> None:
        self._text, self._samples, self._mixture, self._length = BlockDataset(text), samples, mixture, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self._length:
            raise IndexError(index)
        is_sample, number = self._mixture.at(index)
        if not is_sample:
            return self._text[number]
        tokens, learned = map(torch.from_numpy, self._samples.block(number))
        return {"input_ids": tokens, "labels": tokens.where(learned, NO_TARGET)}


def training_data(recipe: Recipe, corpus: Corpus, phase: DenseConfig | BranchConfig, seed: int) -> Dataset[Item]:
    """The blocks of a phase of a recipe, whose order ``seed`` decides.

    Raises:
        UserError: a task of the mixture has no room in a block.
    """
    if recipe.data.mix is None:
        return BlockDataset(corpus.train)
    mix, size = recipe.data.mix.ruler, recipe.data.block_size
    samples = RulerBlocks(
        corpus.tokenizer, size, tuple(mix.tasks_of(available(NO_MATERIAL))), tuple(mix.lengths or [size]),
        mix.loss == "all", seed, Material(corpus.essays),
    )  # fmt: skip
    samples.check()
    mixture = Mixture(mix.share, corpus.train.num_blocks, seed)
    return MixedDataset(corpus.train, samples, mixture, phase.steps * phase.batch_size)
