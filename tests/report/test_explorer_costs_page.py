"""Test in a browser what the layout explorer shows of heads that are local by design."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from browser_cases import MAP, NEEDED
from helpers import make_domain_table

from spkv_nas.cli import main

pytestmark = NEEDED


def test_heads_that_are_local_by_design_are_not_chosen(open_file: Any, tmp_path: Path) -> None:
    """The slider ends at the heads that can be global, and costs count the others' own window."""
    metadata = {"head_dim": 16, "dtype": "bfloat16", "native_windows": [None, 16, 16, None]}
    density = np.array([[0.9, 0.3], [0.0, 0.0], [0.0, 0.0], [0.2, 0.5]])
    table = make_domain_table(density=density, metadata=metadata)
    table.write(tmp_path / "probes" / table.name)
    chosen = ["-w", str(tmp_path), "--probe", table.name]
    main(["propose", *chosen, "--budget", "2"])
    main(["report", *chosen])
    page = open_file(tmp_path / "reports" / table.name / "index.html", "#budget=63&context=1024")
    assert page.get_attribute("#explorer-budget", "max") == "4"
    assert page.inner_text("#explorer-heads") == "4 of 4 KV heads that can be global"
    full = 64 * (4 * 1024 + 4 * 16) / 1024
    assert page.inner_text("#explorer-memory") == f"{full:.2f} KiB of {full:.2f} KiB"
    labels = page.eval_on_selector_all(f"{MAP} [data-mark]", "cells => cells.map(cell => cell.ariaLabel)")
    assert sum("local by design" in label for label in labels) == 4
