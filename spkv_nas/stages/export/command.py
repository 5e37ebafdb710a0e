"""Run the ``export`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.export.options import ExportOptions
from spkv_nas.stages.result import Result


def export(options: ExportOptions, reporter: Reporter) -> Result:
    """Export a checkpoint with a layout as a Hugging Face folder, in a native architecture where one fits.

    A separate process checks that plain transformers computes the same. A layout that no native architecture can
    express gets a custom model type. Without a layout argument, exports a retrained hybrid with the layout that it was
    trained with (see reports/NAME/checkpoints.csv).
    """
    from spkv_nas.stages.export import output, stage

    return Result(stage.export(options, reporter), output.show)
