"""Run the whole workflow on the embedded reference: the command ``demo``, whose docstring is the help."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spkv_nas.artifacts.defaults import RECOMMENDED
from spkv_nas.base.progress import Reporter
from spkv_nas.stages import commands, flags
from spkv_nas.stages.options import DEFAULT_PROBE, InWorkspace, OnDevice

DEMO_ABLATION_TOKENS = 2048  # half of the default: 4 to 5 seconds
DEMO_STEPS = 25  # of head gates; 25 steps choose the same heads as 100 in all but one of the study's models
DEMO_LAYOUTS = (RECOMMENDED, "densest", "interleaved-last", "random-0")
DEMO_TOKENS = 65_536  # a fifth of the held-out text; a tenth misses a needed head among 18 (reports/LOG.md)


@dataclass(frozen=True, kw_only=True)
class DemoOptions(InWorkspace, OnDevice):
    """Options of the ``demo`` command."""

    workspace: flags.Root = Path("demo")


def check(options: DemoOptions) -> None:
    """Check the folder to write to."""
    options.folders.check_writable()


def demo(options: DemoOptions, reporter: Reporter) -> Iterator[commands.Result]:
    """Run the whole workflow on the embedded reference: probe, propose, train-hybrid, report.

    Takes a few minutes on two cores and writes to a separate workspace, the folder demo/.
    """
    from spkv_nas.stages.options.probe import ProbeOptions
    from spkv_nas.stages.options.propose import ProposeOptions
    from spkv_nas.stages.options.report import ReportOptions
    from spkv_nas.stages.options.train_hybrid import TrainHybridOptions
    from spkv_nas.stages.probe import run as probe
    from spkv_nas.stages.propose import run as propose
    from spkv_nas.stages.report import run as report
    from spkv_nas.stages.train_hybrid import run as train_hybrid

    start = time.perf_counter()
    workspace: dict[str, Any] = {"workspace": options.workspace}
    device_options: dict[str, Any] = {**workspace, "device": options.device}
    # Measure the heads twice: by the default signal, and by the recommended one
    yield probe(ProbeOptions(max_tokens=DEMO_TOKENS, ablation_tokens=DEMO_ABLATION_TOKENS, **device_options), reporter)
    yield probe(ProbeOptions(signal=RECOMMENDED, steps=DEMO_STEPS, **device_options), reporter)
    # Propose layouts by the default signal
    yield propose(ProposeOptions(probe=DEFAULT_PROBE, num_random=1, **workspace), reporter)
    # Retrain some of them, and write the report
    folder = options.folders.layout_dir(DEFAULT_PROBE)
    layouts = [folder / f"{name}.yaml" for name in DEMO_LAYOUTS]
    retraining = TrainHybridOptions(layouts=layouts, probe=DEFAULT_PROBE, reference=False, **device_options)
    yield train_hybrid(retraining, reporter)
    yield report(ReportOptions(probe=DEFAULT_PROBE, **workspace), reporter)
    reporter.announce(f"{time.perf_counter() - start:.0f} s in total")
