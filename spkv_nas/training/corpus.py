"""Text of a recipe: its token blocks, the datasets made of them, and connection of the ranks that train on it.

The trainer shuffles the blocks of plain text; with mixed-in samples or longer blocks the datasets fix their order.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from spkv_nas.base import distributed, errors, extras, locks, manifest, replace
from spkv_nas.base.device import choose_device
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.cost.formulas import OPTIMIZERS
from spkv_nas.data import sources, splits
from spkv_nas.data.batches import BlockOrder, Mixture, library_order, mixed_order
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.config import AUTO, EOS, NO_SEPARATOR, DataConfig
from spkv_nas.data.ruler.material import Essays, Material
from spkv_nas.data.ruler.sample_blocks import RulerBlocks
from spkv_nas.data.ruler.tasks import NO_MATERIAL, available
from spkv_nas.evaluation.separators import (
    SEPARATORS,
    SeparatorReport,
    measure_separator,
    shared_separator,
)
from spkv_nas.model import checkpoint, loss, weight_files
from spkv_nas.training.branch_config import BranchConfig
from spkv_nas.training.recipe import DenseConfig, Recipe

if TYPE_CHECKING:
    from hashlib import _Hash as Digest


_MIN_SAMPLES = 2  # minimum number of held-out RULER blocks, so that a domain has a standard error

# "input_ids", "labels", and "position_ids" of separate documents, all int64 [T]
Item = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Corpus:
    """Text of a recipe as token blocks."""

    tokenizer: PreTrainedTokenizerBase  # tokenizer of the blocks
    train: TokenBlocks  # training text
    heldout: TokenBlocks  # held-out text
    # What stands after a document
    separator: SeparatorReport = field(default_factory=lambda: SeparatorReport(EOS))
    essays: Essays | None = None  # haystacks for RULER samples in the mixture; None without them

    @cached_property
    def training_text(self) -> str:
        """Hash the training text and the essays: 16 hexadecimal digits."""
        return self._training_hash.hexdigest()[:16]

    @cached_property
    def text(self) -> str:
        """Hash the training text, the essays and the held-out text: 16 hexadecimal digits."""
        key = self._training_hash.copy()
        self.heldout.feed(key)
        return key.hexdigest()[:16]

    @cached_property
    def _training_hash(self) -> "Digest":
        key = hashlib.sha256()
        self.train.feed(key)
        if self.essays is not None:
            key.update(repr(self.essays).encode("utf-8", "surrogatepass"))
        return key


def join_processes(recipe: Recipe, device: str | None = None) -> None:
    """Check the recipe's requirements and connect the ranks of torchrun; call before reading or training anything.

    Raises ``UserError`` if there is no such device, a library is missing, or batches cannot be divided among ranks.
    """
    # Check the device and the packages
    choose_device(device)
    for tracker in recipe.report_to:
        extras.check_installed(tracker, "report_to")
    if (package := OPTIMIZERS[recipe.optimizer].package) is not None:
        extras.check_installed(package, f"optimizer: {recipe.optimizer}")
    if recipe.lora is not None:
        extras.check_installed("peft", "lora")
    # Check that every batch can be divided among the ranks
    for phase in (recipe.dense, recipe.branch):
        if phase is not None:
            distributed.blocks_per_process(phase.batch_size, recipe.least_blocks(phase))
    distributed.connect(device)


def load_corpus(recipe: Recipe, base: Path, folder: Path, *, reporter: Reporter = SILENT) -> Corpus:
    """Load the recipe's text as token blocks, tokenized once and cached under ``folder``.

    A BPE tokenizer is trained and cached there too, if the recipe asks for one. The recipe's relative paths start from
    ``base``.
    """
    stretch = recipe.heldout_stretch

    def prepare() -> tuple[str, DataConfig, SeparatorReport, Path]:
        with locks.locked(folder, "reads and tokenises the text", reporter.announce):
            # Load the tokenizer, or train the recipe's own
            source = recipe.tokenizer.path if recipe.tokenizer is not None else recipe.model.path
            source = source or str(_own_tokenizer(recipe, base, folder, reporter))
            tokenizer = checkpoint.load_tokenizer(source)
            # Choose the separator, and tokenize the text unless it is cached
            separator = recipe_separator(recipe, tokenizer, base, folder, reporter)
            separator = dataclasses.replace(separator, documents=recipe.data.documents)
            data = recipe.data.model_copy(update={"separator": separator.best})
            split = splits.cache_split(
                data, tokenizer, folder / "blocks", base, reporter, stretch=stretch
            )
            return source, data, separator, split

    # Prepare on rank 0, then read on all ranks
    source, data, separator, blocks = distributed.on_main(prepare)
    parts = splits.read_split(blocks, data, stretch=stretch)
    return Corpus(checkpoint.load_tokenizer(source), *parts, separator, read_essays(recipe, base))


def recipe_separator(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    base: Path,
    folder: Path,
    reporter: Reporter = SILENT,
) -> SeparatorReport:
    """Return what stands after a document of a recipe's text: the recipe's, or what its dense model knows best.

    A model that the recipe trains learns EOS. Must be called on one rank; results are cached in ``folder``.
    """
    data = recipe.data
    source = recipe.model.path
    if data.separator != AUTO:
        return SeparatorReport(data.separator)
    if source is None:
        return SeparatorReport(NO_SEPARATOR if tokenizer.eos_token_id is None else EOS)

    def measure() -> SeparatorReport:
        model, _ = checkpoint.load_on(str(source), choose_device(None))
        return measure_separator(
            model, tokenizer, sources.documents(data.sources, base), data.block_size, data.bos
        )

    return shared_separator(
        folder / SEPARATORS, checkpoint.checkpoint_hash(str(source)), measure, reporter
    )


def read_essays(recipe: Recipe, base: Path) -> Essays | None:
    """Read the essays for RULER's needles; None for noise. Raises ``UserError``: a file cannot be read."""
    haystack = recipe.data.mix.ruler.haystack if recipe.data.mix is not None else []
    return (
        Essays.read([str(base / file) for file in haystack], "data.mix.ruler.haystack")
        if haystack
        else None
    )


