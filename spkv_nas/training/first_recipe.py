"""Starter recipe for a model and a text: sizes that fit both and the machine, and working learning rates.

- Steps and batch size are those at which the embedded model's gates separate its heads; a GPU uses 8 times the tokens.
- The window is a sixteenth of a block, at most the paper's 128: a longer one hides nothing, so all layouts are equal.
- Branches learn half from the dense checkpoint's predictions and half from the text (``docs/guides/training.md``).
- The model's learning rate is a twentieth of the paper's peak for its size (``cost.ladder``), at most 3e-4, and falls
  with the square root of the tokens per step below a 20th of the batch that trains a model of this size best: in steps
  of 2,048 tokens, the full rate harms a model of 30 M parameters (``reports/llama-30m``).
- Predictors get the paper's 5 times that peak, at most 9e-3.
- The target density is the paper's share of global heads; it sets the price of keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from spkv_nas.artifacts import defaults, gate_config
from spkv_nas.artifacts.shape import ModelSize
from spkv_nas.base import errors, files
from spkv_nas.cost.ladder import batch_tokens, peak_learning_rate, predictor_learning_rate
from spkv_nas.data.config import AUTO, JOINED, DataConfig, SourceConfig
from spkv_nas.data.sources import documents, encode_documents
from spkv_nas.proposal.budget import DEFAULT_SHARE
from spkv_nas.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOFT_FRACTION = 0.8
WARMUP_SHARE = 0.1  # recommended warm-up, as a share of a branch's steps
MIN_STEPS = 20
STEP_TOKENS = {"cpu": 2048, "cuda": 16384}
_BLOCK_SIZE = {"cpu": 512, "cuda": 2048}
_SMALLEST_BLOCK = 32
_MIN_BLOCKS = 64
_HELDOUT_BLOCKS = 8
_HELDOUT_TOKENS = 20_000
_MAX_HELDOUT = 60_000
_MODEL_SHARE = 0.05
_MAX_MODEL_RATE = 3e-4
_FULL_RATE_BATCH = 0.05
MAX_CHARACTERS = 20_000_000  # maximum number of characters to count
_BATCH = 64  # documents per tokenizer call

_TEMPLATE = """\
# For a model of {layers} layers x {kv_heads} KV heads, {parameters} parameters, and a text of {tokens} tokens.
# Every key and its meaning: spkv-nas schema recipe, or "Recipe keys" in the documentation.
name: {name}
model: {model}
data:
  sources: {sources}
  block_size: {block_size}
  heldout: {heldout}                # share of the documents that is never trained on
  max_heldout_tokens: {most_heldout}
{separator}branch:                        # every variant is trained like this, from the model as it is
  steps: {steps}
  batch_size: {batch_size}                # blocks: {step_tokens:,} tokens a step
  learning_rate: {learning_rate:g}
  warmup_steps: {warmup}
  distill: {{weight: 0.5}}         # half of the loss: the model's predictions; without it, a third of the learning rate
{memory}gates:
  window: {window}                  # recent keys that every head sees
  # sinks: 1                   # first tokens that every head keeps; probe prints how many the model needs
  learning_rate_multiplier: {multiplier:g}
  soft_fraction: {soft}
  target_density: {density:.3f}        # keys get the price that keeps as much as 2 of 7 heads that are global
