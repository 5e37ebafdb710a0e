"""Where the files that ship with the package are."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent.parent / "assets"
EMBEDDED_PREFIX = "embedded:"  # of a checkpoint's name: embedded:dense
EMBEDDED = ASSETS / "stdlib-21x3"  # the embedded models, with the recipes that made them
TASKS = ASSETS / "tasks"  # of lm-eval, and their data
PAPER_TABLE = ASSETS / "ladder.csv"  # both tables of the SP-KV paper's appendix "Scaling analysis details"


def constraints_file() -> Path:
    """The versions that the package was tested with: of a wheel, into which hatch_build.py puts them, or else of the
    checkout.
    """
    shipped = ASSETS / "constraints.txt"
    return shipped if shipped.is_file() else ASSETS.parents[1] / shipped.name
