"""Configure Sphinx; the reference pages are generated from the code when the documentation is built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(Path(__file__).parent)]

from generate_reference import write_reference  # noqa: E402  (needs the path above)

from spkv_nas.base.version import __version__  # noqa: E402

project = "spkv-nas"
copyright = "the spkv-nas authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
smartquotes = False  # they would turn "--option" into a dash
html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["pages.css"]
html_title = f"spkv-nas {__version__}"
html_copy_source = False
html_show_sourcelink = False

write_reference(Path(__file__).parent / "reference")


def setup(app: Any) -> None:
    """Register what the settings above cannot say."""
    app.connect("autodoc-process-docstring", _keep_colon, priority=400)  # before napoleon
    app.connect("doctree-resolved", _label_cells)


def _label_cells(_app: Any, doctree: nodes.document, page: str) -> None:
    """Label the cells of the support matrix by their columns, which ``pages.css`` shows where a row is a block."""
    if page != "support-matrix":
        return
    for table in doctree.findall(nodes.table):
        (names,) = (
            [entry.astext() for entry in row] for head in table.findall(nodes.thead) for row in head
        )
        for row in (row for body in table.findall(nodes.tbody) for row in body):
            for name, entry in [*zip(names, row, strict=True)][1:]:
                entry[0].insert(0, nodes.inline("", f"{name}: ", classes=["cell-label"]))


def _keep_colon(
    _app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Break a property's first line after a colon; napoleon takes what stands before it for the property's type."""
    before, colon, after = lines[0].partition(": ") if lines else ("", "", "")
    if what in ("attribute", "data", "property") and colon:
        lines[:1] = [f"{before}:", after]
