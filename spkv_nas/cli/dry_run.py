"""Plan a training command instead of running it (``--dry-run``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spkv_nas.stages import planned_runs
from spkv_nas.stages.result import Result

if TYPE_CHECKING:
    from spkv_nas.base.progress import Reporter
    from spkv_nas.stages.options import Trains


def dry_run(options: Trains, reporter: Reporter) -> Result:
    """Return the plan of a training command, or its forecast, without training."""
    from spkv_nas.stages import forecast
    from spkv_nas.stages.dry_run import plan_of
    from spkv_nas.training.run_plan import Plan

    planned = plan_of(options, reporter)
    return (
        Result(planned, planned_runs.show, planned_runs.document)
        if isinstance(planned, Plan)
        else Result(planned, forecast.show, forecast.document)
    )
