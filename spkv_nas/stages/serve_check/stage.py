"""Check that an inference engine computes what an exported model does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spkv_nas.base.console import say
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.stages.checks import check
from spkv_nas.stages.serve_check.options import ServeCheckOptions

if TYPE_CHECKING:
    from spkv_nas.serving.engine_check import EngineCheck


def serve_check(options: ServeCheckOptions, reporter: Reporter = SILENT) -> EngineCheck:
    """Run an exported folder in an engine, and compare it with the model."""
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.model.transformers_logging import quiet_transformers
    from spkv_nas.serving.engine_check import compare_with_engine

    check(options)
    quiet_transformers(reporter)
    reporter.announce(f"running {options.folder} in {options.engine}")
    layout = None if options.layout is None else Layout.read(options.layout)
    python = None if options.python is None else str(options.python)
    return compare_with_engine(
        options.folder, options.engine, layout=layout, num_prompt=options.prompt_tokens, python=python
    )


def show(check: EngineCheck) -> None:
    """Print the verdict, both comparisons, what the engine runs instead, and its cache."""
    say(str(check))
