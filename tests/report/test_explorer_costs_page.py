"""Test in a browser what the layout explorer shows of a serving engine, and of heads that are local by design."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from browser_cases import MAP, NEEDED, browser, open_file, open_page, workspace
from helpers import make_domain_table

from spkv_nas.cli import main

__all__ = ["browser", "open_file", "open_page", "workspace"]  # fixtures
pytestmark = NEEDED


def test_bytes_and_requests_of_a_serving_engine(open_page: Any, workspace: Path, tmp_path: Path) -> None:
    """Looked up by budget and by layout; the largest budget that fits is the engine's."""
    for part in ("probes", "layouts"):
        shutil.copytree(workspace / part, tmp_path / part)
    engine = ["--engine", "vllm", "--context", "32k", "--kv-bytes", "4GiB"]
    main(["report", "-w", str(tmp_path), "--probe", "stdlib-21x3", *engine])
    file = tmp_path / "reports/stdlib-21x3/index.html"
    page = open_page("#budget=25&context=1000", file)
    assert page.inner_text("#explorer-memory-row dt") == "KV cache in vLLM 0.32"
    shown = "200.39 MiB of 252.00 MiB a request; 20.44 requests in 4.00 GiB; 33 global heads take no more"
    assert page.inner_text("#explorer-memory") == shown
    assert page.input_value("#explorer-context") == "32768"
    assert page.is_disabled("#explorer-context")
    page.fill("#explorer-limit", "192")
    assert page.inner_text("#explorer-heads") == "23 of 63 KV heads"
    page.fill("#explorer-limit", "192.3")
    assert page.inner_text("#explorer-heads") == "32 of 63 KV heads"
    page.select_option("#explorer-selected", label="densest")
    assert page.inner_text("#explorer-memory").endswith("; as units of 1 head")


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
