"""Names and options of the signals that rank KV heads. Imports nothing heavy, because every ``--help`` loads it."""

from __future__ import annotations

from spkv_nas.base.errors import UserError

DENSITY, HEAD_GATES, OPENING, CLOSING, REGRESSION, DUO, RETRIEVAL, ATTENTION_MASS = SIGNALS = (
    "density",
    "head-gates",
    "opening",
    "closing",
    "regression",
    "duo",
    "retrieval",
    "attention-mass",
)
RECOMMENDED = HEAD_GATES  # its heads have the lowest NLL after retraining (reports/study)
# Signals that score layouts: they compute logits, so they use fewer tokens by default.
SCORING = (OPENING, CLOSING, REGRESSION)
_OPTIONS = {
    "tau": (DENSITY,),
    "window": SIGNALS,
    "gain_tokens": (DENSITY,),
    "steps": (DENSITY, HEAD_GATES, DUO),
    "granularity": (OPENING, CLOSING),
    "max_heads": (OPENING, CLOSING),
    "budget": (DENSITY, HEAD_GATES, REGRESSION),
    "num_layouts": (REGRESSION,),
    "seed": (DENSITY, HEAD_GATES, DUO, RETRIEVAL, REGRESSION),
    "cache": (REGRESSION,),
    "batch_size": SCORING,
}


def check_options(signal: str, **options: object) -> None:
    """Check that a signal exists and takes every option that is not None.

    Args:
        signal: one of ``SIGNALS``.
        **options: values by option name.

    Raises:
        UserError: the signal is unknown, or an option is not for it.
    """
    if signal not in SIGNALS:
        raise UserError(f"unknown signal '{signal}'; expected one of {', '.join(SIGNALS)}")
    for name, value in options.items():
        if value is not None and signal not in _OPTIONS[name]:
            option = name.replace("_", "-")
            raise UserError(
                f"--{option} does not apply to --signal {signal}; it applies to {', '.join(_OPTIONS[name])}"
            )