"""


def finished_model_rate(num_parameters: int, step_tokens: int) -> float:
    """Return the learning rate at which a finished model of N parameters without embeddings is retrained."""
    small_steps = min(
        1.0, math.sqrt(step_tokens / (_FULL_RATE_BATCH * batch_tokens(num_parameters)))
    )
    return _digits(
        min(_MODEL_SHARE * peak_learning_rate(num_parameters), _MAX_MODEL_RATE) * small_steps, 2
    )


@dataclass(frozen=True)
class Draft:
    """Inputs of a starter recipe, from which its settings are derived by the rules above."""

    name: str  # name of the recipe
    model: str  # model path or id for the recipe
    sources: tuple[str, ...]  # text sources for the recipe
    size: ModelSize  # size of the model
    text: TextSize  # size of the text
    device: str  # "cpu" or "cuda"
    block_size: int  # tokens per block
    steps: int = defaults.FIRST_STEPS  # training steps of a branch
    # Blocks per forward and backward pass; None for whole batches
    micro_batch_size: int | None = None
    recomputes: bool = False  # True to recompute activations in the backward pass
    separator: str = AUTO  # what stands after a document (data.separator)
    documents: str = JOINED  # whether they see each other (data.documents)

    @classmethod
    def of(
        cls,
        name: str,
        model: str,
        sources: tuple[str, ...],
        size: ModelSize,
        text: TextSize,
        device: str,
    ) -> Draft:
        """Create the draft with the largest block that model, text and device allow.

        Raises ``UserError``: there is too little text.
        """
        if text.tokens < _MIN_BLOCKS * _SMALLEST_BLOCK:
            raise _too_little(size, text)
        # Bound the block size by device, model and text
        kind = "cuda" if device.startswith("cuda") else "cpu"
        max_block = min(_BLOCK_SIZE[kind], size.positions or _BLOCK_SIZE[kind])
        draft = cls(name, model, sources, size, text, kind, max_block)
        max_block = min(
            max_block,
            text.tokens // _MIN_BLOCKS,
            int(draft.heldout * text.tokens) // _HELDOUT_BLOCKS,
        )
        if max_block < _SMALLEST_BLOCK:
            raise _too_little(size, text)
        return replace(draft, block_size=2 ** int(math.log2(max_block)))

    @property
    def heldout(self) -> float:
        """Return the share of documents to hold out, rounded up to a whole percentage."""
        return min(0.2, max(0.05, math.ceil(100 * _HELDOUT_TOKENS / self.text.tokens) / 100))

    @property
    def batch_size(self) -> int:
        """Return the blocks per step: a power of two, at most an eighth of the training text."""
        max_blocks = int((1 - self.heldout) * self.text.tokens) // self.block_size // 8
        target_blocks = STEP_TOKENS[self.device] // self.block_size
        return int(2 ** int(math.log2(max(1, min(target_blocks, max_blocks)))))

    def remark(self) -> str:
        """Return a sentence that states the assumptions of training costs: steps and tokens per step."""
        tokens = self.batch_size * self.block_size
        other = next(kind for kind in STEP_TOKENS if kind != self.device)
        return (
            f"training: as in the recipe that init writes with --device {self.device}, "
            f"{self.steps} steps of {tokens:,} tokens (with --device {other} at most "
            f"{STEP_TOKENS[other]:,})"
        )

    @property
    def smaller(self) -> Draft | None:
        """Return a draft that needs less memory, by activation checkpointing or half the block size, or None."""
        if not self.recomputes:
            return replace(self, recomputes=True)
        return (
            replace(self, block_size=self.block_size // 2, recomputes=False)
            if self.block_size >= 256
            else None
        )

    def text_of_recipe(self) -> str:
        """Return the commented YAML text of the recipe."""
        # Learning rates
        rate = finished_model_rate(self.size.without_embeddings, self.batch_size * self.block_size)
        multiplier = _digits(predictor_learning_rate(self.size.without_embeddings) / rate, 2)
        # Optional keys
        memory = ""
        separator = ""
        if self.separator != AUTO:
            separator = (
                f"  separator: {files.yaml_line(self.separator)}            # what stands after a "
                "document\n"
            )
        if self.documents != JOINED:
            separator += (
                f"  documents: {self.documents}         # tokens see only their own document\n"
            )
        if self.micro_batch_size is not None:
            memory += f"micro_batch_size: {self.micro_batch_size}   # blocks at once\n"
        if self.recomputes:
            memory += "gradient_checkpointing: true   # a third more time, for lack of memory\n"
        return _TEMPLATE.format(
            name=files.yaml_line(self.name),
            model=files.yaml_line({"path": self.model}),
            sources=files.yaml_line(list(self.sources)),
            tokens=f"{'' if self.text.is_whole else 'at least '}{self.text.tokens:,}",
            layers=self.size.heads.num_layers,
            kv_heads=self.size.heads.num_kv_heads,
            parameters=f"{self.size.num_parameters:,}",
            block_size=self.block_size,
            heldout=self.heldout,
            most_heldout=_MAX_HELDOUT,
            steps=self.steps,
            batch_size=self.batch_size,
            step_tokens=self.batch_size * self.block_size,
            learning_rate=rate,
            memory=memory,
            separator=separator,
            warmup=round(WARMUP_SHARE * self.steps),
            window=gate_config.suitable_window(self.block_size),
            soft=SOFT_FRACTION,
            multiplier=multiplier,
            density=float(DEFAULT_SHARE),
        )

    def recipe(self, base: Path) -> Recipe:
        """Parse the recipe; relative paths start from ``base``."""
        return Recipe.parse(files.parse_yaml(self.text_of_recipe(), "recipe"), base, "recipe")


def _too_little(size: ModelSize, text: TextSize) -> errors.UserError:
    return errors.UserError(
        f"{text.tokens:,} tokens of text, {size.positions or 'any number of'} positions of the "
        f"model: too few for {_MIN_BLOCKS} blocks of {_SMALLEST_BLOCK} tokens\n"
        "give more text"
    )


def _digits(number: float, digits: int) -> float:
    """Round ``number`` down to the given number of significant digits."""
    unit = 10.0 ** (math.floor(math.log10(number)) - digits + 1)
    return float(f"{math.floor(number / unit * (1 + 1e-9)) * unit:.{digits}g}")


@dataclass(frozen=True)
class TextSize:
    """Number of documents and tokens of a text."""

    documents: int  # number of documents
    tokens: int  # number of tokens, including separators
    is_whole: bool = True  # False if only the first MAX_CHARACTERS characters were counted

    def heldout(self, config: DataConfig) -> int:
        """Return the approximate number of held-out tokens; documents are held out by their hash."""
        return min(round(config.heldout * self.tokens), config.max_heldout_tokens)

    def training(self, config: DataConfig) -> int:
        """Return the approximate number of training tokens."""
        return round((1 - config.heldout) * self.tokens)


def count_text(
    sources: Iterable[str | SourceConfig], base: Path, tokenizer: PreTrainedTokenizerBase
) -> TextSize:
    """Count the documents and tokens of a text, up to ``MAX_CHARACTERS`` characters; paths start from ``base``.

    Raises ``UserError``: a source does not exist.
    """
    remaining = documents(sources, base)
    number = tokens = characters = 0
    # Tokenize batch by batch, until the text ends or enough is read
    while characters < MAX_CHARACTERS:
        batch = list(islice(remaining, _BATCH))
        if not batch:
            return TextSize(number, tokens)
        number += len(batch)
        tokens += sum(len(ids) + 1 for ids in encode_documents(batch, tokenizer))
        characters += sum(len(document.text) for document in batch)
    return TextSize(number, tokens, is_whole=False)
