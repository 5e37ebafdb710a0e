"""Other signals than density that say which KV heads need global attention, measured on the same model.

Each is a table in the format of density's, higher for heads that need global attention, so that layouts can be proposed
from it and retrained: density is judged and not assumed. They need a model, not gates; gates, if it has any, are open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.signals import (
    ATTENTION_MASS,
    CLOSING,
    DUO,
    HEAD_GATES,
    OPENING,
    REGRESSION,
    RETRIEVAL,
    check_options,
)
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.windows import default_window
from spkv_nas.probing.attention_mass import attention_mass
from spkv_nas.probing.duo import duo
from spkv_nas.probing.gains import closing, opening
from spkv_nas.probing.head_gates import head_gates
from spkv_nas.probing.regression import regression
from spkv_nas.probing.retrieval import retrieval

_MEASURES: dict[str, Callable[..., DensityTable]] = {
    HEAD_GATES: head_gates,
    OPENING: opening,
    CLOSING: closing,
    REGRESSION: regression,
    DUO: duo,
    RETRIEVAL: retrieval,
    ATTENTION_MASS: attention_mass,
}


def measure_signal(
    signal: str,
    model: PreTrainedModel,
    blocks: TokenBlocks,
    *,
    window: int | None = None,
    name: str = "probe",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
    **own: Any,
) -> DensityTable:
    """A signal other than density.

    Args:
        window: of local heads, the query's own key included; by default ``default_window``.
        metadata: where the model and the text come from; the signal's own facts are added.
        progress: called with (blocks or steps done, in all).
        own: options that not all signals have; the signal's default in place of None.

    Raises:
        UserError: the signal is unknown, the window below 1, there is no text, or its blocks are too short.
    """
    check_options(signal, **own)
    window = default_window(model, blocks.block_size) if window is None else window
    if window < 1:
        raise UserError(f"the window is {window}; it counts the query's own key: at least 1")
    if blocks.num_blocks == 0:
        raise UserError(f"there is no text to measure {signal} on")
    given = {option: value for option, value in own.items() if value is not None}
    return _MEASURES[signal](model, blocks, window, name=name, metadata=metadata, progress=progress, **given)
