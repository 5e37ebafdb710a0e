"""Test attention times: measurement, tables derived from it, files, and both commands."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import fails
from marks import slow_after
from spkv_kernels import PagedKVCache
from spkv_kernels import timing as kernel_timing

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT
from spkv_nas.cli import main
from spkv_nas.cost import timing as attention_timing
from spkv_nas.cost.calibration import Calibration, LayerCase, Timing, default_contexts
from spkv_nas.cost.timing import time_attention
from spkv_nas.stages.options.plan_attention import AttentionOptions
from spkv_nas.stages.plan_attention import run

CASE = LayerCase(
    num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32", window=4, batch=2, device="cpu"
)
SHAPE = Shape(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, num_parameters=1000)
LAYOUT = Layout(("GL", "LL", "GG"), window=4)
DECODE = {(100, 0): 1.0, (100, 1): 2.0, (100, 2): 4.0, (400, 0): 1.0, (400, 1): 5.0, (400, 2): 10.0}


def make_calibration(
    case: LayerCase = CASE, decode: dict[tuple[int, int], float] = DECODE
) -> Calibration:
    timings = tuple(Timing(*point, seconds) for point, seconds in decode.items())
    return Calibration(case, "abacus", 2, timings, {"torch": "2.13.0"})


class TestInterpolation:
    @pytest.mark.parametrize(
        ("density", "context", "seconds"),
        [
            (0.0, 100, 1.0),
            (0.5, 100, 2.0),
            (1.0, 400, 10.0),
            (0.75, 100, 3.0),  # between one and two of two heads
            (0.5, 200, 3.0),  # a third of the way from 100 to 400 tokens
            (0.25, 250, 2.25),  # halfway in both: (1 + 2) / 2 and (1 + 5) / 2
        ],
    )
    def test_by_hand(self, density: float, context: int, seconds: float) -> None:
        result = make_calibration().layer_seconds(context, density=density, window=4)
        assert result == pytest.approx(seconds)

    def test_a_layout_is_the_sum_of_its_layers(self) -> None:
        calibration = make_calibration()
        assert calibration.layout_seconds(LAYOUT, 100) == pytest.approx(2.0 + 1.0 + 4.0)

    def test_sink_tokens_count_as_further_keys(self) -> None:
        """48 sink tokens are half of the 96 keys that a global head reads beyond the window of 4."""
        calibration = make_calibration()
        assert calibration.layout_seconds(Layout(("LL",), 4, sinks=48), 100) == pytest.approx(2.0)
        assert calibration.layout_seconds(Layout(("GL",), 4, sinks=48), 100) == pytest.approx(3.0)
        assert calibration.layout_seconds(Layout(("GG",), 4, sinks=48), 100) == pytest.approx(4.0)
        assert calibration.layout_seconds(Layout(("LL",), 4, sinks=1000), 100) == pytest.approx(4.0)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda c: c.layer_seconds(99), "measured 100 to 400 tokens, not 99"),
            (lambda c: c.layer_seconds(401), "--context 401"),
            (lambda c: c.layer_seconds(100, density=1.5), r"in \[0, 1\]; found 1.5"),
            (lambda c: c.layer_seconds(100, density=0.5, window=8), "for window 4, not 8"),
            (
                lambda c: c.layout_seconds(Layout(("GLL",), 4), 100),
                "has 3 KV heads per layer, the times were measured for 2",
            ),
            (
                lambda c: c.check_shape(Shape(3, 6, 2, 8, 1)),
                "this model has 6 query heads, 2 KV heads of size 8",
            ),
        ],
    )
    def test_points_that_were_not_measured(
        self, call: Callable[[Calibration], object], message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            call(make_calibration())

    def test_full_attention_needs_no_window(self) -> None:
        assert make_calibration().layer_seconds(400) == 10.0

    def test_a_grid_with_gaps(self) -> None:
        with pytest.raises(UserError, match="one time for every context"):
            make_calibration(decode={point: t for point, t in DECODE.items() if point != (400, 1)})
        with pytest.raises(UserError, match=r"times of 0 to 2 global heads; found \[0, 1\]"):
            make_calibration(decode={point: t for point, t in DECODE.items() if point[1] < 2})


class TestFiles:
    def test_round_trip(self, tmp_path: Path) -> None:
        calibration = make_calibration()
        calibration.write(tmp_path)
        assert Calibration.read(tmp_path) == calibration
        assert sorted(path.name for path in tmp_path.glob("[!.]*")) == [
            "calibration.csv",
            "calibration.yaml",
        ]
        assert (tmp_path / "calibration.csv").read_text().splitlines()[:2] == [
            "context,num_global,seconds_per_token",
            "100,0,1",
        ]

    def rewrite(self, folder: Path, table: str | None = None, **header: Any) -> None:
        """Replace the contents of a file, without the hashes."""
        if table is not None:
            (folder / "calibration.csv").write_text(table)
        content = (
            yaml.safe_load((folder / "calibration.yaml").read_text()) | header | {"sha256": None}
        )
        kept = {key: value for key, value in content.items() if value is not None}
        (folder / "calibration.yaml").write_text(yaml.safe_dump(kept))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"window": None}, "key 'window' is missing"),
            ({"window": "4"}, "key 'window'"),
            ({"window": 0}, "key 'window'"),
            ({"table": "a,b\n1,2\n"}, "column 'context' is missing"),
            ({"table": "context,num_global,seconds_per_token\n1,0,x\n"}, "must be a number in [0"),
            ({"table": "context,num_global,seconds_per_token\n1,0,1\n"}, "0 to 2 global heads"),
        ],
    )
    def test_damaged(self, change: dict[str, Any], message: str, tmp_path: Path) -> None:
        make_calibration().write(tmp_path)
        self.rewrite(tmp_path, **change)
        with pytest.raises(UserError) as error:
            Calibration.read(tmp_path)
        assert message in str(error.value)
        assert "calibration.yaml" in str(error.value)

    def test_missing_calibration(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="calibration not found"):
            Calibration.read(tmp_path)
        make_calibration().write(tmp_path)
        (tmp_path / "calibration.csv").unlink()
        with pytest.raises(UserError, match="calibration not found"):
            Calibration.read(tmp_path)


def test_contexts_and_numbers_of_global_heads() -> None:
    assert default_contexts(32768) == (1024, 4096, 16384, 32768)
    assert default_contexts(1024) == (1024,)
    assert default_contexts(600) == (600,)
    counts = {
        heads: LayerCase(heads, heads, 8, "float32", 4, 1, "cpu").global_counts
        for heads in (1, 4, 8, 10)
    }
    assert counts == {1: (0, 1), 4: (0, 1, 2, 3, 4), 8: (0, 2, 4, 6, 8), 10: (0, 2, 5, 8, 10)}


class TestMeasuring:
    @pytest.mark.parametrize("dtype", slow_after(1, ["bfloat16", "float32"]))
    def test_every_point_with_its_windows_and_caches(
        self, dtype: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The kernel gets each number of global heads at each context length."""
        decoded: list[tuple[int, list[int]]] = []
        real_decode = attention_timing.decode_attention

        def decode(q: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
            assert q.dtype == cache.pool_k.dtype == getattr(torch, dtype)
            decoded.append((int(cache.seq_lens[0]), cache.num_entries[0].tolist()))
            return real_decode(q, cache)

        monkeypatch.setattr(attention_timing, "decode_attention", decode)
        steps: list[tuple[int, int]] = []
        case = LayerCase(4, 2, 8, dtype, window=4, batch=2, device="cpu")
        actual = time_attention(case, (8, 24), progress=lambda *step: steps.append(step))
        assert [row[:2] for row in actual.timings] == list(itertools.product((8, 24), (0, 1, 2)))
        assert steps == [(0, 2), (1, 2), (2, 2)]
        for context in (8, 24):
            timed = [entries for seen, entries in decoded if seen == context]
            for expected in ([4, 4], [context, 4], [context, context]):
                assert timed.count(expected) >= 1
        assert {seen for seen, _ in decoded} == {*range(7, 8 + 15), *range(23, 24 + 15)}

    def test_times_are_per_token_and_layer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A fake clock advances one second per reading; each call takes one second."""
        monkeypatch.setattr(kernel_timing, "perf_counter", itertools.count().__next__)
        result = time_attention(CASE, (8,))
        assert {row.seconds_per_token for row in result.timings} == {1 / (8 * 2)}

    def test_caches_are_bounded(self) -> None:
        """Small layers use eight caches per number of global heads, a large layer one."""
        assert attention_timing._num_layers(CASE, 1024) == 8
        assert (
            attention_timing._num_layers(LayerCase(32, 8, 128, "float32", 128, 1, "cpu"), 32768)
            == 1
        )


class TestCommands:
    """``micro-3`` has 8 query and 2 KV heads of size 8 in 4 layers."""

    def calibrate(self, workspace: Path, *options: str) -> None:
        line = ["calibrate", "micro-3", "--context", "64", "--window", "8", "--device", "cpu"]
        main([*line, "-w", str(workspace), *options])

    def cost(
        self, capsys: pytest.CaptureFixture[str], workspace: Path, *options: str
    ) -> tuple[str, str]:
        """Run ``cost`` and return its answer and its remarks."""
        capsys.readouterr()
        main(["plan", "attention", "micro-3", "-w", str(workspace), *options])
        shown = capsys.readouterr()
        return " ".join(shown.out.split()), " ".join(shown.err.split())

    def test_measure_then_cost(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.calibrate(tmp_path, "--batch", "2")
        output = " ".join(capsys.readouterr().out.split())
        assert "8 query heads, 2 KV heads of size 8, window 8, measured on" in output
        folder = tmp_path / "reports" / "micro-3"
        assert {path.name for path in folder.glob("[!.]*")} == {
            "calibration.csv",
            "calibration.yaml",
        }
        written = yaml.safe_load((folder / "calibration.yaml").read_text())
        assert (written["dtype"], written["batch"], written["window"]) == ("float32", 2, 8)
        assert {"torch", "commit"} <= set(written["environment"])
        assert all(written[key] for key in ("hardware", "num_threads"))
        Layout(("GL", "LL", "LL", "GG"), window=8, strategy="mine").write(tmp_path / "mine.yaml")
        output, remarks = self.cost(
            capsys,
            tmp_path,
            "--context=64",
            f"--layout={tmp_path / 'mine.yaml'}",
            "--density=0.5",
            "--window=8",
        )
        assert "times: attention of all layers, measured on" in output
        assert remarks == "plan attention: starting"

    def test_rows_equal_the_calibration(self, tmp_path: Path) -> None:
        heads = LayerCase(8, 2, 8, "float32", window=4, batch=1, device="cpu")
        make_calibration(heads).write(tmp_path / "reports" / "micro-3")
        layout = Layout(("GL", "LL", "LL", "GG"), window=4)
        layout.write(tmp_path / "mine.yaml")
        layouts, sizes = [tmp_path / "mine.yaml"], {"density": 0.5, "window": 4, "context": "100"}
        options = AttentionOptions(level="micro-3", layout=layouts, workspace=tmp_path, **sizes)  # type: ignore[arg-type]
        result = run(options, SILENT).value
        rows = result.costs
        assert isinstance(result.times, Calibration)
        assert [row.decode_seconds for row in rows] == pytest.approx(
            [4 * 4.0, 2.0 + 1 + 1 + 4, 4 * 2.0]
        )

    @pytest.mark.parametrize(
        ("options", "remark"),
        [
            (["--context=401"], "100 to 400 tokens, not 401"),
            (["--context=100", "--density=0.5", "--window=8"], "for window 4, not 8"),
        ],
    )
    def test_a_calibration_that_does_not_fit_is_not_used(
        self, options: list[str], remark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        heads = LayerCase(8, 2, 8, "float32", window=4, batch=1, device="cpu")
        make_calibration(heads).write(tmp_path / "reports" / "micro-3")
        shown, remarks = self.cost(capsys, tmp_path, *options)
        assert "times: not measured" in shown + remarks
        assert remark in remarks
        assert "next: spkv-nas calibrate micro-3" in remarks
        assert remark in fails(
            capsys,
            "plan",
            "attention",
            "micro-3",
            "-w",
            tmp_path,
            "--calibration=micro-3",
            *options,
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["calibrate", "level-11"], "no level 'level-11'"),
            (["calibrate", "micro-0", "--model", "x"], "not both"),
            (["calibrate", "micro-0", "--context", "many"], "context 'many' is not a number"),
            (["calibrate", "micro-0", "--context", "0"], "at least 1 token; found 0"),
            (
                ["calibrate", "micro-0", "--dtype", "int3"],
                "'int3' is unknown; expected one of float32, bfloat16, float16",
            ),
            (["calibrate", "micro-0", "--window", "0"], "greater than or equal to 1"),
            (["plan", "attention", "micro-0", "--calibration", "none"], "calibration not found"),
        ],
    )
    def test_bad_input(
        self, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert message in fails(capsys, *arguments, "--workspace", tmp_path / "w")
        assert not (tmp_path / "w").exists()

    def test_a_calibration_of_another_model(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_calibration().write(tmp_path / "reports" / "mine")
        message = fails(
            capsys, "plan", "attention", "micro-3", "--calibration=mine", "-w", tmp_path
        )
        assert (
            "measured for 4 query heads, 2 KV heads of size 8; this model has 8 query heads"
            in message
        )
