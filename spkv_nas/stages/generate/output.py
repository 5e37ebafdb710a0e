"""Print what ``generate`` measured."""

from __future__ import annotations

import math

from spkv_nas.base.console import err
from spkv_nas.model.generation import Generation


def generation(result: Generation) -> None:
    """Print a generation's speed and cache size to standard error."""
    share = result.cache_bytes / result.full_attention_bytes
    reason = " (so short a text does not fill its pages and windows)" if share > 1 else ""
    err.print(
        f"{result.num_new_tokens} tokens, {result.tokens_per_second:.1f} tokens/s, after a prompt of "
        f"{result.num_prompt_tokens} tokens in {result.prefill_seconds:.2f} s\n"
        f"cache {result.cache_bytes / 1e6:.2f} MB, full attention {result.full_attention_bytes / 1e6:.2f} MB: "
        f"{100 * share:.0f} %{reason}"
    )
    if result.density is not None:
        density = (
            "density unknown (no key left the window)"
            if math.isnan(result.density)
            else f"density {100 * result.density:.1f} %"
        )
        err.print(f"{density} at tau {result.tau:g}" if result.tau is not None else density)
