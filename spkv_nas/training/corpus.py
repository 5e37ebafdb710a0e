"""Loading of a recipe's text as token blocks, and connection of the torchrun ranks that train on it."""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from spkv_nas.base import distributed, extras, locks, manifest, replace
from spkv_nas.base.device import choose_device
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.cost.formulas import OPTIMIZERS
from spkv_nas.data import sources, splits
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.config import AUTO, EOS, NO_SEPARATOR, DataConfig
from spkv_nas.data.ruler.material import Essays
from spkv_nas.evaluation.separators import SEPARATORS, SeparatorReport, measure_separator, shared_separator
from spkv_nas.model import checkpoint, weight_files
from spkv_nas.training.recipe import OFFLOAD, Recipe

if TYPE_CHECKING:
    from hashlib import _Hash as Digest


@dataclass(frozen=True)
class Corpus:
    """Text of a recipe as token blocks."""

    tokenizer: PreTrainedTokenizerBase  # tokenizer of the blocks
    train: TokenBlocks  # training text
    heldout: TokenBlocks  # held-out text
    separator: SeparatorReport = field(default_factory=lambda: SeparatorReport(EOS))  # what stands after a document
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
    distributed.connect(device, offloads=recipe.sharding == OFFLOAD)


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
            split = splits.cache_split(data, tokenizer, folder / "blocks", base, reporter, stretch=stretch)
            return source, data, separator, split

    # Prepare on rank 0, then read on all ranks
    source, data, separator, blocks = distributed.on_main(prepare)
    parts = splits.read_split(blocks, data, stretch=stretch)
    return Corpus(checkpoint.load_tokenizer(source), *parts, separator, read_essays(recipe, base))


def recipe_separator(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, base: Path, folder: Path, reporter: Reporter = SILENT
) -> SeparatorReport:
    """Return what stands after a document of a recipe's text: the recipe's, or what its dense model knows best.

    A model that the recipe trains learns EOS. Must be called on one rank; results are cached in ``folder``.
    """
    data, source = recipe.data, recipe.model.path
    if data.separator != AUTO:
        return SeparatorReport(data.separator)
    if source is None:
        return SeparatorReport(NO_SEPARATOR if tokenizer.eos_token_id is None else EOS)

    def measure() -> SeparatorReport:
        model, _ = checkpoint.load_on(str(source), choose_device(None))
        return measure_separator(model, tokenizer, sources.documents(data.sources, base), data.block_size, data.bos)

    return shared_separator(folder / SEPARATORS, checkpoint.checkpoint_hash(str(source)), measure, reporter)


def read_essays(recipe: Recipe, base: Path) -> Essays | None:
    """Read the essays for RULER's needles; None for noise. Raises ``UserError``: a file cannot be read."""
    haystack = recipe.data.mix.ruler.haystack if recipe.data.mix is not None else []
    return Essays.read([str(base / file) for file in haystack], "data.mix.ruler.haystack") if haystack else None


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
            tokenizer = splits.train_tokenizer(recipe.data, recipe.tokenizer.vocab_size, base, recipe.tokenizer.bos)
        with replace.new_folder(final) as new:
            weight_files.save_tokenizer(tokenizer, new)
            manifest.write_manifest(new)
    manifest.check_manifest(final)
    return final
