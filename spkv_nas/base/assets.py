"""Paths of the files that ship with the package."""

from pathlib import Path

ASSETS = Path(__file__).parent.parent / "assets"
EMBEDDED_PREFIX = "embedded:"  # prefix of a checkpoint's name, such as embedded:dense
EMBEDDED = ASSETS / "stdlib-21x3"  # embedded models and their recipes
# Both tables of the SP-KV paper's appendix "Scaling analysis details"
PAPER_TABLE = ASSETS / "ladder.csv"


def constraints_file() -> Path:
    """Return the list of tested versions: in a wheel that of ``hatch_build.py``, else that of the checkout."""
    shipped = ASSETS / "constraints.txt"
    return shipped if shipped.is_file() else ASSETS.parents[1] / shipped.name
