"""Test callbacks that run when a module is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from spkv_nas.base.extras import when_imported


def test_acts_once_after_the_import_or_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spkv_test_library").mkdir()
    (tmp_path / "spkv_test_library" / "__init__.py").write_text("")
    (tmp_path / "spkv_test_library" / "part.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders, seen = list(sys.meta_path), []
    name = "spkv_test_library.part"
    when_imported(name, lambda: seen.append(sys.modules[name].value))
    importlib.import_module("spkv_test_library")
    assert importlib.util.find_spec(name) is not None  # only asks
    assert seen == []
    part = importlib.import_module(name)
    assert seen == [3]
    assert sys.meta_path == finders
    importlib.reload(part)
    assert seen == [3]
    when_imported(name, lambda: seen.append(4))
    assert seen == [3, 4]
