"""A first recipe for a model and a text: sizes that fit both and the machine, and rates at which gates can close.

The rules, and where they come from:

- Steps and batches are those at which the embedded model's gates told its heads apart: 160 steps of 2,048 tokens, soft
  for 80 % of them (a GPU takes eight times the tokens per step).
- The window is a sixteenth of a block, as the embedded model has it, at most the paper's 128: with windows of 128 in
  blocks of 512 that model misses nothing, so its layouts cannot be told apart (``reports/LOG.md``).
- The model's rate is a twentieth of the paper's peak for its size (``cost.ladder``), at most 3e-4, after a tenth of the
  steps of warm-up. A finished model is harmed by more: on the embedded one, 40 steps change full attention by -.69 % of
  NLL at 3e-4 with warm-up, -.62 % at 1e-4, -.48 % at 5e-4, and +1.15 % at 1e-3 without warm-up (``reports/LOG.md``).
- The predictors are new. They learn at the paper's 5 times that peak, at most at 9e-3, which the embedded model took.
- A target density, the paper's share of global heads, gives every key a price. Priced gates start at their threshold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from spkv_nas.artifacts.defaults import FIRST_STEPS
from spkv_nas.artifacts.gate_config import suitable_window
from spkv_nas.artifacts.shape import ModelSize
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import parse_yaml, yaml_line
from spkv_nas.cost.ladder import peak_learning_rate, predictor_learning_rate
from spkv_nas.proposal.budget import DEFAULT_SHARE
from spkv_nas.training.harm import WARMUP_SHARE
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.text_size import TextSize

SOFT_FRACTION = 0.8
FEWEST_STEPS = 20
_STEP_TOKENS, _BLOCK_SIZE = {"cpu": 2048, "cuda": 16384}, {"cpu": 512, "cuda": 2048}
_SMALLEST_BLOCK, _FEWEST_BLOCKS, _HELDOUT_BLOCKS = 32, 64, 8
_HELDOUT_TOKENS, _MOST_HELDOUT = 20_000, 60_000
_MODEL_SHARE, _MOST_MODEL_RATE = 0.05, 3e-4

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
branch:                        # every variant is trained like this, from the model as it is
  steps: {steps}
  batch_size: {batch_size}                # blocks: {step_tokens:,} tokens a step
  learning_rate: {learning_rate:g}
  warmup_steps: {warmup}
{memory}gates:
  window: {window}                  # recent keys that every head sees
  learning_rate_multiplier: {multiplier:g}
  soft_fraction: {soft}
  target_density: {density:.3f}        # keys get the price that keeps as much as 2 of 7 heads that are global
"""


@dataclass(frozen=True)
class Draft:
    """What a first recipe depends on; see the rules above.

    Attributes:
        model: as the recipe names it.
        sources: of the text, as the recipe names them.
        block_size: tokens.
        micro_batch_size: blocks of a pass; None: whole batches.
        recomputes: whether the backward pass computes activations again.
    """

    name: str
    model: str
    sources: tuple[str, ...]
    size: ModelSize
    text: TextSize
    device: str
    block_size: int
    steps: int = FIRST_STEPS
    micro_batch_size: int | None = None
    recomputes: bool = False

    @classmethod
    def of(cls, name: str, model: str, sources: tuple[str, ...], size: ModelSize, text: TextSize, device: str) -> Draft:
        """The draft with the largest block that model, text and device allow.

        Raises:
            UserError: there is too little text for any.
        """
        if text.tokens < _FEWEST_BLOCKS * _SMALLEST_BLOCK:
            raise _too_little(size, text)
        kind = "cuda" if device.startswith("cuda") else "cpu"
        most = min(_BLOCK_SIZE[kind], size.positions or _BLOCK_SIZE[kind])
        draft = cls(name, model, sources, size, text, kind, most)
        most = min(most, text.tokens // _FEWEST_BLOCKS, int(draft.heldout * text.tokens) // _HELDOUT_BLOCKS)
        if most < _SMALLEST_BLOCK:
            raise _too_little(size, text)
        return replace(draft, block_size=2 ** int(math.log2(most)))

    @property
    def heldout(self) -> float:
        """Share of the documents, in hundredths."""
        return min(0.2, max(0.05, math.ceil(100 * _HELDOUT_TOKENS / self.text.tokens) / 100))

    @property
    def batch_size(self) -> int:
        """Blocks of a step: a power of two that the text has several times over."""
        fitting = int((1 - self.heldout) * self.text.tokens) // self.block_size // 8
        wanted = _STEP_TOKENS[self.device] // self.block_size
        return int(2 ** int(math.log2(max(1, min(wanted, fitting)))))

    def remark(self) -> str:
        """Say what training costs rest on: the steps of the recipe, which depend on the kind of device."""
        tokens, other = self.batch_size * self.block_size, next(kind for kind in _STEP_TOKENS if kind != self.device)
        return (
            f"training: as in the recipe that init writes with --device {self.device}, {self.steps} steps of "
            f"{tokens:,} tokens (with --device {other} at most {_STEP_TOKENS[other]:,})"
        )

    @property
    def smaller(self) -> Draft | None:
        """What takes less memory: layers that are computed again, then half the block, if still worth training on."""
        if not self.recomputes:
            return replace(self, recomputes=True)
        return replace(self, block_size=self.block_size // 2, recomputes=False) if self.block_size >= 256 else None

    def text_of_recipe(self) -> str:
        """The YAML file, which says why its numbers are as they are."""
        peak = peak_learning_rate(self.size.without_embeddings)
        rate = _digits(min(_MODEL_SHARE * peak, _MOST_MODEL_RATE), 2)
        multiplier = _digits(predictor_learning_rate(self.size.without_embeddings) / rate, 2)
        memory = ""
        if self.micro_batch_size is not None:
            memory += f"micro_batch_size: {self.micro_batch_size}   # blocks at once\n"
        if self.recomputes:
            memory += "gradient_checkpointing: true   # a third more time, for lack of memory\n"
        return _TEMPLATE.format(
            name=yaml_line(self.name), model=yaml_line({"path": self.model}), sources=yaml_line(list(self.sources)),
            tokens=f"{'' if self.text.is_whole else 'at least '}{self.text.tokens:,}",
            layers=self.size.heads.num_layers, kv_heads=self.size.heads.num_kv_heads,
            parameters=f"{self.size.num_parameters:,}", block_size=self.block_size, heldout=self.heldout,
            most_heldout=_MOST_HELDOUT, steps=self.steps, batch_size=self.batch_size,
            step_tokens=self.batch_size * self.block_size, learning_rate=rate, memory=memory,
            warmup=round(WARMUP_SHARE * self.steps),
            window=suitable_window(self.block_size), soft=SOFT_FRACTION,
            multiplier=multiplier, density=float(DEFAULT_SHARE),
        )  # fmt: skip

    def recipe(self, base: Path) -> Recipe:
        """The recipe itself; relative paths start from ``base``."""
        return Recipe.parse(parse_yaml(self.text_of_recipe(), "recipe"), base, "recipe")


def _too_little(size: ModelSize, text: TextSize) -> UserError:
    return UserError(
        f"{text.tokens:,} tokens of text, {size.positions or 'any number of'} positions of the model: too few "
        f"for {_FEWEST_BLOCKS} blocks of {_SMALLEST_BLOCK} tokens\ngive more text"
    )


def _digits(number: float, digits: int) -> float:
    """``number``, rounded down to so many significant digits."""
    unit = 10.0 ** (math.floor(math.log10(number)) - digits + 1)
    return float(f"{math.floor(number / unit * (1 + 1e-9)) * unit:.{digits}g}")
