"""The scaling ladder as named presets: shapes and hyperparameters of the SP-KV paper, and a micro ladder for CPUs.

``model: level-8`` in a recipe takes the Llama shape, batch size, learning rate and phases of that level; every key of
the recipe that says otherwise wins. Numbers are those of the paper's appendix "Scaling analysis details" (both tables,
``assets/ladder.csv``). What they leave open follows from them:

- FFN width: Llama 3's rule, int(1.3 * int(8 d / 3)) rounded up to a multiple of 1,024. It gives every level's total
  tokens / 160, so its number of parameters, within 0.07 %.
- Batch size: the multiple of the paper's block of 8,192 tokens that rounds to the table's.
- Steps: 160 tokens per non-embedding parameter (TPP), warm-up over 1, decay from 140, all rounded down. These are the
  table's, but for the warm-up of Llama 3 8B (1,664; the table says 2k).
- Norm epsilon and rotary base of Llama 3 (1e-5, 500,000); embeddings untied; the vocabulary is the tokenizer's.

The micro ladder keeps the proportions at a head size of 8: a width of 16 (once 20) times the depth, 4 to 6 query heads
per KV head, an FFN of 4 to 4.8 widths by the same rule in multiples of 64. Blocks have 512 tokens. Learning rate and
batch size are the power laws of DeepSeek LLM (arXiv 2401.02954, eq. 1), whose method the paper follows. The paper's own
levels lie on others, 1.16 C^-0.148 within 0.5 % and 131 C^0.199 within 10 %, but those do not reach six decades down:
for ``micro-0`` they mean 0.018 and 32,768 tokens a step, which on standard library text end at an NLL of 4.26, where
0.009 and 4,096, nearly DeepSeek's, end at 3.86 (at 4,096, rates of 0.0045 and 0.018: 3.89 and 3.98).
"""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.assets import PAPER_TABLE
from spkv_nas.base.errors import UserError
from spkv_nas.base.tables import write_csv
from spkv_nas.cost.formulas import attention_flops, flops_per_token, training_flops

PAPER_BLOCK_SIZE = 8192
TPP, WARMUP_TPP, DECAY_START_TPP = 160, 1, 140
FINAL_LEARNING_RATE = 0.01  # share of the peak
MICRO_BLOCK_SIZE = 512
_MICRO = ((32, 2, 4, 1), (40, 2, 5, 1), (48, 3, 6, 1), (64, 4, 8, 2), (80, 5, 10, 2))  # width, layers, Hq, Hkv


@dataclass(frozen=True)
class Level:
    """One rung: a Llama shape and how it is trained. ``batch_tokens`` are tokens per step."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    batch_tokens: int
    learning_rate: float

    @property
    def shape(self) -> Shape:
        """L, heads, and N: attention, FFN and norms, without embeddings."""
        width, head_dim = self.hidden_size, self.hidden_size // self.num_heads
        attention = 2 * width * head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * width * self.intermediate_size + 2 * width
        num_parameters = self.num_layers * layer + width
        return Shape(self.num_layers, self.num_heads, self.num_kv_heads, head_dim, num_parameters)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole training, 160 per non-embedding parameter."""
        return TPP * self.shape.num_parameters

    @property
    def train_flops(self) -> float:
        """FLOPs of the whole training."""
        return training_flops(self.shape, self.num_tokens, self.block_size)

    def config(self) -> dict[str, Any]:
        """The Hugging Face config (``model.config`` of a recipe)."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.shape.head_dim,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
        }

    def recipe(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A recipe's content with this level's values wherever ``given`` has none.

        The number of steps follows the batch and block sizes that are given, so that the tokens stay the level's.
        """
        data, dense, branch = (_mapping(given.get(key)) for key in ("data", "dense", "branch"))
        block_size = _size(data.get("block_size")) or self.block_size
        batch_size = max(1, round(self.batch_tokens / block_size))

        def steps(phase: Mapping[str, Any], tpp: int) -> int:
            return tpp * self.shape.num_parameters // ((_size(phase.get("batch_size")) or batch_size) * block_size)

        peak = {"batch_size": batch_size, "learning_rate": self.learning_rate}
        filled: dict[str, dict[str, Any]] = {
            "data": {"block_size": block_size, **data},
            "dense": {
                **peak,
                "steps": max(1, steps(dense, DECAY_START_TPP)),
                "warmup_steps": steps(dense, WARMUP_TPP),
                **dense,
            },
            "branch": {
                **peak,
                "steps": max(1, steps(branch, TPP - DECAY_START_TPP)),
                "final_learning_rate": FINAL_LEARNING_RATE,
                **branch,
            },
        }
        # a section that is no mapping is left for the recipe's own check to refuse
        fitting = {key: section for key, section in filled.items() if isinstance(given.get(key, {}), Mapping)}
        return {**given, **fitting, "model": {"config": self.config()}}


