"""Run the ``demo`` command; its docstring is the help."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from spkv_nas.artifacts.defaults import RECOMMENDED
from spkv_nas.base.progress import Reporter
from spkv_nas.stages.demo.options import DEMO_ABLATION_TOKENS, DEMO_LAYOUTS, DEMO_STEPS, DEMO_TOKENS, DemoOptions
from spkv_nas.stages.options import DEFAULT_PROBE
from spkv_nas.stages.result import Result


def demo(options: DemoOptions, reporter: Reporter) -> Iterator[Result]:
    """Run the whole workflow on the embedded reference: probe, propose, train-hybrid, report.

    Takes a few minutes on two cores and writes to a separate workspace, the folder demo/.
    """
    from spkv_nas.stages.probe.command import probe
    from spkv_nas.stages.probe.options import ProbeOptions
    from spkv_nas.stages.propose.command import propose
    from spkv_nas.stages.propose.options import ProposeOptions
    from spkv_nas.stages.report.command import report
    from spkv_nas.stages.report.options import ReportOptions
    from spkv_nas.stages.train_hybrid.command import train_hybrid
    from spkv_nas.stages.train_hybrid.options import TrainHybridOptions

    start = time.perf_counter()
    workspace: dict[str, Any] = {"workspace": options.workspace}
    device_options: dict[str, Any] = {**workspace, "device": options.device, "dtype": options.dtype}
    yield probe(ProbeOptions(max_tokens=DEMO_TOKENS, ablation_tokens=DEMO_ABLATION_TOKENS, **device_options), reporter)
    yield probe(ProbeOptions(signal=RECOMMENDED, budget=options.budget, steps=DEMO_STEPS, **device_options), reporter)
    yield propose(ProposeOptions(probe=DEFAULT_PROBE, budget=options.budget, num_random=1, **workspace), reporter)
    folder = options.folders.layout_dir(DEFAULT_PROBE)
    layouts = [folder / f"{name}.yaml" for name in DEMO_LAYOUTS]
    yield train_hybrid(
        TrainHybridOptions(layouts=layouts, probe=DEFAULT_PROBE, reference=False, **device_options), reporter
    )
    yield report(ReportOptions(probe=DEFAULT_PROBE, **workspace), reporter)
    reporter.announce(f"{time.perf_counter() - start:.0f} s in total")
