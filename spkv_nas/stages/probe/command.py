"""Run the ``probe`` command; its docstring is the help."""

from __future__ import annotations

from functools import partial

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.probe.options import ProbeOptions
from spkv_nas.stages.result import Result


def probe(options: ProbeOptions, reporter: Reporter) -> Result:
    """Measure the density of every KV head, or another signal. Writes probes/NAME/, or probes/NAME-SIGNAL/.

    Without arguments, measures the embedded reference on held-out standard library text. With --model and --data,
    measures another checkpoint: by density if it has gates, else by head gates, the recommended signal (minutes).
    With --signal density, a checkpoint without gates first gets gates for the budget, trained with its weights frozen;
    densities also show which keys a cache can drop. With a recipe, trains the reference and then probes it.
    Measures how much attention is on the first tokens of a text, and gives layouts as many sink tokens as that needs.
    """
    from spkv_nas.artifacts.result_tables import ALARM
    from spkv_nas.stages.next_steps import after_probe
    from spkv_nas.stages.probe import output, stage

    table = stage.probe(options, reporter)
    return Result(
        table,
        output.show,
        partial(output.document, folder=options.folders.probe_dir(table.name)),
        next=() if ALARM in table.metadata else after_probe(options, table),
    )
