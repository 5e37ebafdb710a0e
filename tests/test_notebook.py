"""The notebook runs from its first cell to its last, as a reader would run it."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

FILE = Path(__file__).parent.parent / "reports" / "first-steps.ipynb"


def test_the_notebook_runs() -> None:
    notebook = nbformat.read(FILE, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code), "outputs are not committed"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FILE.parent)}}).execute()
    shown = [set(output.data) for cell in code for output in cell.outputs if "data" in output]
    assert sum("text/html" in kinds for kinds in shown) == 3, "tables and layouts"
    assert sum("image/png" in kinds for kinds in shown) == 2, "pictures"
    printed = "".join(output.text for cell in code for output in cell.outputs if output.output_type == "stream")
    assert "densest" in printed
    assert "/hybrid" in printed
