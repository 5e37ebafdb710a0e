"""Test the palindrome task: its sequences, its measures by hand, and the command that compares three models."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from helpers import equal_up_to_rounding, fails, scatter_gates

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.contrib.reproduce.palindrome import stage as palindrome
from spkv_nas.contrib.reproduce.palindrome.stage import (
    COLUMNS,
    CURVE_COLUMNS,
    SLIDING_WINDOW,
    VARIANTS,
    PalindromeSettings,
    new_model,
    palindrome_charts,
    train_variant,
)
from spkv_nas.contrib.reproduce.palindrome.task import (
    INSTRUCTION,
    VOCABULARY,
    Palindromes,
    output_nll,
    take_measures,
)
from spkv_nas.model.gates import predictors
from spkv_nas.model.modes import set_gate_mode
from spkv_nas.report.plot import save_chart
from spkv_nas.training import trainer
from spkv_nas.training.run_files import newest_checkpoint

TINY = PalindromeSettings(steps=7, batch_size=2, num_heldout=5)

CURVES = pd.DataFrame(
    {
        "variant": ["full", "full", "sp-kv", "sp-kv"],
        "step": [10, 20] * 2,
        "loss": [9.0, 1.0, 8.0, 2.0],
        "mean_utility": [math.nan, math.nan, 0.9, 0.5],
        "density": [math.nan, math.nan, 1.0, 0.5],
    }
)


class TestSequences:
    def test_the_output_is_the_reversed_input(self) -> None:
        sequences = Palindromes(20)
        for index in range(20):
            words = [VOCABULARY[token] for token in sequences[index]["input_ids"]]
            assert words[0] == "<s>"
            assert " ".join(words[64:-63]) == INSTRUCTION
            assert words[2:64:2] == words[-62::2] == [" "] * 31
            numbers = words[1:64:2]
            assert len(numbers) == 32
            assert all(len(number) == 2 and number.isdigit() for number in numbers)
            assert words[-63::2] == numbers[::-1]

    def test_only_the_output_has_labels(self) -> None:
        sequence = Palindromes(1)[0]
        labels = sequence["labels"]
        assert (labels[:-63] == -100).all()
        assert torch.equal(labels[-63:], sequence["input_ids"][-63:])

    def test_the_instruction_is_longer_than_two_windows_reach(self) -> None:
        """More than 50 tokens (paper), and no path from the list to the output through 2 layers of window 32."""
        assert len(INSTRUCTION.split()) > max(50, 2 * (32 - 1))

    def test_positions_are_named_by_their_tokens(self) -> None:
        sequences = Palindromes(1)
        words = [VOCABULARY[token] for token in sequences[0]["input_ids"]]
        by_kind = {
            kind: [w for w, k in zip(words, sequences.kinds, strict=True) if k == kind]
            for kind in sequences.kinds
        }
        assert {kind: len(members) for kind, members in by_kind.items()} == {
            "start": 1,
            "number": 32,
            "whitespace": 31,
            "instruction": len(INSTRUCTION.split()),
            "output": 63,
        }
        assert all(word.isdigit() for word in by_kind["number"])
        assert set(by_kind["whitespace"]) == {" "}

    def test_a_sequence_follows_from_seed_split_and_index(self) -> None:
        def drawn(seed: int, heldout: bool, size: int = 50) -> list[tuple[int, ...]]:
            sequences = Palindromes(size, seed, heldout)
            return [tuple(sequences[index]["input_ids"].tolist()) for index in range(50)]

        assert drawn(3, False) == drawn(3, False, size=80)
        everything = [
            sequence
            for seed in (0, 3)
            for heldout in (False, True)
            for sequence in drawn(seed, heldout)
        ]
        assert len(set(everything)) == 200

    def test_every_number_is_as_likely(self) -> None:
        sequences = Palindromes(500)
        counts = np.bincount(
            np.concatenate([sequences[i]["input_ids"][1:64:2] for i in range(500)]), minlength=100
        )
        assert len(counts) == 100
        assert (
            (counts - 160) ** 2 / 160
        ).sum() < 160  # chi-square, 99 degrees of freedom: p < 1e-4

    def test_outside(self) -> None:
        with pytest.raises(IndexError):
            Palindromes(3)[3]


class TestMeasure:
    sequences = Palindromes(5, heldout=True)

    def test_nll_is_the_loss_of_the_labels(self) -> None:
        model = new_model(TINY, FULL_ATTENTION)
        batch = {
            key: torch.stack([row[key] for row in map(self.sequences.__getitem__, range(5))])
            for key in ("input_ids", "labels")
        }
        loss = model.eval()(**batch, use_cache=False).loss.item()
        assert output_nll(model, self.sequences, 2) == pytest.approx(loss, rel=1e-5)

    def test_chance_is_a_uniform_guess_of_the_numbers(self) -> None:
        assert self.sequences.chance_nll == pytest.approx(
            (32 * math.log(100) + 31 * math.log(1)) / 63
        )

    def test_gates_are_measured_soft_and_hard(self) -> None:
        model = new_model(TINY, SP_KV)
        scatter_gates(model)
        tokens = torch.stack([self.sequences[index]["input_ids"] for index in range(5)])
        logits: list[torch.Tensor] = []
        for module in predictors(model).values():
            module.register_forward_hook(lambda _m, _a, out: logits.append(out.detach()))
        result = take_measures(model, self.sequences, 0.6, batch_size=2)
        for mode, tau in (("soft", None), ("hard", 0.6)):
            set_gate_mode(model, mode, tau)
            assert (result.nll if mode == "soft" else result.hard_nll) == output_nll(
                model, self.sequences, 2
            )
            logits.clear()
            with torch.inference_mode():
                model(input_ids=tokens, use_cache=False)
            utility = torch.stack(logits).sigmoid()  # [L, B, Hkv, T]
            if mode == "soft":
                assert result.mean_utility == pytest.approx(float(utility.mean()), rel=1e-5)
        kept = (utility >= 0.6).double()
        assert 0.1 < kept.mean() < 0.9
        assert result.density == pytest.approx(float(kept.mean()))
        assert result.kept is not None
        assert result.kept["number"] == pytest.approx(float(kept[..., 1:64:2].mean()))
        assert result.kept["instruction"] == pytest.approx(float(kept[..., 64:-63].mean()))
        assert result.nll != result.hard_nll

    def test_without_gates(self) -> None:
        result = take_measures(new_model(TINY, SLIDING_WINDOW), self.sequences)
        assert {key for key, value in asdict(result).items() if value is None} == {
            "hard_nll",
            "mean_utility",
            "density",
            "kept",
        }


class TestModels:
    def test_only_the_sliding_window_is_blind_to_the_list(self) -> None:
        one, other = (Palindromes(1, seed)[0]["input_ids"] for seed in (0, 1))
        mixed = torch.cat([other[:64], one[64:]])
        for variant in VARIANTS:
            model = new_model(TINY, variant).eval()
            with torch.inference_mode():
                outputs = [
                    model(input_ids=x[None], use_cache=False).logits[0, -64:] for x in (one, mixed)
                ]
            assert equal_up_to_rounding(*outputs) == (variant == SLIDING_WINDOW)

    def test_all_start_from_the_same_weights(self) -> None:
        states = [new_model(TINY, variant).state_dict() for variant in VARIANTS]
        for state in states[1:]:
            assert all(torch.equal(value, state[name]) for name, value in states[0].items())


class TestCommand:
    options = ("--steps", "7", "--batch-size", "2", "--seed", "3")

    @pytest.mark.slow
    def test_end_to_end(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = ("--workspace", str(tmp_path), "--name", "mine")
        seen: dict[str, list[int]] = {}
        current = ""
        draw, train = Palindromes.__getitem__, palindrome.train_variant

        def watch(self: Palindromes, index: int) -> dict[str, torch.Tensor]:
            if not self.heldout:
                seen.setdefault(current, []).append(index)
            return draw(self, index)

        def note(
            settings: PalindromeSettings, variant: str, *args: object, **options: object
        ) -> object:
            nonlocal current
            current = variant
            return train(settings, variant, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Palindromes, "__getitem__", watch)
        monkeypatch.setattr(palindrome, "train_variant", note)
        main(["reproduce", "palindrome", *self.options, *name])
        captured = capsys.readouterr()
        assert "palindrome.png" in captured.out.replace("\n", "")
        assert "sp-kv (3 of 3)" in captured.err
        assert seen[FULL_ATTENTION] == seen[SLIDING_WINDOW] == seen[SP_KV]
        assert sorted(set(seen[SP_KV])) == list(range(14))

        folder = tmp_path / "reports" / "mine"
        rows = pd.read_csv(folder / "palindrome.csv")
        assert tuple(rows.columns) == COLUMNS
        assert rows["variant"].tolist() == list(VARIANTS)
        assert (rows["steps"] == 7).all()
        assert (rows["seconds"] > 0).all()
        assert rows["density"].tolist()[:2] == [1.0, 0.0]
        assert (
            rows["hard_nll"].notna().tolist()
            == rows["mean_utility"].notna().tolist()
            == [False, False, True]
        )
        curves = pd.read_csv(folder / "palindrome-curves.csv")
        assert tuple(curves.columns) == CURVE_COLUMNS
        assert curves["step"].tolist() == list(range(1, 8)) * 3
        gated = curves["variant"] == SP_KV
        assert curves.loc[gated, "mean_utility"].between(0.5, 1.0).all()
        assert curves.loc[~gated, ["mean_utility", "density"]].isna().all(axis=None)
        summary = yaml.safe_load((folder / "palindrome.yaml").read_text())
        assert (summary["settings"]["seed"], summary["num_output_tokens"]) == (3, 63)
        assert "torch" in summary["environment"]
        assert (folder / "palindrome.png").read_bytes().startswith(b"\x89PNG")
        assert "mean utility" in (folder / "palindrome.svg").read_text()

        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        monkeypatch.setattr(
            trainer.SPKVTrainer, "train", lambda *_, **__: pytest.fail("trained again")
        )
        main(["reproduce", "palindrome", *self.options, *name])
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--steps", "0"], "--steps"),
            (["--batch-size", "x"], "--batch-size"),
            (["--seed", "-1"], "--seed"),
            (["--device", "cuda"], "no CUDA device"),
        ],
    )
    def test_bad_input(
        self,
        options: list[str],
        message: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert message in fails(
            capsys, "reproduce", "palindrome", *options, "--workspace", tmp_path / "w"
        )
        assert not list(tmp_path.rglob("*.csv"))

    def test_a_workspace_that_is_a_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "w").write_text("")
        assert "cannot be written" in fails(
            capsys, "reproduce", "palindrome", "--workspace", tmp_path / "w"
        )


class TestResume:
    @pytest.mark.slow
    def test_an_interrupted_run_resumes_bit_for_bit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(palindrome, "SAVE_STEPS", 3)

        def die_at_5(self: object, args: object, state: object, *_: object, **__: object) -> None:
            if state.global_step == 5:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

        whole = train_variant(TINY, SP_KV, tmp_path / "whole")
        with monkeypatch.context() as patch:
            patch.setattr(palindrome.UtilityCallback, "on_step_end", die_at_5)
            with pytest.raises(KeyboardInterrupt):
                train_variant(TINY, SP_KV, tmp_path / "torn")
        newest = newest_checkpoint(tmp_path / "torn")
        assert newest is not None
        assert newest.name == "checkpoint-3"
        resumed = train_variant(TINY, SP_KV, tmp_path / "torn")
        pd.testing.assert_frame_equal(resumed.curve, whole.curve)
        assert (resumed.nll, resumed.hard_nll, resumed.kept) == (
            whole.nll,
            whole.hard_nll,
            whole.kept,
        )
        assert not list((tmp_path / "torn").glob("checkpoint-*"))

    def test_another_setting_is_another_run(self) -> None:
        assert replace(TINY, bias=1.0).content_hash != TINY.content_hash
        assert replace(TINY).content_hash == TINY.content_hash

    def test_a_damaged_run_is_not_read(self, tmp_path: Path) -> None:
        run = train_variant(TINY, FULL_ATTENTION, tmp_path / "full")
        assert run.hard_nll is None
        curve = tmp_path / "full" / "final" / "curve.csv"
        curve.write_text(curve.read_text().replace("1", "2"))
        with pytest.raises(UserError, match=r"curve.csv differs"):
            train_variant(TINY, FULL_ATTENTION, tmp_path / "full")


def test_the_figure_has_the_same_bytes_every_time(tmp_path: Path) -> None:
    chart = palindrome_charts(CURVES, 2.3)
    for run in ("one", "two"):
        save_chart(tmp_path / run, chart)
    for kind in ("png", "svg"):
        one, two = ((tmp_path / run / f"palindrome.{kind}").read_bytes() for run in ("one", "two"))
        assert one == two
