"""Other signals than density that say which KV heads need global attention, measured on the same model.

Each is a table in the format of density's, higher for heads that need global attention, so that layouts can be proposed
from it and retrained: density is judged and not assumed. They need a model, not gates; gates, if it has any, are open.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.section import gate_config
from spkv_nas.probing.attention_mass import attention_mass
from spkv_nas.probing.duo import DEFAULT_STEPS, duo
from spkv_nas.probing.retrieval import retrieval

DENSITY, ATTENTION_MASS, DUO, RETRIEVAL = SIGNALS = ("density", "attention-mass", "duo", "retrieval")

_OPTIONS = {"tau": (DENSITY,), "window": (ATTENTION_MASS, DUO, RETRIEVAL), "steps": (DUO,)}


def check_options(signal: str, **options: object) -> None:
    """Raise ``UserError`` unless ``signal`` is one of ``SIGNALS`` and has every option that is not None."""
    if signal not in SIGNALS:
        raise UserError(f"unknown signal '{signal}'; expected one of {', '.join(SIGNALS)}")
    for name, value in options.items():
        if value is not None and signal not in _OPTIONS[name]:
            raise UserError(f"--{name} is not for --signal {signal}; it goes with {', '.join(_OPTIONS[name])}")


def measure_signal(
    signal: str,
    model: PreTrainedModel,
    blocks: TokenBlocks,
    *,
    window: int | None = None,
    steps: int | None = None,
    name: str = "probe",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> DensityTable:
    """A signal other than density, with its own defaults.

    Args:
        window: of local heads, the query's own key included; that of the model's gates by default, or 128.
        steps: of ``duo`` alone; its default if None.
        metadata: where the model and the text come from; the signal's own facts are added.
        progress: called with (blocks or steps done, in all).

    Raises:
        UserError: the signal is unknown, the window below 1, there is no text, or its blocks are too short.
    """
    check_options(signal)
    window = (gate_config(model) or GateConfig()).window if window is None else window
    if window < 1:
        raise UserError(f"the window is {window}; it counts the query's own key: at least 1")
    if blocks.num_blocks == 0:
        raise UserError(f"there is no text to measure {signal} on")
    options: dict[str, Any] = {"name": name, "metadata": metadata, "progress": progress}
    if signal == ATTENTION_MASS:
        return attention_mass(model, blocks, window, **options)
    if signal == RETRIEVAL:
        return retrieval(model, blocks, window, **options)
    assert signal == DUO
    return duo(model, blocks, window, steps=DEFAULT_STEPS if steps is None else steps, **options)
