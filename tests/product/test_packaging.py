"""Test the packages built from a checkout: their commit, and the files that they must contain."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

from spkv_nas.base import version
from spkv_nas.base.version import COMMIT_FILE, checkout_commit, environment

TASK = "spkv_nas/contrib/evaluate/tasks/assets/stdlib_completions.jsonl"
NAME = COMMIT_FILE.relative_to(ROOT).as_posix()


def build(target: str, root: Path, folder: Path) -> Path:
    """Build one distribution and return its file."""
    arguments = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        target,
        "--directory",
        str(folder),
    ]
    subprocess.run(arguments, cwd=root, check=True, capture_output=True, timeout=300)
    (built,) = folder.iterdir()
    return built


@pytest.mark.slow
def test_a_build_knows_its_commit(tmp_path: Path) -> None:
    """The wheel of a checkout, and the wheel of its source distribution, which has no git."""
    commit = checkout_commit(ROOT)
    source = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for number, root in enumerate((ROOT, unpacked)):
        with zipfile.ZipFile(build("wheel", root, tmp_path / str(number))) as wheel:
            assert wheel.read(NAME).decode().strip() == commit
            assert (
                wheel.read("spkv_nas/assets/constraints.txt")
                == (ROOT / "constraints.txt").read_bytes()
            )
            names = set(wheel.namelist())
        assert {"spkv_nas/__init__.pyi", "spkv_nas/py.typed", "spkv_kernels/api.py", TASK} <= names
        assert not any(name.startswith(("tests/", "reports/")) for name in names)
    assert not COMMIT_FILE.exists()


def test_the_commit_of_a_wheel_is_what_it_was_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "commit.txt"
    written.write_text("0123456789ab\n")
    monkeypatch.setattr(version, "COMMIT_FILE", written)
    environment.cache_clear()
    try:
        assert environment()["commit"] == "0123456789ab"
    finally:
        environment.cache_clear()


def test_a_folder_inside_another_checkout_has_no_commit(tmp_path: Path) -> None:
    """The commit of a surrounding repository is not recorded."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run(
        [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@example.org",
            "commit",
            "--quiet",
            "--allow-empty",
            "--message",
            "first",
        ],
        check=True,
    )
    (tmp_path / "site-packages").mkdir()
    assert len(checkout_commit(tmp_path)) == 12
    assert checkout_commit(tmp_path / "site-packages") == "unknown"
