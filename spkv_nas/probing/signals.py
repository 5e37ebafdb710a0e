"""Other signals than density that say which KV heads need global attention, measured on the same model.

Each is a table in the format of density's, higher for heads that need global attention, so that layouts can be proposed
from it and retrained: density is judged and not assumed. They need a model, not gates; gates, if it has any, are open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.signals import (
    ATTENTION_MASS,
    CLOSING,
    DENSITY,
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
from spkv_nas.probing import density
from spkv_nas.probing.attention_mass import attention_mass
from spkv_nas.probing.duo import duo
from spkv_nas.probing.gains import closing, opening
from spkv_nas.probing.head_gates import head_gates
from spkv_nas.probing.regression import regression
from spkv_nas.probing.retrieval import retrieval

_MEASURES: dict[str, Callable[..., HeadScores]] = {
    HEAD_GATES: head_gates,
    OPENING: opening,
    CLOSING: closing,
    REGRESSION: regression,
    DUO: duo,
    RETRIEVAL: retrieval,
    ATTENTION_MASS: attention_mass,
}


def probe(
    model: PreTrainedModel,
    blocks: TokenBlocks | Iterable[str],
    tau: float | None = None,
    *,
    signal: str = DENSITY,
    window: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str | None = None,
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> HeadScores:
    """Measure a signal that says which KV heads of ``model`` need global attention; the model is left as it was.

    Args:
        model: any supported decoder; "density" needs gates, every other signal keeps those of a model open.
        blocks: held-out text: blocks, or strings, which are made into blocks.
        tau: threshold of "density" in [0, 1]; None takes the model's own.
        signal: one of ``SIGNALS``; "head-gates" chooses heads best (reports/study).
        window: of local heads, the query's own key included, of other signals than "density"; by default
            ``default_window``.
        tokenizer: the model's, needed with strings.
        name: of the table; the signal's by default, "probe" for a density.
        metadata: where the model and the text come from.
        progress: called with (blocks or steps done, in all).
        options: the signal's own, such as ``batch_size`` of "density", ``budget`` and ``steps`` of "head-gates".

    Raises:
        UserError: the signal is unknown or lacks an option, or it cannot be measured on this model and text.
    """
    if signal == DENSITY:
        if window is not None:
            raise UserError("a density has the window of the model's gates: leave window out")
        return density.probe(
            model, blocks, tau,
            tokenizer=tokenizer, name=name or "probe", metadata=metadata, progress=progress, **options,
        )  # fmt: skip
    check_options(signal, tau=tau)
    blocks = blocks if isinstance(blocks, TokenBlocks) else density.text_blocks(model, blocks, tokenizer)
    return measure_signal(
        signal, model, blocks, window=window, name=name or signal, metadata=metadata, progress=progress, **options
    )


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
) -> HeadScores:
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