def tokenizer_folder(recipe: Recipe, folder: Path) -> Path:
    """Return the subfolder of ``folder`` for a recipe's BPE tokenizer."""
    return folder / f"tokenizer-{recipe.content_hash('tokenizer', 'data')}"


def _own_tokenizer(recipe: Recipe, base: Path, folder: Path, reporter: Reporter) -> Path:
    """Return the folder of the recipe's BPE tokenizer, after training it if needed."""
    assert recipe.tokenizer is not None
    assert recipe.tokenizer.vocab_size is not None
    final = tokenizer_folder(recipe, folder)
    if not manifest.is_complete(final):
        with reporter.bar("training the tokenizer"):
            tokenizer = splits.train_tokenizer(
                recipe.data, recipe.tokenizer.vocab_size, base, recipe.tokenizer.bos
            )
        with replace.new_folder(final) as new:
            weight_files.save_tokenizer(tokenizer, new)
            manifest.write_manifest(new)
    manifest.check_manifest(final)
    return final


class BlockDataset(Dataset[Item]):
    """Dataset of text blocks, to be shuffled by the trainer."""

    def __init__(self, blocks: TokenBlocks) -> None:
        """Wrap ``blocks``."""
        self._blocks = blocks

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._blocks.num_blocks

    def __getitem__(self, index: int) -> Item:
        """Return block ``index``, with all tokens as labels but those that begin a text."""
        blocks = self._blocks
        tokens = torch.from_numpy(blocks.marked(index).astype(np.int64))
        targets = np.where(blocks.begins_text(index), loss.NO_TARGET, blocks.tokens[index])
        labels = torch.from_numpy(targets.astype(np.int64))
        return {**blocks.boundaries.inputs(tokens), "labels": labels}


class OrderedDataset(Dataset[Item]):
    """Dataset of all blocks of a run in training order, with synthetic samples mixed into the text."""

    def __init__(
        self,
        text: TokenBlocks,
        order: BlockOrder,
        mixture: Mixture,
        samples: RulerBlocks | None,
        length: int,
    ) -> None:
        """Combine blocks of ``text`` in ``order`` with ``samples`` where ``mixture`` places them, ``length`` in all."""
        self._text = BlockDataset(text)
        self._order = order
        self._mixture = mixture
        self._samples = samples
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
        tokens, is_learned = map(torch.from_numpy, self._samples.block(number))
        inputs = self._samples.boundaries.inputs(tokens)
        labels = inputs["input_ids"].where(is_learned, loss.NO_TARGET)
        return {**inputs, "labels": labels}


