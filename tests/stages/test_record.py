"""Options recorded in ``probe.yaml`` are read back."""

from __future__ import annotations

from pathlib import Path

from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.record import OPTIONS, read_options, recorded


def test_recorded_options_are_read_back(tmp_path: Path) -> None:
    options = ProbeOptions(model="org/model", data=["text"], ablation_tokens=64, workspace=tmp_path)
    assert read_options({OPTIONS: recorded(options)}, tmp_path) == options
