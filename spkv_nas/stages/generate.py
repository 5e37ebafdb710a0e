"""Declare the options of the ``generate`` command, check them, and run it; its docstring is the help."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from spkv_nas.base import console, device, errors, files, flag, progress
from spkv_nas.evaluation.thresholds import check_tau
from spkv_nas.model.source import check_checkpoint
from spkv_nas.stages import flags
from spkv_nas.stages.options import REFERENCE, InDtype

if TYPE_CHECKING:
    from spkv_nas.model.generation import Generation

Prompt = Annotated[str | None, flag.Flag("Text to continue.", argument=True)]
PromptFile = Annotated[
    Path | None, flag.Flag("Read the prompt from a file; - reads standard input.", ("--file", "-f"))
]
MaxNewTokens = Annotated[
    int, flag.Flag("Maximum number of new tokens.", ("--max-new-tokens", "-n"), low=1, high=2**24)
]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(InDtype):
    """Options of the ``generate`` command."""

    prompt: Prompt = None
    file: PromptFile = None
    model: flags.Model = REFERENCE
    tau: flags.Tau = flag.default(None, "the checkpoint's")
    max_new_tokens: MaxNewTokens = 200
    temperature: flags.Temperature = 0.0
    seed: flags.Seed = 0


def check(options: GenerateOptions) -> None:
    """Check that exactly one prompt is given, and the checkpoint."""
    from spkv_nas.stages.checks import check_exist

    if options.prompt is not None and options.file is not None:
        raise errors.UserError("give a prompt or --file, not both")
    if options.prompt is None and options.file is None:
        raise errors.UserError("no prompt: give one as an argument, or a file with --file")
    if options.file is not None and str(options.file) != "-":
        check_exist([options.file], "prompt")
    check_tau(options.tau)
    check_checkpoint(options.model)


def generate(options: GenerateOptions, reporter: progress.Reporter) -> None:
    """Continue a prompt with the per-head paged cache, and print tokens/s, cache size and density.

    The text goes to standard output, the statistics to standard error. A dense checkpoint uses the cache of
    transformers.
    """
    from spkv_nas.model import checkpoint, generation

    # Read the prompt; ``check`` requires one
    prompt = options.prompt or ""
    if options.file is not None and str(options.file) == "-":
        prompt = sys.stdin.read()
    elif options.file is not None:
        prompt = files.read_text(options.file, "prompt")
    # Generate
    reporter.announce(f"loading {options.model}")
    model, tokenizer = checkpoint.load_on(
        options.model, device.choose_device(options.device), options.dtype
    )
    result = generation.generate(
        model,
        tokenizer,
        prompt,
        max_new_tokens=options.max_new_tokens,
        tau=options.tau,
        temperature=options.temperature,
        seed=options.seed,
        stream=console.out.write,
    )
    console.out.write("\n")
    show(result)


def show(result: "Generation") -> None:
    """Print a generation's speed and cache size to standard error."""
    # Print the speed and the size of the cache
    share = result.cache_bytes / result.full_attention_bytes
    reason = " (so short a text does not fill its pages and windows)" if share > 1 else ""
    console.err.print(
        f"{result.num_new_tokens} tokens, "
        f"{result.tokens_per_second:.1f} tokens/s, after a prompt of "
        f"{result.num_prompt_tokens} tokens in {result.prefill_seconds:.2f} s\n"
        f"cache {result.cache_bytes / 1e6:.2f} MB, "
        f"full attention {result.full_attention_bytes / 1e6:.2f} MB: "
        f"{100 * share:.0f} %{reason}"
    )
    # Print the density of a model with gates
    if result.density is not None:
        density = f"{100 * result.density:.1f} %"
        if math.isnan(result.density):
            density = "unknown (no key left the window)"
        threshold = "" if result.tau is None else f" at tau {result.tau:g}"
        console.err.print(f"density {density}{threshold}")
