"""Test that every measurement uses one rule for the local window, and that mixed windows are warned about."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import make_table, tiny_model, write_project
from transformers import PreTrainedTokenizerBase

import spkv_nas
from spkv_nas.artifacts.defaults import RECOMMENDED
from spkv_nas.artifacts.gate_config import suitable_window
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.base.records import read_record
from spkv_nas.base.workspace import Workspace
from spkv_nas.cli import main
from spkv_nas.contrib.compare.options import CompareOptions
from spkv_nas.contrib.compare.stage import run
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.checkpoint import save
from spkv_nas.model.windows import apply_layout
from spkv_nas.probing.measure import measure_signal
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.propose import propose


@pytest.fixture
def subject(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Write a dense model and two documents of text."""
    save(tiny_model(vocab_size=300, max_position_embeddings=512), tiny_tokenizer, tmp_path / "mine")
    (tmp_path / "text").mkdir()
    for number in range(8):
        words = "".join(f"the fox {(7 * i + number) % 31} jumps over {i}. " for i in range(90))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    options = ["--model", tmp_path / "mine", "--data", tmp_path / "text", "--context", 128]
    return [*map(str, options), "--workspace", str(tmp_path / "w")]


class TestOneRule:
    def test_head_gates_have_the_window_of_densities(
        self, subject: list[str], tmp_path: Path
    ) -> None:
        """The default window is a sixteenth of a block for both."""
        main(["probe", *subject, "--signal", RECOMMENDED, "--steps", "2"])
        main(["probe", *subject, "--signal", "density", "--steps", "2", "--ablation-tokens", "0"])
        tables = [
            HeadScores.read(tmp_path / "w" / "probes" / name)
            for name in ("mine", f"mine-{RECOMMENDED}")
        ]
        assert [table.window for table in tables] == [suitable_window(128)] * 2 == [8, 8]

    @pytest.mark.parametrize(
        "signal", ["duo", "add-one-head", "leave-one-out", "attention-mass", RECOMMENDED]
    )
    def test_every_signal_leaves_keys_outside_the_window(
        self, signal: str, blocks: TokenBlocks
    ) -> None:
        """Blocks of 40 tokens get a smaller window than the default of 128."""
        options = {"steps": 2} if signal in ("duo", RECOMMENDED) else {}
        model = tiny_model(vocab_size=300)
        assert (
            measure_signal(signal, model, blocks, **options).window
            == suitable_window(blocks.block_size)
            == 8
        )

    def test_in_python_too(self, blocks: TokenBlocks) -> None:
        assert spkv_nas.head_gates(tiny_model(vocab_size=300), blocks, steps=2).window == 8

    def test_a_hybrid_keeps_its_window(self, blocks: TokenBlocks) -> None:
        """Also if its other layers are local by design, with fewer keys."""
        from spkv_nas.model.windows import default_window

        for family in ("llama", "gemma3_text"):
            model = tiny_model(family, vocab_size=300)
            apply_layout(model, Layout(("LL", "GL") * 2, window=6))
            assert default_window(model, 4096) == 6
        assert measure_signal("add-one-head", model, blocks).window == 6


