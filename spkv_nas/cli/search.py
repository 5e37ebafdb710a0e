"""Command ``search``."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.cli import json_documents
from spkv_nas.cli import show_search as show
from spkv_nas.stages.options import SearchOptions
from spkv_nas.stages.result import Result


def search(options: SearchOptions, reporter: Reporter) -> Result:
    """Search for better layouts than density's. Writes reports/NAME/search.csv and layouts/NAME/search/.

    Many are scored without training, the best retrained briefly, the best of those in full, and judged on text that
    the search has not seen (--max-tokens, at most half of the held-out text, are those it sees). A layout that is
    clearly behind after a part of the text is not scored on the rest (--no-racing). With a second objective --budget
    may be a range or a list. Start the same command again, here or on another machine with the same workspace, and both
    work on one study; killed or interrupted, it goes on where it was.
    """
    from spkv_nas.stages import search as stage

    return Result(stage.search(options, reporter), show.search, json_documents.search)
