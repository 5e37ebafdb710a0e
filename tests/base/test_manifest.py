"""Test cached hashes: a file is read once, and again whenever it may have changed."""

from __future__ import annotations

import os
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest

from spkv_nas.base import manifest
from spkv_nas.base.errors import UserError
from spkv_nas.base.manifest import (
    check_manifest,
    file_hash,
    file_hashes,
    manifest_checked,
    named_hash,
    write_manifest,
)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the files that are read; every file counts as large enough to be cached."""
    names: list[str] = []

    def sha256_file(path: Path) -> str:
        names.append(path.name)
        return sha256(path.read_bytes()).hexdigest()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(manifest, "_LARGE", 1)
    monkeypatch.setattr(manifest, "_SETTLED", 0.0)
    monkeypatch.setattr(manifest, "sha256_file", sha256_file)
    return names


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    return path


def later(path: Path) -> None:
    """Wait until a change gets a different modification time."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        path.touch()


def test_a_file_is_read_once(file: Path, read: list[str], tmp_path: Path) -> None:
    assert [file_hash(file) for _ in range(3)] == [sha256(b"one").hexdigest()] * 3
    assert read == ["weights"]
    (tmp_path / "folder").mkdir()
    file.parent.joinpath("other").symlink_to(file)
    assert file_hashes([file, file.parent / "other"]) == [sha256(b"one").hexdigest()] * 2
    assert read == ["weights"]


def test_a_changed_file_is_read_again(file: Path, read: list[str]) -> None:
    """A change is detected also at equal size with the old modification time restored."""
    file_hash(file)
    times = file.stat()
    later(file)
    file.write_bytes(b"two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_hash(file) == sha256(b"two").hexdigest()
    assert len(read) == 2


def test_a_file_just_written_is_not_cached(
    file: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change could have the same modification time."""
    monkeypatch.setattr(manifest, "_SETTLED", 3600.0)
    assert file_hash(file) == file_hash(file)
    assert len(read) == 2
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"sha256": "0"}'])
def test_a_damaged_note_is_none(content: str, file: Path, read: list[str], tmp_path: Path) -> None:
    file_hash(file)
    (note,) = (tmp_path / "cache").rglob("*.json")
    note.write_text(content)
    assert file_hash(file) == sha256(b"one").hexdigest()
    assert len(read) == 2
    file_hash(file)
    assert len(read) == 2


def test_unusable_cache_folder(file: Path, read: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert file_hash(file) == sha256(b"one").hexdigest()
    with pytest.raises(FileNotFoundError):
        file_hash(tmp_path / "none")


def test_concurrent_requests_read_once(
    file: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = manifest.sha256_file

    def slowly(path: Path) -> str:
        time.sleep(0.2)
        return slow(path)

    monkeypatch.setattr(manifest, "sha256_file", slowly)
    threads = [threading.Thread(target=file_hash, args=[file]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == ["weights"]


def test_only_blobs_are_named_by_their_hash(tmp_path: Path) -> None:
    digest = "0" * 64
    (tmp_path / "blobs").mkdir()
    for name in (digest, "f" * 40):
        (tmp_path / "blobs" / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "blobs" / digest)
    (tmp_path / "small").symlink_to(tmp_path / "blobs" / ("f" * 40))
    (tmp_path / digest).touch()
    assert named_hash(tmp_path / "link") == digest
    assert named_hash(tmp_path / "small") is None
    assert named_hash(tmp_path / digest) is None


class TestManifest:
    def test_damage_is_reported_before_other_errors(self, file: Path) -> None:
        """An error of a reader is replaced for damaged weights, and kept for sound ones."""
        write_manifest(file.parent)
        with pytest.raises(ValueError, match="cannot parse"), manifest_checked(file.parent):
            raise ValueError("cannot parse")
        file.write_bytes(b"0ne")
        with (
            pytest.raises(UserError, match="weights differs from its recorded"),
            manifest_checked(file.parent),
        ):
            raise ValueError("cannot parse")
        with (
            pytest.raises(UserError, match="weights differs from its recorded"),
            manifest_checked(file.parent),
        ):
            pass

    def test_passed_hashes_are_recorded(self, file: Path) -> None:
        """A copy takes the hash of its original, so that a failed copy is detected."""
        write_manifest(file.parent, {"weights": sha256(b"two").hexdigest()})
        with pytest.raises(UserError, match="weights differs"):
            check_manifest(file.parent)
        file.write_bytes(b"two")
        check_manifest(file.parent)
