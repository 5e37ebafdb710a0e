"""Describe transformers, which every export is compared with, and its continuous batching."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spkv_nas.engines.engine import (
    EXACT,
    OTHER_LAYERS,
    PROGRAMS,
    REFUSED,
    SPKV_FORMS,
    UNTRIED,
    Cell,
    Engine,
    Outcome,
    Program,
    tried_with,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Transformers(Engine):
    """Plain transformers, which defines what a form computes."""

    name = "transformers"
    title = "transformers 5.23.0"
    outcomes = dict.fromkeys(
        ("ministral", "qwen2", "qwen3", "gemma3_text", f"gemma3_text{OTHER_LAYERS}", "olmo3", "smollm3", "cohere2",
         f"cohere2{OTHER_LAYERS}", "exaone4", "gpt_oss", f"gpt_oss{OTHER_LAYERS}", "granite_swa"), EXACT,
    ) | dict.fromkeys(SPKV_FORMS, Cell(Outcome.REFUSED, "exact after import spkv_nas"))  # fmt: skip
    program = Program(PROGRAMS / "run_transformers.py", "transformers", registers_type=True)

    def cell(self, form: str, config: PreTrainedConfig) -> Cell:
        """Return what it does with a form, whatever the settings: every export is compared with it."""
        return self.outcomes.get(form, UNTRIED)


class ContinuousBatching(Engine):
    """transformers with continuous batching."""

    name = "continuous-batching"
    title = "transformers 5.23.0 continuous batching"
    outcomes = dict.fromkeys(
        ("ministral", "qwen2", "qwen3", f"gemma3_text{OTHER_LAYERS}", "olmo3"), EXACT
    ) | dict.fromkeys(SPKV_FORMS, REFUSED)
    tried = dict.fromkeys(("ministral", "qwen2", "qwen3", "gemma3_text"), tried_with()) | {
        "olmo3": tried_with(rope_theta=(10_000.0,))
    }


TRANSFORMERS = Transformers()
CONTINUOUS_BATCHING = ContinuousBatching()
FORMS = tuple(Transformers.outcomes)  # all that export writes
