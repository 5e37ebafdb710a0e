"""Run the ``layout convert`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.layout.convert.options import ConvertOptions
from spkv_nas.stages.result import Result


def convert(options: ConvertOptions, reporter: Reporter) -> Result:
    """Convert a layout between the formats of spkv-nas, DuoAttention and PruLong.

    Prints what the target format cannot store. A file of scores becomes a layout by --budget, --sparsity or
    --threshold; a file of zeros and ones already is a layout.
    """
    from spkv_nas.base.console import say
    from spkv_nas.proposal.convert import convert as convert_file

    lines = convert_file(
        options.source,
        options.target,
        budget=options.budget,
        sparsity=options.sparsity,
        threshold=options.threshold,
        window=options.window,
        sinks=options.sinks,
    )
    return Result(lines, lambda lines: say("\n".join(lines)), lambda lines: {"file": options.target, "notes": lines})
