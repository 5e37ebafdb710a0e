"""Generate: continue a prompt with a checkpoint, using the KV cache that suits its layout or gates."""

from __future__ import annotations

import math
import sys

from spkv_nas.base.console import err
from spkv_nas.base.device import choose_device
from spkv_nas.base.files import read_text
from spkv_nas.base.progress import SILENT, Announce, Reporter, silent
from spkv_nas.model import generation
from spkv_nas.model.checkpoint import load_on
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.checks import check
from spkv_nas.stages.generate.options import GenerateOptions


def generate(
    options: GenerateOptions, reporter: Reporter = SILENT, *, stream: Announce = silent
) -> generation.Generation:
    """Continue a prompt with a checkpoint; ``stream`` receives the text piece by piece."""
    check(options)
    prompt = _prompt(options)
    quiet_transformers(reporter)
    reporter.announce(f"loading {options.model}")
    network, tokenizer = load_on(options.model, choose_device(options.device), options.dtype)
    return generation.generate(
        network,
        tokenizer,
        prompt,
        max_new_tokens=options.max_new_tokens,
        tau=options.tau,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        stream=stream,
    )


def _prompt(options: GenerateOptions) -> str:
    """Return the prompt: the argument's, a file's, or that of standard input."""
    prompt, file = options.prompt, options.file
    if file is not None:
        return sys.stdin.read() if str(file) == "-" else read_text(file, "prompt")
    assert prompt is not None  # ``check`` requires one
    return prompt


def show(result: generation.Generation) -> None:
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
