"""Presets of the scaling ladder: shapes and hyperparameters of the SP-KV paper, and a micro ladder for CPUs.

``model: level-8`` in a recipe selects the Llama shape, batch size, learning rate and phases of that level; other keys
of the recipe override them. Numbers are from the paper's appendix "Scaling analysis details" (both tables,
``assets/ladder.csv``). What the tables omit is derived from them:

- FFN width: Llama 3's rule, int(1.3 * int(8 d / 3)) rounded up to a multiple of 1,024. For every level it reproduces
  the number of parameters (total tokens / 160) within 0.07 %.
- Batch size: the multiple of the paper's block of 8,192 tokens that rounds to the table's.
- Steps: 160 tokens per non-embedding parameter (TPP), warm-up over 1 and decay from 140, all rounded down. These match
  the table, except for the warm-up of Llama 3 8B (1,664; the table says 2k).
- Norm epsilon and rotary base of Llama 3 (1e-5, 500,000); untied embeddings; the tokenizer's vocabulary.

The micro ladder keeps these proportions at a head size of 8: a width of 16 (once 20) times the depth, 4 to 6 query
heads per KV head, an FFN of 4 to 4.8 widths by the same rule in multiples of 64, and blocks of 512 tokens. Learning
rate 0.3118 C^-0.125 and batch size 0.292 C^0.3271, rounded to a multiple of 8 blocks, follow from the training FLOPs C
by the power laws of DeepSeek LLM (arXiv 2401.02954, eq. 1), whose method the paper uses. The paper's own laws, 1.16
C^-0.148 and 131 C^0.199, do not extrapolate six decades down: for ``micro-0`` they give a rate of 0.018 and 32,768
tokens per step, which end at an NLL of 4.26 on standard library text; 0.009 and 4,096 tokens end at 3.86.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from spkv_nas.artifacts.shape import Shape
from spkv_nas.base import assets, errors
from spkv_nas.cost.formulas import training_flops

PAPER_BLOCK_SIZE = 8192
TPP = 160
WARMUP_TPP = 1
DECAY_START_TPP = 140
FINAL_LEARNING_RATE = 0.01  # share of the peak learning rate
MICRO_BLOCK_SIZE = 512
_MICRO = (  # width, layers, Hq, Hkv, tokens per step, learning rate
    (32, 2, 4, 1, 4096, 0.00916),
    (40, 2, 5, 1, 4096, 0.00808),
    (48, 3, 6, 1, 8192, 0.00694),
    (64, 4, 8, 2, 12288, 0.00566),
    (80, 5, 10, 2, 16384, 0.00484),
)


@dataclass(frozen=True)
class Level:
    """One level of the ladder: a Llama shape and its training hyperparameters."""

    name: str  # such as "level-8" or "micro-0"
    hidden_size: int  # channels of a token
    intermediate_size: int  # channels of the FFN
    num_layers: int  # layers L
    num_heads: int  # query heads Hq
    num_kv_heads: int  # KV heads Hkv
    block_size: int  # tokens per block
    batch_tokens: int  # tokens per step
    learning_rate: float  # peak learning rate

    @property
    def shape(self) -> Shape:
        """Return L, heads, and N: parameters of attention, FFN and norms, without embeddings."""
        width = self.hidden_size
        head_dim = self.hidden_size // self.num_heads
        attention = 2 * width * head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * width * self.intermediate_size + 2 * width
        num_parameters = self.num_layers * layer + width
        return Shape(self.num_layers, self.num_heads, self.num_kv_heads, head_dim, num_parameters)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the whole training, 160 per non-embedding parameter."""
        return TPP * self.shape.num_parameters

    @property
    def train_flops(self) -> float:
        """Return the FLOPs of the whole training."""
        return training_flops(self.shape, self.num_tokens, self.block_size)

    def config(self) -> dict[str, object]:
        """Return the Hugging Face config (``model.config`` of a recipe)."""
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

    def recipe(self, settings: Mapping[str, Any]) -> dict[str, object]:
        """Fill in a recipe's content with this level's values, without changing what is in ``settings``.

        The number of steps follows the batch and block sizes that are given, to keep the level's number of tokens.
        """
        # Derive the default batch size from the block size
        data = _section(settings, "data")
        dense = _section(settings, "dense")
        branch = _section(settings, "branch")
        block_size = _size(data.get("block_size")) or self.block_size
        batch_size = max(1, round(self.batch_tokens / block_size))

        def steps(phase: Mapping[str, Any], tpp: int) -> int:
            step_tokens = (_size(phase.get("batch_size")) or batch_size) * block_size
            return tpp * self.shape.num_parameters // step_tokens

        peak = {"batch_size": batch_size, "learning_rate": self.learning_rate}
        # Fill in missing keys, section by section
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
        # Leave a section that is not a mapping unchanged: the recipe's validation rejects it
        valid_sections = {
            key: section
            for key, section in filled.items()
            if isinstance(settings.get(key, {}), Mapping)
        }
        return {**settings, **valid_sections, "model": {"config": self.config()}}


