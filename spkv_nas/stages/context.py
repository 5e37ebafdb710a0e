"""Choose the context that costs are computed for."""

from spkv_nas.base import progress, units

LONG = "128k"  # default tokens of a model that supports as many or does not say


def choose_context(
    text: str | None, positions: int | None, reporter: progress.Reporter = progress.SILENT
) -> int:
    """Parse a context such as "32k", by default 128k or the model's ``positions`` if fewer; caution beyond these."""
    if text is None and positions is not None:
        return min(units.parse_context(LONG), positions)
    context = units.parse_context(text or LONG)
    if positions is not None and context > positions:
        reporter.caution(
            f"the model supports {positions:,} tokens (max_position_embeddings); "
            f"costs at {context:,} assume that its positions are extended\n"
            f"use --context {positions} for the model's maximum"
        )
    return context
