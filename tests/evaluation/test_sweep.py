"""Test threshold sweeps: each threshold equals a separate evaluation, and the command writes the table or explains."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from helpers import BLOCK, fails, gated, tiny_model
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.cli.app import NLL
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.data.config import SEPARATE
from spkv_nas.data.sources import documents
from spkv_nas.data.splits import load_text
from spkv_nas.evaluation.nll import COLUMNS, document_nll, evaluate, sweep_table, tau_sweep
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.evaluation.thresholds import parse_taus
from spkv_nas.model.attention import attention_layers, layer_states
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.density_tracker import DensityTracker
from spkv_nas.model.modes import set_gate_mode
from spkv_nas.model.windows import apply_layout
from spkv_nas.probing.density import probe
from spkv_nas.report.plot import draw
from spkv_nas.report.result_charts import tau_sweep_chart


class TestSweep:
    taus = (0.2, 0.5, 0.8, 1.0)

    def test_rows_equal_single_evaluations(self, blocks: TokenBlocks) -> None:
        model = gated()
        rows = sweep_table(tau_sweep(model, blocks, self.taus, batch_size=4)).set_index("tau")
        assert list(rows.index) == [0.0, *self.taus]
        assert rows["density"].is_monotonic_decreasing
        assert rows["density"].nunique() == 5
        set_gate_mode(model, "open")
        opened = document_nll(model, blocks)
        for tau in self.taus:
            set_gate_mode(model, "hard", tau)
            nll = document_nll(model, blocks)
            change = paired_difference(nll, opened)
            expected = (
                probe(model, blocks, tau).mean,
                nll.mean,
                change.percent,
                change.standard_error,
            )
            # A change is the difference of two NLLs in percent, each of which is rounded by up to 1e-5 %
            assert rows.loc[tau].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)

    def test_first_row_is_the_model_without_gates(self, blocks: TokenBlocks) -> None:
        """Open gates, hard gates at tau 0, and the ungated model are equal."""
        nll = document_nll(tiny_model(vocab_size=300), blocks).mean
        row = sweep_table(tau_sweep(gated(), blocks, [0.5])).iloc[0]
        assert row.tolist() == pytest.approx([0.0, 1.0, nll, 0.0, 0.0], rel=1e-6)
        zero = evaluate(gated(), blocks, 0.0)
        assert (zero.nll.mean, zero.density) == (pytest.approx(nll, rel=1e-6), 1.0)

    @pytest.mark.parametrize("tau", [0.7, 1.5])
    def test_the_gates_are_restored(self, tau: float, blocks: TokenBlocks) -> None:
        model = gated()
        set_gate_mode(model, "soft", 0.3, anneal=0.25)
        try:
            tau_sweep(model, blocks, [0.1, tau])
        except UserError:
            assert tau > 1.0
        states = {
            (s.mode, s.tau, s.anneal) for s in (state.settings for state in layer_states(model))
        }
        assert states == {("soft", 0.3, 0.25)}

    def test_progress_counts_all_passes(self, blocks: TokenBlocks) -> None:
        seen: list[tuple[int, int]] = []
        tau_sweep(
            gated(), blocks, [0.0, 0.5, 0.9], batch_size=6, progress=lambda *step: seen.append(step)
        )
        assert seen == [(done, 27) for done in (6, 9, 15, 18, 24, 27)]


def test_a_short_last_batch_is_weighted_by_its_size(blocks: TokenBlocks) -> None:
    """The density is the mean over tokens, not over batches."""
    densities = [evaluate(gated(), blocks, batch_size=size).density for size in (1, 8)]
    assert densities[0] == pytest.approx(densities[1], rel=1e-9)


def test_layers_without_gates_do_not_set_the_threshold(blocks: TokenBlocks) -> None:
    """The default tau of ungated local layers does not replace that of gated ones."""
    model = gated("gemma3_text")
    logits = []
    for layer in attention_layers(model).values():
        if hasattr(layer, "utility_predictor"):
            layer.utility_predictor.register_forward_hook(lambda _m, _a, out: logits.append(out))
    set_gate_mode(model, "hard", 0.9)
    watch = DensityTracker(model)
    watch.start()
    document_nll(model, blocks, batch_size=9)
    expected = np.mean([(out.numpy() >= np.log(9.0)).mean() for out in logits])
    assert 0.0 < expected < 0.45
    heads = watch.stop()
    assert heads is not None
    assert np.isnan(heads[[0, 2]]).all()
    assert np.nanmean(heads) == pytest.approx(expected)


class TestThresholds:
    def test_a_range_is_even_in_logit(self) -> None:
        taus = np.array(parse_taus("0.01..0.99"))
        assert (len(taus), taus[0], taus[6], taus[-1]) == (13, 0.01, 0.5, 0.99)
        assert np.diff(np.log(taus / (1 - taus))) == pytest.approx(np.log(99) / 6, rel=1e-3)

    def test_a_list_is_taken_as_it_is(self) -> None:
        assert parse_taus("0.9, 0,1,.5,0.9") == [0.0, 0.5, 0.9, 1.0]


class TestCommand:
    @pytest.mark.usefixtures("whole_pictures")
    def test_sweep(
        self, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        workspace = tmp_path / "w"
        options = ["--model", str(checkpoint), "--data", str(text), "--context", str(BLOCK)]
        main(["evaluate", *options, "--taus", "0.1,0.5,0.9", "--workspace", str(workspace)])
        output = capsys.readouterr().out
        assert "open" in output
        assert "tau-sweep.png" in output.replace("\n", "")
        folder = workspace / "reports" / "mine"
        kinds = ("csv", "yaml", "png", "svg", "pdf")
        assert {p.name for p in folder.glob("[!.]*")} == {f"tau-sweep.{kind}" for kind in kinds}
        rows = pd.read_csv(folder / "tau-sweep.csv")
        assert tuple(rows.columns) == COLUMNS
        assert rows["tau"].tolist() == [0.0, 0.1, 0.5, 0.9]
        model, tokenizer = load(checkpoint)
        blocks = build_blocks(documents([str(text)], Path()), tokenizer, BLOCK, documents=SEPARATE)
        half = evaluate(model, blocks, 0.5)
        assert rows.loc[2, ["density", "nll"]].tolist() == pytest.approx(
            [half.density, half.nll.mean], rel=1e-5
        )
        summary = yaml.safe_load((folder / "tau-sweep.yaml").read_text())
        assert summary["model"] == str(checkpoint)
        assert summary["data"] == [str(text)]
        assert summary["num_tokens"] == len(blocks.own_context)
        assert "torch" in summary["environment"]
        assert (folder / "tau-sweep.png").read_bytes().startswith(b"\x89PNG")
        drawn = "".join(ElementTree.parse(folder / "tau-sweep.svg").getroot().itertext())
        assert "NLL change" in drawn

    def test_one_threshold_writes_no_result(
        self, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Use the checkpoint's threshold unless --tau sets another, on at most --max-tokens."""
        model, tokenizer = load(checkpoint)
        cache = tmp_path / "cache"
        blocks = load_text(
            [str(text)],
            tokenizer,
            cache,
            Path(),
            block_size=BLOCK,
            max_tokens=127,
            documents=SEPARATE,
        ).spread(3)
        options = [
            "--model",
            str(checkpoint),
            "--data",
            str(text),
            "--context",
            str(BLOCK),
            "--max-tokens",
            "127",
        ]
        for tau, extra in ((0.4, []), (0.9, ["--tau", "0.9"])):
            main(["evaluate", *options, *extra, "--workspace", str(tmp_path / "w")])
            expected = evaluate(model, blocks, tau)
            assert expected.density is not None
            output = " ".join(capsys.readouterr().out.split())
            assert (
                f"NLL {expected.nll.mean:.4f}, density {100 * expected.density:.1f} % at tau {tau}; 93"
                in output
            )
        assert [path.name for path in (tmp_path / "w").iterdir()] == ["runs"]
        assert {path.name for path in (tmp_path / "w" / "runs" / "mine").iterdir()} == {
            "blocks",
            "separators.json",
        }
        help_text = " ".join((NLL.run.__doc__ or "").split())
        # It once promised to write nothing
        assert "The tokens of --data are kept in runs/NAME/blocks/" in help_text

    @pytest.mark.parametrize("kind", ["dense", "hybrid"])
    def test_a_model_without_gates(
        self,
        kind: str,
        text: Path,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        model = tiny_model(vocab_size=300)
        if kind == "hybrid":
            apply_layout(model, Layout(("GL", "LL", "LL", "GG"), window=6))
        save(model, tiny_tokenizer, tmp_path / kind)
        blocks = build_blocks(
            documents([str(text)], Path()), tiny_tokenizer, BLOCK, documents=SEPARATE
        )
        options = [
            "--model",
            tmp_path / kind,
            "--data",
            text,
            "--context",
            BLOCK,
            "--workspace",
            tmp_path / "w",
        ]
        main(["evaluate", *map(str, options)])
        output = " ".join(capsys.readouterr().out.split())
        assert f"{kind}: NLL {document_nll(model, blocks).mean:.4f}; " in output
        assert "no gates" in fails(capsys, "evaluate", *options, "--tau", "0.5")
        assert "no gates" in fails(capsys, "evaluate", *options, "--taus", "0.1..0.9")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--taus", "0.1..x"], "'0.1..x' is neither a range LOW..HIGH nor a list"),
            (["--taus", "0.1..0.5..0.9"], "neither a range"),
            (["--taus", "0.1,,0.9"], "neither a range"),
            (["--taus", ""], "neither a range"),
            (["--taus", "0.1..1.2"], "must lie in [0, 1]; found 1.2"),
            (["--taus", "nan,0.5"], "must lie in [0, 1]; found nan"),
            (["--taus", "0.9..0.1"], "must be ascending; found 0.9..0.1"),
            (["--taus", "0.5..0.5"], "must be ascending"),
            (["--taus", "0..0.9"], "its ends must lie inside (0, 1)"),
            (["--taus", "0.5"], "at least two thresholds"),
            (["--tau", "-0.1"], "--tau must lie in [0, 1]; found -0.1"),
            (["--tau", "0.5", "--taus", "0.1..0.9"], "remove --tau and --against"),
            (["--max-tokens", "31"], "--max-tokens 31 is less than one block of 512 tokens"),
            (["--model", "somewhere"], "--model needs --data"),
        ],
    )
    def test_bad_input(
        self, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert message in fails(capsys, "evaluate", *options, "--workspace", tmp_path / "w")
        assert not list(tmp_path.rglob("*.csv"))


def test_labels_of_a_crowded_curve_do_not_overlap() -> None:
    """Some thresholds go without a label; no label covers another or the curve."""
    tau = np.array([0.0, *np.linspace(0.01, 0.99, 25)])
    rows = pd.DataFrame({"tau": tau, "density": 1 - tau, "delta_nll_percent": 8 * tau**4})
    figure = draw(tau_sweep_chart(rows.assign(delta_nll_standard_error=0.1 + tau / 2)))
    FigureCanvasAgg(figure).draw()
    ax = figure.axes[0]
    boxes = [Text.get_window_extent(label) for label in ax.texts]  # without the leaders
    assert 5 < len(boxes) < len(rows)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    share = np.linspace(0, 1, 2000)
    curve = ax.transData.transform(np.column_stack([100 * (1 - share), 8 * share**4]))
    assert not any(box.contains(x, y) for box in boxes for x, y in curve)
