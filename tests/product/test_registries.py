"""Test that every entry of an extension point is documented, and that those of ``contrib`` are registered."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import tomllib
from paths import ROOT

from spkv_nas.base.registry import Registry
from spkv_nas.cli.app import EVALUATIONS
from spkv_nas.contrib.search.sampler import SAMPLERS
from spkv_nas.engines.registry import ENGINES, planned_engines
from spkv_nas.evaluation.verdict.criteria import CRITERIA
from spkv_nas.model.export.registry import TARGETS
from spkv_nas.probing.signals import SIGNALS
from spkv_nas.proposal.strategies import STRATEGIES
from spkv_nas.stages.commands import ADDED_COMMANDS, COMMAND_GROUPS

DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
PAGES: list[tuple[Registry[Any], str]] = [
    (SIGNALS, "guides/scores"),
    (STRATEGIES, "guides/layouts"),
    (TARGETS, "tutorials/serve"),
    (SAMPLERS, "guides/search"),
    (EVALUATIONS, "guides/evaluation"),
    (ENGINES, "support-matrix"),
    (CRITERIA, "guides/verdict"),
]


def test_every_entry_is_on_its_page() -> None:
    """In code, as the value that a user gives."""
    for registry, page in PAGES:
        text = (ROOT / "docs" / f"{page}.md").read_text()
        code = " ".join(re.findall(r"`[^`\n]+`|```.*?```", text, re.DOTALL))
        missing = [entry.name for entry in registry if not re.search(rf"(?<![\w-]){entry.name}(?![\w-])", code)]
        assert not missing, page
        assert registry.built_in, page


def test_entry_points_are_installed() -> None:
    """If not: ``make .venv/.installed``."""
    installed = {(point.group, point.name): point.value for point in distribution("spkv-nas").entry_points}
    declared = {(group, name): value for group, names in DECLARED.items() for name, value in names.items()}
    assert declared.items() <= installed.items()


@pytest.mark.parametrize(
    "registry", [SIGNALS, EVALUATIONS, CRITERIA, ADDED_COMMANDS, COMMAND_GROUPS], ids=lambda one: one.group
)
def test_entries_of_contrib_are_registered(registry: Registry[Any]) -> None:
    """By the names of their entry points, after the built-in ones."""
    names = [entry.name for entry in registry.built_in]
    assert registry.names == (*names, *sorted(DECLARED[registry.group]))


def test_every_planned_engine_is_on_the_page_of_costs() -> None:
    text = (ROOT / "docs" / "guides" / "cost.md").read_text()
    assert all(f"--engine {name}" in text for name in planned_engines())


def test_a_broken_package_is_named(tmp_path: Path) -> None:
    """Its entry point is loaded before the command line knows any option."""
    (folder := tmp_path / "broken_signals-1.0.dist-info").mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-signals\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[spkv_nas.signals]\nbroken = nosuchmodule:X\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "spkv_nas", "--version"]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "error: cannot load the signal nosuchmodule:X: ModuleNotFoundError" in result.stderr
    assert "repair or uninstall broken-signals" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
