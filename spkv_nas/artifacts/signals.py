"""Name the signals that order KV heads, and the options that each takes. Imports nothing heavy: every help reads it."""

from __future__ import annotations

from spkv_nas.base.errors import UserError

DENSITY, HEAD_GATES, OPENING, CLOSING, REGRESSION, DUO, RETRIEVAL, ATTENTION_MASS = SIGNALS = (
    "density", "head-gates", "opening", "closing", "regression", "duo", "retrieval", "attention-mass",
)  # fmt: skip
RECOMMENDED = HEAD_GATES  # its heads lose least, once retrained (reports/study)
SCORING = (OPENING, CLOSING, REGRESSION)  # those that score layouts: they make logits, and take fewer tokens by default
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
    """Raise ``UserError`` unless ``signal`` is one of ``SIGNALS`` and takes every option that is not None."""
    if signal not in SIGNALS:
        raise UserError(f"unknown signal '{signal}'; expected one of {', '.join(SIGNALS)}")
    for name, value in options.items():
        if value is not None and signal not in _OPTIONS[name]:
            option = name.replace("_", "-")
            raise UserError(f"--{option} is not for --signal {signal}; it goes with {', '.join(_OPTIONS[name])}")
