"""Declare the options of the ``report`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass

from spkv_nas.base.flag import default
from spkv_nas.stages import flags
from spkv_nas.stages.options import ChoosesProbe, TakesLong


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ChoosesProbe, TakesLong):
    """Write reports/NAME/index.html and its figures from the results in the workspace.

    With several probes that have layouts, also writes their index, reports/index.html.
    """

    probe: flags.OptionalProbe = default(None, "all that have layouts")


def check(options: ReportOptions) -> None:
    """Check the probe."""
    from spkv_nas.stages.lookup import find_table

    if options.probe is not None:
        find_table(options.folders, options.probe)
