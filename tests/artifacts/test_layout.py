"""Test layouts: the grid, its YAML file, and the errors of files edited by hand."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from paths import tracked

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.proposal import Difference
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_yaml, yaml_text

PROVENANCE = {
    "probe": "p",
    "budget": 3,
    "coverage": 0.684,
    "tau": 0.5,
    "seed": None,
    "created_by": "spkv-nas 0.1.0",
}
FILE = "format: spkv-nas/layout/1\nwindow: 8\nheads: [GLG, LLL]\n"


def test_properties() -> None:
    layout = Layout(("GLG", "GGG", "LLL"), window=8)
    assert (layout.num_layers, layout.num_kv_heads, layout.num_heads, layout.num_global) == (
        3,
        3,
        9,
        5,
    )
    assert layout.global_layers == (1,)
    assert not layout.is_layerwise
    assert Layout(("GG", "LL"), window=8).is_layerwise
    np.testing.assert_array_equal(layout.global_mask, [[1, 0, 1], [1, 1, 1], [0, 0, 0]])


def test_mask_round_trip() -> None:
    mask = np.random.default_rng(0).random((5, 3)) < 0.5
    np.testing.assert_array_equal(Layout.from_mask(mask, window=8, strategy="x").global_mask, mask)


@pytest.mark.parametrize("mask", [np.ones((2, 2)), np.ones(3, dtype=bool)])
def test_mask_must_be_a_boolean_grid(mask: np.ndarray) -> None:
    with pytest.raises(ValueError, match="mask must be bool"):
        Layout.from_mask(mask, window=8)


def test_content_hash_is_of_grid_and_window_only() -> None:
    layout = Layout(("GL", "LL"), 8, "a", {"seed": 1})
    assert layout.content_hash == Layout(("GL", "LL"), 8, "b").content_hash
    assert (
        len(
            {
                layout.content_hash,
                Layout(("GL", "LL"), 9).content_hash,
                Layout(("GLLL",), 8).content_hash,
            }
        )
        == 3
    )
    assert hash(layout) == hash(Layout(("GL", "LL"), 8, "a"))


class TestSinks:
    """Local heads may see the first tokens besides their window; layouts without are as before, hash included."""

    LAYOUT = Layout(("GL", "LL"), 8, "a", sinks=4)

    def test_are_a_key_after_the_window_and_absent_without(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        self.LAYOUT.write(path)
        lines = path.read_text().splitlines()
        assert lines[1:3] == [
            "window: 8                   # visible recent keys of a local head, its own included",
            "sinks: 4                    # first tokens of the sequence that a local head also sees",
        ]
        assert Layout.read(path) == self.LAYOUT
        assert "sinks" not in replace(self.LAYOUT, sinks=0).text
        assert Layout.json_schema()["properties"]["sinks"]["minimum"] == 0

    def test_hash_contains_them_unless_there_are_none(self) -> None:
        layouts = [replace(self.LAYOUT, sinks=number) for number in (0, 1, 4)]
        assert [layout.content for layout in layouts] == [
            "8\nGL/LL",
            "8\nGL/LL\nsinks 1",
            "8\nGL/LL\nsinks 4",
        ]
        assert len({layout.content_hash for layout in layouts}) == 3

    def test_an_edit_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        self.LAYOUT.write(path)
        path.write_text(path.read_text().replace("sinks: 4 ", "sinks: 1 "))
        with pytest.warns(UserWarning, match=r"a.yaml was edited"):
            assert Layout.read(path).sinks == 1

    def test_are_shown(self) -> None:
        assert self.LAYOUT.window + self.LAYOUT.sinks == 12
        assert [replace(self.LAYOUT, sinks=number).reach for number in (0, 1, 4)] == [
            "window 8",
            "window 8, 1 sink token",
            "window 8, 4 sink tokens",
        ]
        assert "1 of 4 KV heads global, window 8, 4 sink tokens" in self.LAYOUT._repr_html_()
        assert (
            Layout.from_mask(self.LAYOUT.global_mask, window=8, strategy="a", sinks=4)
            == self.LAYOUT
        )

    @pytest.mark.parametrize("sinks", ["-1", "2147483648", "true", "1.5"])
    def test_out_of_range(self, sinks: str, tmp_path: Path) -> None:
        (tmp_path / "x.yaml").write_text(f"{FILE}sinks: {sinks}\n")
        with pytest.raises(UserError, match=r"x.yaml.*sinks"):
            Layout.read(tmp_path / "x.yaml")


class TestSeveralWindows:
    """Local heads of several windows have a letter for each; layouts of one window are as before, hash included."""

    LAYOUT = Layout(("GLW", "MLL"), strategy="a", windows={"L": 64, "M": 512, "W": 32}, sinks=1)

    def test_letters_are_ordered_by_window_so_that_equal_layouts_are_equal(self) -> None:
        assert (self.LAYOUT.heads, self.LAYOUT.window) == (("GML", "NMM"), 32)
        assert self.LAYOUT.windows == {"L": 32, "M": 64, "N": 512}
        assert self.LAYOUT.head_windows == ((None, 64, 32), (512, 64, 64))
        assert Layout.from_windows(self.LAYOUT.head_windows, strategy="a", sinks=1) == self.LAYOUT
        assert self.LAYOUT.reach == "windows L 32, M 64, N 512, 1 sink token"
        assert (self.LAYOUT.num_global, self.LAYOUT.is_layerwise, self.LAYOUT.global_layers) == (
            1,
            False,
            (),
        )

    def test_one_window_is_the_same_however_it_is_given(self) -> None:
        layout = Layout(("GX", "XX"), windows={"X": 8})
        assert layout == Layout(("GL", "LL"), 8) == Layout.from_windows([[None, 8], [8, 8]])
        assert layout.windows == {}
        assert replace(layout, window=9) == Layout(("GL", "LL"), 9)
        assert Layout.from_windows([[None]]).heads == ("G",)

    def test_file_and_words(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        self.LAYOUT.write(path)
        assert "windows: {L: 32, M: 64, N: 512} # visible recent keys" in path.read_text()
        assert "global, L, M, N local" in path.read_text()
        assert Layout.read(path) == self.LAYOUT
        assert self.LAYOUT.words == "GML NMM L=32 M=64 N=512"
        for layout in (self.LAYOUT, Layout(("GL", "LL"), 8)):
            assert (
                Layout.from_words(layout.words, layout.window, layout.strategy, sinks=layout.sinks)
                == layout
            )

    def test_the_hash_has_all_windows(self) -> None:
        others = [
            Layout(self.LAYOUT.heads, windows={"L": 32, "M": 64, "N": n}, sinks=1)
            for n in (512, 511)
        ]
        assert others[0].content_hash == self.LAYOUT.content_hash != others[1].content_hash

    @pytest.mark.parametrize(
        ("windows", "message"),
        [
            ({"L": 0, "M": 8}, "the window of L is 0"),
            ({"L": 8, "M": 1 << 40}, "the window of M is"),
            ({"L": 8, "M": 8}, "two letters have the same window"),
            ({"L": 8, "M": 9, "N": 10}, "no head is N"),
            ({"L": 8}, "allowed letters are G (global) and L (local)"),
            ({"L": 8, "M": 9, "S": 10}, "'S' is no letter of a local head"),
        ],
    )
    def test_mistakes(self, windows: dict[str, int], message: str, tmp_path: Path) -> None:
        (tmp_path / "x.yaml").write_text(
            f"format: spkv-nas/layout/1\nwindows: {windows}\nheads: [GLM, LLL]\n"
        )
        with pytest.raises(UserError, match=r"x.yaml") as error:
            Layout.read(tmp_path / "x.yaml")
        assert message in str(error.value)

    def test_one_window_or_several(self) -> None:
        with pytest.raises(UserError, match="window is 64, but windows are L 32"):
            replace(self.LAYOUT, window=64)
        with pytest.raises(UserError, match="has 3 windows of local heads: leave it out"):
            self.LAYOUT.check_one_window("leave it out")

    def test_differences(self) -> None:
        other = Layout(("GLL", "LLG"), 64)
        assert Difference.of(self.LAYOUT, other).marks == ("G.~", "~.+")
        assert Difference.of(other, Layout(("GLL", "LLG"), 32)).marks == ("G..", "..G")


def test_file_is_readable_and_keeps_its_key_order(tmp_path: Path) -> None:
    path = tmp_path / "densest.yaml"
    layout = Layout(("GLG", "LLL"), 128, "densest", PROVENANCE)
    layout.write(path)
    assert path.read_text().splitlines() == [
        "format: spkv-nas/layout/1",
        "window: 128                 # visible recent keys of a local head, its own included",
        "heads:                      # one row per layer from layer 0, one letter per KV head: G global, L local",
        "  - GLG",
        "  - LLL",
        "strategy: densest",
        "provenance: {probe: p, budget: 3, coverage: 0.684, tau: 0.5, seed: null, created_by: spkv-nas 0.1.0, "
        f"hash: 7109ea0a, check: {layout.check}}}",
    ]
    assert Layout.read(path) == layout


@pytest.mark.parametrize("strategy", ["null", "a: b", "#x", "é", "two words", "1.5"])
def test_any_strategy_name_survives_the_file(tmp_path: Path, strategy: str) -> None:
    # Given twice: YAML would write an alias, which the strict reader refuses
    shared = {"text": strategy}
    layout = Layout(("G",), 1, strategy, {"a": shared, "b": shared, "c": 1e-9})
    layout.write(tmp_path / "x.yaml")
    assert Layout.read(tmp_path / "x.yaml") == layout
    yaml.safe_load((tmp_path / "x.yaml").read_text())


def test_strategy_and_provenance_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(FILE)
    assert Layout.read(tmp_path / "x.yaml") == Layout(("GLG", "LLL"), 8)


@pytest.mark.parametrize("window", [62, 3, 666])
def test_a_hash_that_looks_like_a_number_stays_text(tmp_path: Path, window: int) -> None:
    """2e087445 must not be read back as infinity, nor a strategy called 1e5 as a number."""
    layout = Layout(("GL",), window, "1e5")
    assert layout.hash in ("2e087445", "70038167", "00153065")
    layout.write(tmp_path / "x.yaml")
    assert Layout.read(tmp_path / "x.yaml") == layout


def test_rows_that_yaml_takes_for_truth_values_stay_text(tmp_path: Path) -> None:
    """The letters of four windows spell NO and ON, which YAML reads as false and true."""
    rows = ("NO", "ON", "LM", "GG")
    layout = Layout(rows, windows={"L": 1, "M": 2, "N": 3, "O": 4})
    layout.write(tmp_path / "x.yaml")
    assert Layout.read(tmp_path / "x.yaml").heads == rows


@pytest.mark.parametrize(("old", "new"), [("- GLG", "- GGG"), ("window: 8 ", "window: 9 ")])
def test_an_edited_layout_is_read_with_a_warning(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "densest.yaml"
    written = Layout(("GLG", "LLL"), 8, "densest", {"budget": 2})
    written.write(path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.warns(
        UserWarning, match=r"(?s)densest.yaml was edited .*remove the hash"
    ) as caught:
        edited = Layout.read(path)
    assert written.hash in str(caught[0].message)
    assert edited.hash in str(caught[0].message)
    assert edited.hash != written.hash
    assert edited.provenance == {"budget": 2}
    edited.write(path)
    assert Layout.read(path) == edited
    path.write_text(path.read_text().replace(f", hash: {edited.hash}", "").replace("LLL", "LLG"))
    Layout.read(path)


def test_strategy_and_provenance_may_be_edited(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    Layout(("G",), 8, "densest", {"budget": 1}).write(path)
    path.write_text(path.read_text().replace("densest", "mine"))
    assert Layout.read(path) == Layout(("G",), 8, "mine", {"budget": 1})
    path.write_text(path.read_text().replace("budget: 1", "budget: 2"))
    with pytest.warns(
        UserWarning, match="its provenance was changed after it was written\nif this is intended"
    ):
        assert Layout.read(path).provenance["budget"] == 2


@pytest.mark.parametrize(
    "strategy", ["../../evil", "/abs", "x" * 300, "", ".hidden", "a\nb", "a\\b"]
)
def test_a_strategy_name_must_be_a_file_name(tmp_path: Path, strategy: str) -> None:
    """A name such as ``../../evil`` would write outside the workspace."""
    with pytest.raises(UserError, match=r"the strategy .* cannot name a file"):
        Layout(("G",), 8, strategy)
    file = tmp_path / "x.yaml"
    file.write_text(
        yaml_text(
            {"format": "spkv-nas/layout/1", "window": 8, "heads": ["G"], "strategy": strategy}
        )
    )
    with pytest.raises(UserError, match=r"layout .*x\.yaml: the strategy .* cannot name a file"):
        Layout.read(file)


@pytest.mark.parametrize(
    ("first", "second", "marks", "jaccard"),
    [
        (("GL", "LG"), ("GL", "LG"), ("G.", ".G"), 1.0),
        (("GL", "LG"), ("GG", "LL"), ("G+", ".-"), 1 / 3),
        (("GG",), ("LL",), ("--",), 0.0),
        (("LL",), ("LL",), ("..",), 1.0),
    ],
)
def test_difference(
    first: tuple[str, ...], second: tuple[str, ...], marks: tuple[str, ...], jaccard: float
) -> None:
    difference = Difference.of(Layout(first, 8), Layout(second, 9))
    assert difference.marks == marks
    assert difference.jaccard == pytest.approx(jaccard)
    assert difference.num_heads == int(
        (Layout(first, 8).global_mask != Layout(second, 9).global_mask).sum()
    )


def test_difference_needs_equal_shapes() -> None:
    with pytest.raises(
        UserError, match="is for 1 layers x 2 KV heads, the second has 2 layers x 1 KV heads"
    ):
        Difference.of(Layout(("GL",), 8), Layout(("G", "L"), 8))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layout/1", "layout/2", "this version reads 'format: spkv-nas/layout/1'"),
        ("format: spkv-nas/layout/1", "", "key 'format' is missing"),
        ("LLL", "LgL", "layer 1 is 'LgL'"),
        ("[GLG, LLL]", "[]", "empty"),
        ("[GLG, LLL]", "['']", "empty"),
        ("[GLG, LLL]", "GLG", "key 'heads'"),
        ("[GLG, LLL]", "[1]", "key 'heads.0'"),
        ("window: 8", "window: 0", "window is 0"),
        ("window: 8", "window: true", "key 'window'"),
        ("window: 8", "", "key 'window' is missing"),
        ("window: 8", "windows: 8", "key 'windows': should be a valid dictionary"),
        ("window: 8", "window: 8\nwindow: 9", "duplicate"),
        ("heads:", "- heads", "not valid YAML"),
    ],
)
def test_mistakes_in_the_file_are_explained(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(UserError) as error:
        Layout.read(path)
    assert message in str(error.value)
    assert "mine.yaml" in str(error.value)


def test_text_like_a_number_survives_other_files(tmp_path: Path) -> None:
    """A commit such as 2e087445 must not be read back as infinity."""
    (tmp_path / "x.yaml").write_text(yaml_text({"commit": "2e087445", "tau": 1e-9}))
    assert read_yaml(tmp_path / "x.yaml", "file") == {"commit": "2e087445", "tau": 1e-9}


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="layout not found"):
        Layout.read(tmp_path / "none.yaml")


def test_a_truncated_layout_is_not_a_handmade_one(tmp_path: Path) -> None:
    """A truncated file is never read silently as another layout."""
    file = tmp_path / "densest.yaml"
    Layout(("GL", "LG"), window=8, strategy="densest", provenance={"probe": "p"}).write(file)
    text = file.read_text()
    for length in range(len(text) - 1):
        file.write_text(text[:length])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                layout = Layout.read(file)
            except UserError:
                continue
        assert caught or "one row per layer" not in text[:length], text[:length]
        assert caught or layout.strategy == "custom"


@pytest.mark.parametrize("path", tracked("layouts/stdlib-21x3/*.yaml"), ids=lambda path: path.stem)
def test_committed_layouts_have_their_hash(path: Path) -> None:
    layout = Layout.read(path)
    assert yaml.safe_load(path.read_text())["provenance"]["hash"] == layout.hash
