"""Declare the options of the ``demo`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spkv_nas.artifacts.defaults import RECOMMENDED
from spkv_nas.base.flag import default
from spkv_nas.proposal.budget import PAPER_BUDGET
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace, OnDevice

DEMO_ABLATION_TOKENS = 2048  # half of the default: 4 to 5 seconds
DEMO_STEPS = 25  # of head gates; 25 steps choose the same heads as 100 in all but one of the study's models
DEMO_LAYOUTS = (RECOMMENDED, "densest", "interleaved-last", "random-0")
DEMO_TOKENS = 65_536  # a fifth of the held-out text; a tenth misses a needed head among 18 (reports/LOG.md)


@dataclass(frozen=True, kw_only=True)
class DemoOptions(InWorkspace, OnDevice):
    """Options of the ``demo`` command."""

    workspace: flags.Root = Path("demo")
    dtype: flags.Dtype = default(None, "bfloat16 if the machine supports it natively, else float32")
    budget: flags.OptionalBudget = default(None, PAPER_BUDGET)


def check(options: DemoOptions) -> None:
    """Check the precision and the folder to write to."""
    from spkv_nas.base.assets import EMBEDDED
    from spkv_nas.training.recipe import Recipe

    Recipe.read(EMBEDDED / "demo.yaml").with_precision(options.dtype)
    options.folders.check_writable()
