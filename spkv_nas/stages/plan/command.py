"""Run the ``plan`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.plan.options import PlanOptions
from spkv_nas.stages.result import Result


def plan(options: PlanOptions, reporter: Reporter) -> Result:
    """Estimate memory, tokens, FLOPs and time of every stage on given hardware, before anything is loaded.

    Reads only the config of a model, or a recipe: spkv-nas plan --model config.json --hardware h100 --devices 8.
    Memory is the peak of one device; for a stage that does not fit, the output names what to change. Times are
    computed from FLOPs at an assumed share of a GPU's peak; to time real steps on this machine, use --dry-run with a
    recipe. For the KV cache and attention of a layout, see spkv-nas plan attention. With --engine, also lists the
    numbers of global layers worth choosing in that serving engine, and the memory its allocator plans for them.
    """
    from spkv_nas.stages.plan import stage

    return Result(stage.plan(options, reporter), stage.show, stage.document)
