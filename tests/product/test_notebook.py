"""Test that the notebook is committed with its outputs, and runs from the first cell to the last."""

from __future__ import annotations

import copy
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from paths import ROOT

FILE = ROOT / "reports" / "first-steps.ipynb"


def outputs(notebook: Any) -> list[Any]:
    """Return the cells' outputs, without what libraries write to stderr, such as progress bars."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs if output.get("name") != "stderr"]


def printed(shown: list[Any]) -> str:
    return "".join(output.text for output in shown if output.output_type == "stream")


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    committed = nbformat.read(FILE, as_version=4)
    fresh = copy.deepcopy(committed)
    NotebookClient(fresh, timeout=300, resources={"metadata": {"path": str(FILE.parent)}}).execute()
    for notebook in (committed, fresh):
        shown = outputs(notebook)
        kinds = [set(output.data) for output in shown if "data" in output]
        assert sum("text/html" in kind for kind in kinds) == 5, (
            "tables, a layout, scores and trials"
        )
        assert sum("image/png" in kind for kind in kinds) == 3, "pictures"
        text = printed(shown)
        assert "/hybrid: loads with spkv_nas.load" in text
        assert "def area(width, height)" in text
    of_the_probe = [
        [line for line in printed(outputs(one)).splitlines() if "cover" in line]
        for one in (committed, fresh)
    ]
    assert of_the_probe[0] == of_the_probe[1], (
        "the committed outputs are of another probe: run the notebook again"
    )
    assert len(of_the_probe[0]) == 3


def test_committed_output_contains_no_paths_of_a_machine() -> None:
    committed = nbformat.read(FILE, as_version=4)
    cells = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)
    shown = str([output.get("text", output.get("data")) for output in outputs(committed)])
    for path in ("/tmp/", "/home/", "/root", "/work/", "site-packages", str(ROOT)):
        assert path not in shown
