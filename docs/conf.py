"""Configure Sphinx; the reference pages are generated from the code when the documentation is built."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(Path(__file__).parent)]

from generate_reference import write_reference  # noqa: E402  (needs the path above)

from spkv_nas.base.version import __version__  # noqa: E402

project = "spkv-nas"
copyright = "the spkv-nas authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
smartquotes = False  # they would turn "--option" into a dash
html_theme = "furo"
html_title = f"spkv-nas {__version__}"
html_copy_source = False
html_show_sourcelink = False

write_reference(Path(__file__).parent / "reference")
