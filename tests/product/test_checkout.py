"""Test that what commands write into a checkout is an input of no other: not of lint, not of a distribution."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from paths import ROOT

# Where commands write: the workspaces of the documentation, its pages, and folders that users name
OUTPUTS = (
    "demo/reports/mine",
    "hybrid",
    "probes/mine",
    "layouts/mine",
    "reports/mine",
    "runs",
    "docs/_build",
    "my own",
)
SOUND_CODE = '"""Hold a number."""\n\nNUMBER = 1\n'
WRONG_CODE = "import os, sys\nx = 'y'\n"
WRONG_WORD = "receive".replace("ei", "ie")  # this file is checked, too


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Clone with this project's tools and one sound module, into which commands have written."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", ".gitignore", "README.md"):
        shutil.copy(ROOT / name, folder)
    (folder / "module.py").write_text(SOUND_CODE)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)
    for name in OUTPUTS:
        (folder / name).mkdir(parents=True)
        (folder / name / "modeling.py").write_text(WRONG_CODE)
        (folder / name / "page.md").write_text(WRONG_WORD)
        (folder / name / "figure.pdf").write_text(f"%PDF-1.4\n{WRONG_WORD}\n")
    return folder


def lint(folder: Path) -> tuple[int, str]:
    """Run ruff and codespell as ``make lint`` does; return the exit status and what they print."""
    command = [
        "make",
        "--old-file",
        ".venv/.installed",
        "style",
        f"BIN={Path(sys.executable).parent}",
    ]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return run.returncode, run.stdout + run.stderr


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_lint_reads_no_output_of_a_command(checkout: Path) -> None:
    assert lint(checkout)[0] == 0, lint(checkout)[1]


@pytest.mark.parametrize(("name", "text"), [("new.py", WRONG_CODE), ("page.md", f"{WRONG_WORD}\n")])
def test_lint_reads_what_git_tracks(name: str, text: str, checkout: Path) -> None:
    (checkout / name).write_text(text)
    subprocess.run(["git", "add", name], cwd=checkout, check=True)
    status, printed = lint(checkout)
    assert status != 0
    assert name in printed
    assert not any(f"{folder}/" in printed for folder in OUTPUTS)


def test_a_source_distribution_holds_no_output_of_a_command(checkout: Path, tmp_path: Path) -> None:
    for name in ("spkv_nas/base/version.py", "hatch_build.py", "LICENSE"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "sdist",
        "--directory",
        str(tmp_path / "built"),
    ]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    (archive,) = (tmp_path / "built").iterdir()
    with tarfile.open(archive) as opened:
        names = [name.partition("/")[2] for name in opened.getnames()]
    assert "spkv_nas/base/version.py" in names
    assert not [name for name in names if name.endswith(("modeling.py", "page.md", "figure.pdf"))]
