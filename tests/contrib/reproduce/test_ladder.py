"""Test the FLOPs of the paper's model ladder."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from spkv_nas.cli import main


def test_the_ladder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "ladder", "--density", "0.2", "--workspace", str(tmp_path)])
    output = capsys.readouterr().out
    assert all(f" {number} " in output for number in ("10.57", "2.114", "12.68", "4.22"))
    folder = tmp_path / "reports" / "paper"
    assert {p.name for p in folder.iterdir()} == {"flops.csv", "flops.png", "flops.svg"}
    rows = pd.read_csv(folder / "flops.csv").set_index("name")
    assert len(rows) == 13
    assert (rows["attention_dense"] / rows["attention_sparse"]).tolist() == pytest.approx([5.0] * 13, rel=1e-4)
    assert rows.loc["llama-3-8b", "total_dense"] == pytest.approx(2 * 6.98e9 + 2 * 32 * 4096 * 131072, rel=1e-3)
