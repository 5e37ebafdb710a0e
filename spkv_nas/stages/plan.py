"""Estimate what a model costs: its cache in a serving engine, or every stage of the workflow on a model or a recipe."""

from spkv_nas.base import progress
from spkv_nas.engines.registry import read_serving
from spkv_nas.stages import served_cache
from spkv_nas.stages.commands import Result
from spkv_nas.stages.options.plan import PlanOptions


def run(options: PlanOptions, reporter: progress.Reporter) -> Result:
    """Plan the cache in the engine that options name, or else the workflow, which needs torch."""
    if options.engine is not None:
        served = served_cache.plan_served(
            options.subject,
            read_serving(options.engine, any_layout=False),
            context=options.context,
            requests=options.requests,
            memory=options.memory,
            layouts=options.layout or (),
            reporter=reporter,
        )
        return Result(served, served_cache.show, served_cache.document)
    reporter.announce(f"reading {options.subject}")
    from spkv_nas.model.transformers_logging import quiet_transformers
    from spkv_nas.stages import forecast, workflow_costs

    quiet_transformers(reporter)
    planned = workflow_costs.plan_workflow(options, reporter=reporter)
    return Result(planned, forecast.show, forecast.document)