class ExtendedDataset(Dataset[Item]):
    """Dataset of a run that switches from short blocks to blocks ``ratio`` times as long.

    Indices count short blocks throughout, and ``ratio`` consecutive indices make one long block. The trainer therefore
    asks for the same number of indices per batch, and gets fewer and longer blocks with the same number of tokens.
    """

    def __init__(self, short: OrderedDataset, long: OrderedDataset, ratio: int) -> None:
        """Concatenate ``short`` and ``long`` blocks."""
        self._short = short
        self._long = long
        self._ratio = ratio

    def __len__(self) -> int:
        """Return the length of the run in short blocks."""
        return len(self._short) + self._ratio * len(self._long)

    def __getitem__(self, index: int) -> Item:
        """Return short block ``index``, or the corresponding part of a long block."""
        if index < len(self._short):
            return self._short[index]
        number, part = divmod(index - len(self._short), self._ratio)
        long = self._long[number]
        return {key: tokens.view(self._ratio, -1)[part] for key, tokens in long.items()}

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


def training_data(
    recipe: Recipe, corpus: Corpus, phase: DenseConfig | BranchConfig, seed: int
) -> Dataset[Item]:
    """Build the dataset of a phase of a recipe, in the order drawn by ``seed``.

    Raises ``UserError``: a task of the mixture does not fit in a block, or the text has less than a batch of longer
    blocks.
    """
    # Plain text, which the trainer shuffles
    text = corpus.train
    batch = phase.batch_size
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
    samples = ruler_blocks(recipe, corpus.tokenizer, corpus.essays, text, seed)
    short = OrderedDataset(text, order, mixture, samples, start)
    if extend is None:
        return short
    # Longer blocks from the extension on
    size = extend.block_size
    ratio = extend.block_size // text.block_size
    longer = text.cut(size)
    if longer.num_blocks < batch // ratio:
        raise errors.UserError(
            f"branch.extend: the training text gives {longer.num_blocks} blocks of {size} tokens, "
            f"fewer than one batch of {batch // ratio}\n"
            "give more text, or a smaller branch.extend.block_size"
        )
    num_text = start - mixture.synthetic(start)
    num_indices = batch * phase.steps - start
    long = OrderedDataset(
        text=longer,
        order=order.longer(ratio, num_text),
        mixture=mixture.longer(ratio, start),
        samples=ruler_blocks(recipe, corpus.tokenizer, corpus.essays, longer, seed),
        length=num_indices // ratio,
    )
    return ExtendedDataset(short, long, ratio)


def ruler_blocks(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    essays: Essays | None,
    text: TokenBlocks,
    seed: int,
) -> RulerBlocks | None:
    """Return the samples that a recipe mixes into its text, in blocks like those of ``text``; None without a mixture.

    Raises ``UserError``: a task does not fit in a block.
    """
    if recipe.data.mix is None:
        return None
    mix = recipe.data.mix.ruler
    # Choose the tasks, and cap their lengths at the room in a block
    size = text.block_size
    longest = text.block_size - len(text.opening)
    tasks = tuple(mix.tasks_of(available(NO_MATERIAL)))
    lengths = tuple(min(length, longest) for length in mix.lengths or [size])
    samples = RulerBlocks(
        tokenizer, size, tasks, lengths, mix.loss == "all", seed, Material(essays), text.boundaries
    )
    samples.check()
    return samples


def mixed_heldout(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    essays: Essays | None,
    text: TokenBlocks,
    num_blocks: int,
) -> TokenBlocks:
    """Return ``num_blocks`` blocks of held-out text and RULER samples, mixed as the recipe's training text is.

    Raises ``UserError``: a task does not fit in a block.
    """
    samples = ruler_blocks(recipe, tokenizer, essays, text, recipe.seed)
    assert samples is not None
    assert recipe.data.mix is not None
    # Draw the mixture's share of samples, but not too few, and fill the rest with text
    drawn = round(recipe.data.mix.ruler.share * num_blocks)
    num_samples = max(min(_MIN_SAMPLES, num_blocks), drawn)
    held_out = samples.held_out(num_samples)
    if num_samples == num_blocks:
        return held_out
    return text.spread(num_blocks - num_samples).and_(held_out)
