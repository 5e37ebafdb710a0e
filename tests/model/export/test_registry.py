"""Test the choice of an export target: built-in ones by name and by what they express, and those of packages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from helpers import tiny_model
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag
from spkv_nas.cli import main
from spkv_nas.model.checkpoint import save
from spkv_nas.model.export.export import export
from spkv_nas.model.export.registry import AUTO, TARGETS, SpkvTarget, chosen_targets

FOR_ALL = [target for target in TARGETS.built_in if target.engine is None]

MIXED = Layout(("GL", "LL", "LG", "GG"), 6)
LAYERWISE = Layout(("GG", "LL", "LL", "GG"), 6)
PACKAGE = """
import json
from dataclasses import dataclass

from spkv_nas.model.export.target import ExportTarget, TargetError, Written


@dataclass(frozen=True)
class Grid(ExportTarget):
    name = "grid"
    help = "the grid beside the weights"
    indent: int = 1
    is_wrong: bool = False

    def can_express(self, config, layout):
        return None if layout.is_layerwise else "it has mixed layers"

    def write(self, hybrid, folder):
        (folder / "grid.json").write_text(json.dumps(list(hybrid.layout.heads), indent=self.indent))
        return Written("a grid", hybrid.save(folder))

    def verify(self, hybrid, folder):
        if self.is_wrong:
            raise TargetError("its grid is upside down")
        return "its grid is right"


GRID = Grid()
"""


@pytest.fixture
def dense(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write a dense checkpoint."""
    save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package that adds a target by an entry point."""
    site = tmp_path / "site"
    information = site / "grid_export-1.dist-info"
    information.mkdir(parents=True)
    (site / "grid_export.py").write_text(PACKAGE)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: grid-export\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[spkv_nas.export_targets]\ngrid = grid_export:GRID\n"
    )
    monkeypatch.syspath_prepend(site)
    TARGETS.__dict__.pop("entries", None)
    yield
    TARGETS.__dict__.pop("entries", None)


def test_layouts_that_a_target_cannot_express(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"not exported as native: layers 0, 2 mix global and local heads.*\nexport to",
    ):
        export(MIXED, dense, tmp_path / "out", to="native")
    assert not (tmp_path / "out").exists()


def test_a_form_that_only_this_package_loads_can_be_chosen(dense: Path, tmp_path: Path) -> None:
    exported = export(LAYERWISE, dense, tmp_path / "out", to="spkv")
    assert (exported.target, exported.rejected) == ("spkv", {})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "spkv"


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        (
            "gguf",
            {},
            f"unknown export target 'gguf'; expected one of auto, {', '.join(TARGETS.names)}$",
        ),
        ("native", {"bits": 4}, "an export to native has no option 'bits'"),
        (
            AUTO,
            {"bits": 4},
            f"an export to {' or '.join(one.name for one in FOR_ALL)} has no option 'bits'",
        ),
    ],
)
def test_choices_that_cannot_be(to: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen_targets(to, options)


def test_options_reach_the_target() -> None:
    (target,) = chosen_targets(Bits(), {"bits": 4})
    assert target == Bits(bits=4)


@dataclass(frozen=True)
class Bits(SpkvTarget):
    """A target with an option."""

    name = "bits"
    bits: Annotated[int, Flag("Bits of a weight.", low=2)] = 8


@dataclass(frozen=True)
class OtherBits(SpkvTarget):
    """A target whose option has the name of another's and another flag."""

    name = "other"
    bits: Annotated[int, Flag("Bits of a weight.", low=4)] = 8


@dataclass(frozen=True)
class MoreBits(Bits):
    """A target with another default."""

    name = "more-bits"
    bits: Annotated[int, Flag("Bits of a weight.", low=2)] = 16


def test_two_targets_cannot_declare_an_option_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS.entries, "bits", Bits())
    assert [*TARGETS.shared_options()["bits"].defaults] == ["bits"]
    monkeypatch.setitem(TARGETS.entries, "other", OtherBits())
    with pytest.raises(
        UserError, match="export targets bits and other declare --bits with different flags"
    ):
        TARGETS.shared_options()
    monkeypatch.setitem(TARGETS.entries, "other", MoreBits())
    assert TARGETS.shared_options()["bits"].default_text == "bits: 8; more-bits: 16"


def test_a_target_for_one_engine_is_taken_for_it_alone() -> None:
    assert chosen_targets(AUTO, {}) == FOR_ALL
    assert [
        target.name for target in FOR_ALL if target.name in ("native", "granite_swa", "spkv", "mlx")
    ] == [
        "native",
        "granite_swa",
        "spkv",
    ]
    assert chosen_targets(AUTO, {}, "vllm") == chosen_targets(AUTO, {})
    assert chosen_targets(AUTO, {}, "mlx")[-1].name == "mlx"


@pytest.mark.usefixtures("package")
class TestPackage:
    def test_its_target_can_be_chosen(
        self, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        LAYERWISE.write(tmp_path / "layout.yaml")
        arguments = [
            str(tmp_path / "layout.yaml"),
            "--model",
            str(dense),
            "--out",
            str(tmp_path / "out"),
        ]
        main(["export", *arguments, "--to", "grid"])
        printed = capsys.readouterr().out
        assert f"{tmp_path / 'out'}: a grid; its grid is right; its weights were c" in printed
        assert "vLLM 0.32: not tried\n" in printed
        assert printed.endswith("target: grid\n")
        assert json.loads((tmp_path / "out" / "grid.json").read_text()) == list(LAYERWISE.heads)
        assert (
            "grid.json"
            in json.loads((tmp_path / "out" / "spkv-manifest.json").read_text())["sha256"]
        )

    def test_its_options_are_those_of_python(self, dense: Path, tmp_path: Path) -> None:
        assert export(LAYERWISE, dense, tmp_path / "out", to="grid", indent=4).target == "grid"
        assert '\n    "GG"' in (tmp_path / "out" / "grid.json").read_text()

    @pytest.mark.parametrize(
        ("layout", "options", "message"),
        [(MIXED, {}, "mixed layers"), (LAYERWISE, {"is_wrong": True}, "upside down")],
    )
    def test_refused_layouts(
        self, layout: Layout, options: dict[str, bool], message: str, dense: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(UserError, match=f"not exported as grid: .*{message}"):
            export(layout, dense, tmp_path / "out", to="grid", **options)
        assert not (tmp_path / "out").exists()

    def test_it_is_not_a_default(self, dense: Path, tmp_path: Path) -> None:
        assert export(MIXED, dense, tmp_path / "out").target == "spkv"
