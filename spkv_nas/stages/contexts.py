"""Choose the context length to compute costs at, and caution if the model was not made for it."""

from __future__ import annotations

from spkv_nas.base.units import parse_context

LONG = "128k"  # default tokens of a model that supports as many or does not say


def choose_context(text: str | None, positions: int | None) -> int:
    """Parse a context length such as "32k"; by default 128k tokens, or the model's maximum if that is less."""
    if text is not None or positions is None:
        return parse_context(text or LONG)
    return min(parse_context(LONG), positions)


def beyond_positions(context: int, positions: int | None) -> str | None:
    """Return a caution if a context is longer than the model was made for, else None."""
    if positions is None or context <= positions:
        return None
    return (
        f"the model supports {positions:,} tokens (max_position_embeddings); costs at {context:,} assume that its "
        f"positions are extended\nuse --context {positions} for the model's maximum"
    )