@cache
def ladder() -> dict[str, Level]:
    """Return the presets ``level-0`` .. ``level-10``, ``level-13``, ``llama-3-8b``, and ``micro-0`` .. ``micro-4``."""
    with assets.PAPER_TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    paper = [
        Level(
            name=row["name"],
            hidden_size=int(row["hidden_size"]),
            intermediate_size=ffn_width(int(row["hidden_size"])),
            num_layers=int(row["num_layers"]),
            num_heads=int(row["num_heads"]),
            num_kv_heads=int(row["num_kv_heads"]),
            block_size=PAPER_BLOCK_SIZE,
            batch_tokens=int(row["batch_tokens"]),
            learning_rate=float(row["learning_rate"]),
        )
        for row in rows
    ]
    micro = [
        Level(
            name=f"micro-{number}",
            hidden_size=width,
            intermediate_size=ffn_width(width, 64),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            block_size=MICRO_BLOCK_SIZE,
            batch_tokens=tokens,
            learning_rate=rate,
        )
        for number, (width, layers, heads, kv_heads, tokens, rate) in enumerate(_MICRO)
    ]
    return {level.name: level for level in [*paper, *micro]}


def _section(settings: Mapping[str, Any], name: str) -> dict[str, object]:
    """Return a copy of a section of a recipe; empty if it is missing or not a mapping."""
    section = settings.get(name)
    return dict(section) if isinstance(section, Mapping) else {}


def find_level(name: str) -> Level:
    """Return a preset by name. Raises ``UserError``, which lists all, if there is none."""
    if name not in ladder():
        raise errors.UserError(f"no level '{name}'; expected one of {', '.join(ladder())}")
    return ladder()[name]


def peak_learning_rate(num_parameters: int) -> float:
    """Return the paper's peak learning rate for N parameters: 1.16 C^-0.148 with the training FLOPs C = 6 N x 160 N."""
    return 1.16 * math.pow(6.0 * TPP * num_parameters**2, -0.148)


def batch_tokens(num_parameters: int) -> float:
    """Return the tokens per step at which N parameters train best: 0.292 C^0.3271, with the training FLOPs C as above.

    From DeepSeek LLM (arXiv 2401.02954, eq. 1); the paper's own law does not reach down to small models.
    """
    return 0.292 * math.pow(6.0 * TPP * num_parameters**2, 0.3271)


def predictor_learning_rate(num_parameters: int) -> float:
    """Return the rate of new predictors: 5 times the peak, as in the paper, but at most the embedded model's 9e-3."""
    return min(5.0 * peak_learning_rate(num_parameters), 9e-3)


def ffn_width(hidden_size: int, multiple_of: int = 1024) -> int:
    """Return Llama 3's FFN width: 1.3 * 2/3 * 4 times ``hidden_size``, rounded up to a multiple of ``multiple_of``."""
    return math.ceil(int(1.3 * (8 * hidden_size // 3)) / multiple_of) * multiple_of


def _size(value: object) -> int | None:
    """Return a positive integer, or None for any other value."""
    return value if type(value) is int and value > 0 else None