class TestMixedWindows:
    @pytest.fixture
    def layouts(self, tmp_path: Path) -> list[Path]:
        files = [tmp_path / f"{name}.yaml" for name in ("narrow", "wide")]
        for file, window in zip(files, (8, 16), strict=True):
            Layout(("GL", "LL"), window, file.stem).write(file)
        return files

    def test_names_windows_and_files(self, layouts: list[Path]) -> None:
        with pytest.warns(UserWarning, match="layouts with 2 different local windows") as caught:
            Proposal.read(layouts).warn_of_windows(memory=(0.3, 0.4))
        text = str(caught[0].message)
        assert f"8 keys: narrow ({layouts[0]}); 16 keys: wide ({layouts[1]})" in text
        assert "propose all at one --window" in text
        # Of one window there is nothing to say
        Proposal.read(layouts[:1]).warn_of_windows({"sp-kv": 8})
        # Compared at equal memory
        Proposal.read(layouts).warn_of_windows({"sp-kv": 8}, memory=(0.3, 0.31))

    def test_names_sink_tokens(self, tmp_path: Path) -> None:
        files = [tmp_path / f"{name}.yaml" for name in ("none", "four")]
        for file, sinks in zip(files, (0, 4), strict=True):
            Layout(("GL", "LL"), 8, file.stem, sinks=sinks).write(file)
        proposal = Proposal.read(files)
        with pytest.warns(
            UserWarning, match="layouts with 2 different numbers of sink tokens"
        ) as caught:
            proposal.warn_of_windows({"sp-kv": 8})  # its gates decide about the first tokens
        (warning,) = caught
        assert f"(sinks 0: none ({files[0]}); sinks 4: four ({files[1]}))" in str(warning.message)
        assert "propose all at one --sinks" in str(warning.message)
        Proposal.read(files[1:]).warn_of_windows({"sp-kv": 8})

    @pytest.mark.filterwarnings("always:layouts with .* local windows:UserWarning")
    def test_train_hybrid_and_score_warn_and_record(
        self, layouts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Layouts and references of different windows are compared with a warning."""
        recipe, options = write_project(tmp_path / "project"), ["--workspace", str(tmp_path / "w")]
        replace(make_table(np.linspace(0.1, 0.9, 4).reshape(2, 2)), name="tiny").write(
            tmp_path / "w/probes/tiny"
        )
        hybrids = [
            "train-hybrid",
            *map(str, layouts),
            "--recipe",
            str(recipe),
            "--probe",
            "tiny",
            *options,
        ]
        for extra in (["--dry-run"], []):
            main([*hybrids, *extra])
            printed = capsys.readouterr().err
            assert re.search(
                r"local windows are compared \(8 keys: narrow .*, sp-kv.*; 16 keys: wide", printed
            )
        record = read_record(tmp_path / "w/reports/tiny/comparison.yaml", "comparison")
        assert record["windows"] == {"sp-kv": 8, "narrow": 8, "wide": 16}
        dense = next((tmp_path / "w/runs/tiny").glob("dense-*/final"))
        subject = [
            "--model",
            str(dense),
            "--data",
            str(tmp_path / "project/text"),
            "--context",
            "32",
        ]
        main(["score", *map(str, layouts), *subject, "--name", "tiny", *options])
        assert "8 keys: narrow" in capsys.readouterr().err
        assert read_record(tmp_path / "w/reports/tiny/zero-shot.yaml", "scores")["windows"] == {
            "narrow": 8,
            "wide": 16,
        }

    def probes(self, workspace: Workspace, **windows: int) -> None:
        """Write probes of one model: the recommended signal, named ``gates``, and densities."""
        for name, window in windows.items():
            signal = {"signal": RECOMMENDED, "kind": "share"} if name == "gates" else {}
            table = make_table(np.linspace(0.1, 0.9, 4).reshape(2, 2))
            replace(
                table, name=name, window=window, record=ProbeRecord.of({"model": "m", **signal})
            ).write(workspace.probe_dir(name))

    def test_compare_warns_and_records(self, tmp_path: Path) -> None:
        workspace = Workspace(tmp_path)
        self.probes(workspace, one=8, other=16)
        with pytest.warns(
            UserWarning, match=r"8 keys: one; 16 keys: other.*\n.*with the same --window"
        ):
            run(CompareOptions(probes=["one", "other"], budget="2", workspace=tmp_path))
        record = read_record(tmp_path / "reports/one/agreement.yaml", "agreement")
        assert record["windows"] == {"one": 8, "other": 16}

    def test_compare_warns_of_sink_tokens(self, tmp_path: Path) -> None:
        """Except of those of densities, whose gates decide about the first tokens."""
        table = make_table(np.linspace(0.1, 0.9, 4).reshape(2, 2))
        gates = {"signal": RECOMMENDED, "kind": "share"}
        for name, metadata in {
            "gates": {**gates, "sinks": 1}, "none": gates, "densities": {}
        }.items():  # fmt: skip
            replace(table, name=name, window=8, record=ProbeRecord.of(metadata)).write(
                Workspace(tmp_path).probe_dir(name)
            )
        with pytest.warns(
            UserWarning, match=r"\(sinks 0: none; sinks 1: gates\)\n.*with the same --sinks"
        ):
            run(CompareOptions(probes=["gates", "none"], budget="2", workspace=tmp_path))
        run(CompareOptions(probes=["gates", "densities"], budget="2", workspace=tmp_path))

    def test_compare_warns_of_separators(self, tmp_path: Path) -> None:
        """Except of those made by hand, which do not have them."""
        table = make_table(np.linspace(0.1, 0.9, 4).reshape(2, 2))
        for name, separator in {
            "one": {"best": "eos"}, "other": {"best": "eos", "documents": "separate"}, "older": None,
        }.items():  # fmt: skip
            metadata = {} if separator is None else {"separator": separator}
            replace(table, name=name, window=8, record=ProbeRecord.of(metadata)).write(
                Workspace(tmp_path).probe_dir(name)
            )
        with pytest.warns(
            UserWarning, match=r"different separators .*\('eos': one; 'eos separate': other\)"
        ):
            run(CompareOptions(probes=["one", "other"], budget="2", workspace=tmp_path))
        run(CompareOptions(probes=["one", "older"], budget="2", workspace=tmp_path))

    def test_propose_names_the_recommended_probe_of_another_window(self, tmp_path: Path) -> None:
        self.probes(Workspace(tmp_path), gates=16, mine=8)
        sentences = propose(ProposeOptions(probe="mine", budget="2", workspace=tmp_path)).sentences
        assert any(
            "'gates'" in one and "window 16" in one and "--window 8" in one for one in sentences
        )
        self.probes(Workspace(tmp_path), gates=8)
        sentences = propose(ProposeOptions(probe="mine", budget="2", workspace=tmp_path)).sentences
        assert not any("'gates'" in one for one in sentences)
