"""Run the ``generate`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.generate.options import GenerateOptions


def generate(options: GenerateOptions, reporter: Reporter) -> None:
    """Continue a prompt with the per-head paged cache, and print tokens/s, cache size and density.

    The text goes to standard output, the statistics to standard error. A dense checkpoint uses the cache of
    transformers.
    """
    from spkv_nas.base.console import out
    from spkv_nas.stages.generate import stage

    result = stage.generate(options, reporter, stream=out.write)
    out.write("\n")
    stage.show(result)
