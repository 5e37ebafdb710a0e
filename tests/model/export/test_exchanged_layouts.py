"""Test that a layout that was exchanged in an exported folder is noticed when the folder is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from spkv_nas import Layout, UserError, export, load
from spkv_nas.base.manifest import MANIFEST
from spkv_nas.model.checkpoint import save


@pytest.fixture
def exports(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> tuple[Path, Path]:
    """Two exports of one model with different layouts."""
    save(tiny_model(vocab_size=len(tiny_tokenizer)), tiny_tokenizer, tmp_path / "dense")
    export(
        Layout(("GL", "LG") * 2, 6), tmp_path / "dense", tmp_path / "one", to="spkv", evidence=None
    )
    export(
        Layout(("GL", "GG") * 2, 6), tmp_path / "dense", tmp_path / "two", to="spkv", evidence=None
    )
    return tmp_path / "one", tmp_path / "two"


def test_exchanged_files(exports: tuple[Path, Path], tmp_path: Path) -> None:
    """Whether the manifest is there, that of another export, or gone."""
    one, two = exports
    for number, names in enumerate([("layout.yaml",), ("config.json",), ("config.json", MANIFEST)]):
        folder = tmp_path / f"changed-{number}"
        shutil.copytree(one, folder)
        for name in names:
            shutil.copyfile(two / name, folder / name)
        with pytest.raises(
            UserError, match=r"is damaged: .* differs|has another layout than section 'spkv'"
        ):
            load(folder)
        with pytest.raises(
            UserError,
            match=r"its layout\.yaml has another layout than section 'spkv' of its config",
        ):
            AutoModelForCausalLM.from_pretrained(folder)
        (folder / MANIFEST).unlink()
        with pytest.raises(UserError, match=r"its layout\.yaml has another layout"):
            load(folder)


def test_both_exchanged_are_what_is_loaded(exports: tuple[Path, Path]) -> None:
    one, two = exports
    for name in ("layout.yaml", "config.json"):
        shutil.copyfile(two / name, one / name)
    assert (
        AutoModelForCausalLM.from_pretrained(one).config.spkv["layout"]["heads"] == ["GL", "GG"] * 2
    )
    with pytest.raises(UserError, match="is damaged"):
        load(one)
