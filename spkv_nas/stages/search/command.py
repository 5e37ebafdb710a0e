"""Run the ``search`` command, whose docstring is the help, and check its options."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.result import Result
from spkv_nas.stages.search.options import SearchOptions


def check(options: SearchOptions) -> None:
    """Check the options by making the search's specification, and the recipe's files."""
    from spkv_nas.stages.checks import check_files
    from spkv_nas.stages.search.specification import specify

    specification = specify(options)
    check_files(specification.recipe, specification.file.parent)


def search(options: SearchOptions, reporter: Reporter) -> Result:
    """Search for better layouts than the strategies'. Writes reports/NAME/search.csv and layouts/NAME/search/.

    Many layouts are scored without training, the best are retrained briefly, and those that keep up in full. Full
    retrainings are evaluated on held-out text that was not used for selection (--max-tokens, at most half of it, is).
    With a second objective, --budget may be a range or a list. The same command, started again here or on another
    machine with the same workspace, is another worker of the same study; after an interruption it resumes.
    """
    from spkv_nas.stages.next_steps import after_search
    from spkv_nas.stages.search import stage

    result = stage.search(options, reporter)
    return Result(result, stage.show, stage.document, next=after_search(options, result.recipe, result.file))