def flops_table(context: int, density: float) -> pd.DataFrame:
    """Forward FLOPs per token of the paper's levels at ``context`` tokens, dense and at a density, by model size.

    Columns name, num_parameters, attention_dense, attention_sparse, total_dense, total_sparse. Raises ``UserError`` as
    ``visible_keys`` does.
    """
    shapes = {level.name: level.shape for level in ladder().values() if not level.name.startswith("micro")}
    rows = pd.DataFrame(
        {
            "name": name,
            "num_parameters": shape.num_parameters,
            "attention_dense": attention_flops(shape, context),
            "attention_sparse": attention_flops(shape, context, density=density),
            "total_dense": flops_per_token(shape, context),
            "total_sparse": flops_per_token(shape, context, density=density),
        }
        for name, shape in shapes.items()
    )
    return rows.sort_values("num_parameters")


def write_flops_table(folder: Path, rows: pd.DataFrame) -> None:
    """Write ``flops.csv`` from ``flops_table``."""
    write_csv(folder / "flops.csv", rows)


@cache
def ladder() -> dict[str, Level]:
    """Every preset by name: ``level-0`` .. ``level-10``, ``level-13``, ``llama-3-8b``, ``micro-0`` .. ``micro-4``."""
    with PAPER_TABLE.open(newline="") as file:
        paper = [_level(row) for row in csv.DictReader(file)]
    micro = [_micro(number) for number in range(len(_MICRO))]
    return {level.name: level for level in [*paper, *micro]}


def find_level(name: str) -> Level:
    """A preset by name. Raises ``UserError`` that lists them, or offers the nearest."""
    if name not in ladder():
        near = difflib.get_close_matches(name, ladder(), n=1, cutoff=0.8)
        raise UserError(
            f"no level '{name}'; " + (f"did you mean {near[0]}?" if near else f"there are: {', '.join(ladder())}")
        )
    return ladder()[name]


def peak_learning_rate(num_parameters: int) -> float:
    """The rate at which the paper begins to train a model of N parameters: 1.16 C^-0.148 of its FLOPs, 6 N x 160 N."""
    return 1.16 * math.pow(6.0 * TPP * num_parameters**2, -0.148)


def predictor_learning_rate(num_parameters: int) -> float:
    """The rate of new predictors on a model of N parameters: the paper's 5 times that peak, at most 9e-3, which the
    embedded model took.
    """
    return min(5.0 * peak_learning_rate(num_parameters), 9e-3)


def ffn_width(hidden_size: int, multiple_of: int = 1024) -> int:
    """Llama 3's FFN width: 1.3 times two thirds of four times the width, up to a multiple of ``multiple_of``."""
    return math.ceil(int(1.3 * (8 * hidden_size // 3)) / multiple_of) * multiple_of


def _level(row: dict[str, str]) -> Level:
    sizes = {key: int(row[key]) for key in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "batch_tokens")}
    return Level(
        name=row["name"],
        intermediate_size=ffn_width(sizes["hidden_size"]),
        block_size=PAPER_BLOCK_SIZE,
        learning_rate=float(row["learning_rate"]),
        **sizes,
    )


def _micro(number: int) -> Level:
    width, num_layers, num_heads, num_kv_heads = _MICRO[number]
    level = Level(
        name=f"micro-{number}",
        hidden_size=width,
        intermediate_size=ffn_width(width, multiple_of=64),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=MICRO_BLOCK_SIZE,
        batch_tokens=0,
        learning_rate=0.0,
    )
    compute, step = level.train_flops, 8 * MICRO_BLOCK_SIZE  # the paper's batches are multiples of 8 blocks too
    return replace(
        level,
        batch_tokens=step * max(1, round(0.2920 * compute**0.3271 / step)),
        learning_rate=float(f"{0.3118 * compute**-0.1250:.3g}"),
    )


def _mapping(section: Any) -> dict[str, Any]:
    return dict(section) if isinstance(section, Mapping) else {}


def _size(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
