"""A recipe's text as token blocks, and the processes of torchrun that train on it together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from spkv_nas.base.device import choose_device
from spkv_nas.base.distributed import blocks_per_process, connect, on_main
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.splits import cache_split, read_split, train_tokenizer
from spkv_nas.model.checkpoint import is_complete, load_tokenizer, write_manifest
from spkv_nas.training.recipe import Recipe


@dataclass(frozen=True)
class Corpus:
    """A recipe's text as token blocks, and the tokenizer that made them."""

    tokenizer: PreTrainedTokenizerBase
    train: TokenBlocks
    heldout: TokenBlocks


def join_processes(recipe: Recipe, device: str | None = None) -> None:
    """Join the processes of torchrun, before anything is read or trained.

    Raises:
        UserError: there is no such device, or the processes cannot share the recipe's batches evenly.
    """
    choose_device(device)
    for phase in (recipe.dense, recipe.branch):
        if phase is not None:
            blocks_per_process(phase.batch_size)
    connect(device)


def load_corpus(recipe: Recipe, base: Path, folder: Path) -> Corpus:
    """The recipe's text as blocks, tokenised once under ``folder``; a BPE is trained there if the recipe asks for it.

    Args:
        base: folder that the recipe's relative paths start from.
    """
    source = recipe.tokenizer.path if recipe.tokenizer is not None else recipe.model.path
    if source is not None:
        tokenizer = load_tokenizer(source)
    else:
        saved = folder / f"tokenizer-{recipe.content_hash('tokenizer', 'data')}"
        on_main(lambda: _new_tokenizer(recipe, base, saved))
        tokenizer = load_tokenizer(saved)
    blocks = on_main(lambda: cache_split(recipe.data, tokenizer, folder / "blocks", base))
    return Corpus(tokenizer, *read_split(blocks, recipe.data))


def _new_tokenizer(recipe: Recipe, base: Path, folder: Path) -> None:
    assert recipe.tokenizer is not None
    assert recipe.tokenizer.vocab_size is not None
    if not is_complete(folder):
        train_tokenizer(recipe.data, recipe.tokenizer.vocab_size, base).save_pretrained(folder)
        write_manifest(folder)
