"""Public entry point for probing: measure one of the signals that rank KV heads by their need for global attention.

Every signal returns the same ``HeadScores`` table, with higher values for heads that need global attention, so that
layouts can be proposed from any of them and compared by retraining. Density needs a model with SP-KV gates. The other
signals work on any supported decoder and keep gates, if the model has them, fully open.
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
    """Score every KV head of ``model`` by its need for global attention; the model is restored afterwards.

    Args:
        model: any supported decoder; "density" needs gates, every other signal keeps gates open.
        blocks: held-out text, either as token blocks or as strings, which are tokenized into blocks.
        tau: gate threshold in [0, 1], for "density" only; None uses the model's threshold.
        signal: one of ``SIGNALS``; "head-gates" selects the best heads (reports/study).
        window: number of recent keys a local head sees, including the query's own key. Not accepted by "density";
            defaults to ``default_window``.
        tokenizer: the model's tokenizer; required if ``blocks`` are strings.
        name: name of the table; defaults to the signal's name, or to "probe" for density.
        metadata: provenance of the model and the text, stored with the table.
        progress: called with (blocks or steps done, total).
        options: options of the signal, such as ``batch_size`` for "density" or ``budget`` and ``steps`` for
            "head-gates".

    Raises:
        UserError: the signal is unknown or lacks an option, or it cannot be measured on this model and text.
    """
    if signal == DENSITY:
        if window is not None:
            raise UserError("a density has the window of the model's gates: leave window out")
        return density.probe(
            model,
            blocks,
            tau,
            tokenizer=tokenizer,
            name=name or "probe",
            metadata=metadata,
            progress=progress,
            **options,
        )
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
    **options: Any,
) -> HeadScores:
    """Measure a signal other than density on token blocks.

    Args:
        signal: one of ``SIGNALS`` except "density".
        model: any supported decoder; gates are kept open.
        blocks: held-out text.
        window: number of recent keys a local head sees, including the query's own key; defaults to
            ``default_window``.
        name: name of the table.
        metadata: provenance of the model and the text; the signal adds its own entries.
        progress: called with (blocks or steps done, total).
        options: options specific to the signal; None selects the signal's default.

    Raises:
        UserError: the signal is unknown, the window is below 1, there is no text, or its blocks are too short.
    """
    check_options(signal, **options)
    window = default_window(model, blocks.block_size) if window is None else window
    if window < 1:
        raise UserError(f"the window is {window}; it must be at least 1, because it includes the query's own key")
    if blocks.num_blocks == 0:
        raise UserError(f"there is no text to measure {signal} on")
    set_options = {option: value for option, value in options.items() if value is not None}
    return _MEASURES[signal](model, blocks, window, name=name, metadata=metadata, progress=progress, **set_options)
