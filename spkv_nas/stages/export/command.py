"""Run the ``export`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.export.options import ExportOptions
from spkv_nas.stages.result import Result, Results


def export(options: ExportOptions, reporter: Reporter) -> Results:
    """Export a checkpoint with a layout as a Hugging Face folder, in a native architecture where one fits.

    A separate process checks that plain transformers computes the same. A layout that no native architecture can
    express gets a custom model type. Without a layout argument, exports a retrained hybrid with the layout that it was
    trained with (see reports/NAME/checkpoints.csv). --check also runs the folder in an inference engine.
    """
    from spkv_nas.stages.export import stage

    exported = Result(stage.export(options, reporter), stage.show)
    if options.check_in is None:
        return exported
    checked = stage.check_in_engine(options, reporter)
    return iter((exported, Result(checked, stage.show_check, exit_code=int(not checked.passed))))
