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
        missing = [
            entry.name
            for entry in registry
            if not re.search(rf"(?<![\w-]){entry.name}(?![\w-])", code)
        ]
        assert not missing, page
        assert registry.built_in, page


def test_entry_points_are_installed() -> None:
    """If not: ``make .venv/.installed``."""
    installed = {
        (point.group, point.name): point.value for point in distribution("spkv-nas").entry_points
    }
    declared = {
        (group, name): value for group, names in DECLARED.items() for name, value in names.items()
    }
    assert declared.items() <= installed.items()


@pytest.mark.parametrize(
    "registry",
    [SIGNALS, EVALUATIONS, CRITERIA, ADDED_COMMANDS, COMMAND_GROUPS],
    ids=lambda one: one.group,
)
def test_entries_of_contrib_are_registered(registry: Registry[Any]) -> None:
    """By the names of their entry points, after the built-in ones."""
    names = [entry.name for entry in registry.built_in]
    assert registry.names == (*names, *sorted(DECLARED[registry.group]))


def test_every_planned_engine_is_on_the_page_of_caches() -> None:
    text = (ROOT / "docs" / "guides" / "cache.md").read_text()
    assert all(f"`{name}`" in text for name in planned_engines())


def test_a_package_that_cannot_be_used_is_named_and_left_out(tmp_path: Path) -> None:
    """One that cannot be imported, or ends the process on import; entries are loaded before any option is known."""
    (folder := tmp_path / "broken_signals-1.0.dist-info").mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-signals\nVersion: 1.0\n")
    points = "broken = nosuchmodule:X\nleaving = leavingmodule:X\n"
    (folder / "entry_points.txt").write_text(f"[spkv_nas.signals]\n{points}")
    (tmp_path / "leavingmodule.py").write_text("import sys\nsys.exit(0)\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "spkv_nas", "probe", "--help"]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0
    assert "--signal" in result.stdout
    assert result.stderr.splitlines() == [
        f"warning: cannot load the signal {name}; it is left out: repair or uninstall broken-signals"
        for name in (
            "nosuchmodule:X: ModuleNotFoundError: No module named 'nosuchmodule'", "leavingmodule:X: SystemExit: 0",
        )
    ]  # fmt: skip
