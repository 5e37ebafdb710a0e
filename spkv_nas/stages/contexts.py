"""Choose the number of tokens that costs are counted at, and say when a model was not made for so many."""

from __future__ import annotations

from spkv_nas.base.units import parse_context

LONG = "128k"  # tokens by default, of a model that was made for as many or does not say


def choose_context(text: str | None, positions: int | None) -> int:
    """Parse a context; without one take 128k tokens, or the ``positions`` that the model was made for if fewer.

    Raises:
        UserError: the text is no number of tokens.
    """
    if text is not None or positions is None:
        return parse_context(text or LONG)
    return min(parse_context(LONG), positions)


def beyond_positions(context: int, positions: int | None) -> str | None:
    """Say that a context is longer than the model was made for; None where it is not, or the model does not say."""
    if positions is None or context <= positions:
        return None
    return (
        f"the model was made for {positions:,} tokens (max_position_embeddings): what is counted at {context:,} is of "
        f"one whose positions are extended\n--context {positions} counts the model as it is"
    )
