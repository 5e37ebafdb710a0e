"""Test RULER scores: their definition, the floor beside them, and independence from the batch size."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from helpers import fails, gated, logits, tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import RULER
from spkv_nas.base.statistics import unseen_share
from spkv_nas.cli import main
from spkv_nas.contrib.evaluate.ruler import stage as ruler
from spkv_nas.contrib.evaluate.ruler.stage import QuestionRounds, answer, ruler_table, score
from spkv_nas.data.ruler.sample import Sample
from spkv_nas.data.ruler.tasks import generate as make_sample
from spkv_nas.data.tokenizer import train_bpe
from spkv_nas.model.attention import layer_states
from spkv_nas.model.checkpoint import save
from spkv_nas.model.generation import Continuations, continue_greedily, generate
from spkv_nas.model.modes import gate_mode, set_gate_mode
from spkv_nas.model.windows import apply_layout, every_head_local, local_sinks, local_window

LAYOUT = Layout(("GL", "LL", "LL", "GG"), window=6)


def hybrid() -> PreTrainedModel:
    model = tiny_model(vocab_size=300)
    apply_layout(model, LAYOUT)
    return model


def tight() -> PreTrainedModel:
    """Make a model whose table of positions holds every prompt with its answer, but not the longest of both."""
    return tiny_model("gpt2", vocab_size=300, max_position_embeddings=47)


class TestScore:
    def test_score_follows_the_definition_of_ruler(self) -> None:
        """The mean share of answers, or of samples with one of them, after control characters are removed."""
        rng = Random(0)
        words = ["Alpha", "BETA", "gam ma", "delta-7", "1234567", "\nNew", "İ"]
        cases = []
        for _ in range(1000):
            answers = tuple(rng.sample(words, rng.randint(1, 4)))
            written = [
                rng.choice([str.lower, str.upper, str])(word)
                for word in rng.sample(words, rng.randint(0, 5))
            ]
            cases.append((rng.choice([" ", "", "\x00", "\t "]).join(["", *written, ""]), answers))

        def cleaned(output: str) -> str:
            return "".join("\n" if ord(one) < 32 else one for one in output.strip()).strip()

        outputs = [cleaned(output).lower() for output, _ in cases]
        for any_will_do, of_found in (
            (False, lambda matches: sum(matches) / len(matches)),
            (True, max),
        ):
            expected = [
                float(of_found([1.0 if one.lower() in output else 0.0 for one in answers]))
                for output, (_, answers) in zip(outputs, cases, strict=True)
            ]
            scores = [score(output, answers, any_will_do=any_will_do) for output, answers in cases]
            assert scores == expected
            assert 0.1 < np.mean(scores) < 0.9

    def test_rows_are_means_of_samples_with_their_errors(self) -> None:
        def answers(length: int, density: float = 0.25, **scores: list[float]) -> pd.DataFrame:
            frames = [
                pd.DataFrame({"task": task, "index": range(4), "score": each})
                for task, each in scores.items()
            ]
            return pd.concat(frames).assign(length=length, density=density)

        checkpoint = answers(512, vt=[1, 0.5, 0, 1], fwe=[0, 1, 0, 1])
        floor = answers(512, vt=[0] * 4, fwe=[1, 0, 0, 0])
        against = answers(512, 0.5, vt=[0, 0.5, 0, 0], fwe=[0, 1, 0, 1])
        single = ruler_table(answers(1024, vt=[1] * 4), answers(1024, vt=[0] * 4))
        rows = pd.concat([ruler_table(checkpoint, floor, against), single])
        assert list(rows.columns) == RULER.header
        assert list(rows["task"]) == ["vt", "fwe", "average of 2", "vt", "average of 1"]
        error = np.std([1, 0.5, 0, 1], ddof=1) / 2
        pair = np.std([1, 0, 0, 1], ddof=1) / 2
        assert list(rows.iloc[0, 2:]) == pytest.approx(
            [4, 0.625, error, 0, 0.25, 0.125, 0.5, 0.5, pair]
        )
        other = np.std([0, 1, 0, 1], ddof=1) / 2
        alike = unseen_share(4) / 1.96  # of differences that are all 0
        both = math.hypot(pair, alike) / 2
        expected = [8, 0.5625, math.hypot(error, other) / 2, 0.125, 0.25, 0.3125, 0.5, 0.25, both]
        assert list(rows.iloc[2, 2:]) == pytest.approx(expected)
        assert rows.iloc[3:, 7:].isna().all(axis=None)
        assert list(rows.iloc[4, 2:7]) == pytest.approx([4, 1, alike, 0, 0.25])


class TestContinuation:
    prompts = (
        "the quick brown fox jumps over the lazy dog",
        "the lazy dog",
        "fox jumps over the quick brown dog and",
    )

    @pytest.mark.parametrize(
        "make",
        [gated, hybrid, lambda: tiny_model(vocab_size=300), tight],
        ids=["gates", "layout", "dense", "positions"],
    )
    def test_batched_rows_equal_single_rows(
        self, make: Any, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model, most = make(), [9, 5, 12]
        with gate_mode(model, "hard", 0.5) if make is gated else nullcontext():
            together = continue_greedily(model, tiny_tokenizer, self.prompts, most)
            alone = [
                continue_greedily(model, tiny_tokenizer, [prompt], [number])
                for prompt, number in zip(self.prompts, most, strict=True)
            ]
        assert together.texts == [one.texts[0] for one in alone]
        assert together.densities == pytest.approx([one.densities[0] for one in alone], nan_ok=True)
        for prompt, number, text in zip(self.prompts, most, together.texts, strict=True):
            tau = {"tau": 0.5} if make is gated else {}
            assert (
                generate(model, tiny_tokenizer, prompt, max_new_tokens=number, **tau).text == text
            )
        assert np.isnan(together.densities).all() == (make not in (gated, hybrid))

    def test_the_density_is_that_of_the_prompts(
        self, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        result = continue_greedily(hybrid(), tiny_tokenizer, ["the", *self.prompts], [20] * 4)
        assert result.densities == pytest.approx([math.nan, 3 / 8, 3 / 8, 3 / 8], nan_ok=True)


class TestFloor:
    def test_every_head_local_equals_a_local_layout(self, tokens: Any) -> None:
        local = tiny_model(vocab_size=300)
        apply_layout(local, Layout(("LL",) * 4, window=6))
        expected = logits(local, tokens)
        for model in (gated(), hybrid(), tiny_model(vocab_size=300)):
            before = logits(model, tokens)
            assert not before.allclose(expected, atol=1e-3)
            with every_head_local(model, 6):
                assert logits(model, tokens).allclose(expected, atol=1e-5)
            assert logits(model, tokens).equal(before)

    def test_sink_tokens_of_the_layout_stay(self, tokens: Any) -> None:
        model = tiny_model(vocab_size=300)
        apply_layout(model, Layout(("LL", "GL") * 2, window=6, sinks=2))
        local = tiny_model(vocab_size=300)
        apply_layout(local, Layout(("LL",) * 4, window=6, sinks=2))
        with every_head_local(model, 6, local_sinks(model)):
            assert logits(model, tokens).allclose(logits(local, tokens), atol=1e-5)
        assert [local_sinks(one) for one in (gated(), hybrid(), tiny_model())] == [0, 0, 0]

    def test_a_window_of_the_checkpoint_stays(self, tokens: Any) -> None:
        model = tiny_model("gemma3_text", vocab_size=300)
        with every_head_local(model, 1000):
            assert sorted({state.windows[0] for state in layer_states(model)})[-1] == 1000  # type: ignore[index]
            assert any(state.windows[0] < 1000 for state in layer_states(model))  # type: ignore[index]

    def test_its_window_is_the_models_own(self) -> None:
        assert [local_window(model) for model in (gated(), hybrid(), tiny_model())] == [6, 6, None]


def test_answers_match_the_samples_asked(
    tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model answers every other question."""
    by_prompt: dict[str, Sample] = {}

    def make(index: int) -> Sample:
        sample = make_sample("niah_multivalue", 0, index, 700, tiny_tokenizer)
        return by_prompt.setdefault(sample.text, sample)

    def answering(_m: Any, _t: Any, prompts: list[str], _n: Any) -> Continuations:
        samples = [by_prompt[prompt] for prompt in prompts]
        seen = list(by_prompt)
        texts = [", ".join(one.answers[: 4 * (seen.index(one.text) % 2)]) for one in samples]
        return Continuations(texts, np.full(len(samples), 0.5))

    monkeypatch.setattr(ruler.generation, "continue_greedily", answering)
    monkeypatch.setattr(ruler, "_TOGETHER", 2000)
    updates: list[tuple[int, int]] = []
    lines = answer(tiny_model(), tiny_tokenizer, make, 7, lambda *step: updates.append(step))
    assert [(line["index"], line["score"], line["density"]) for line in lines] == [
        (n, n % 2, 0.5) for n in range(7)
    ]
    assert updates[-1] == (7, 7)
    assert len(updates) > 2


def test_a_sample_that_does_not_fit_is_left_out(
    tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other samples are still scored."""

    def make(index: int) -> Sample | None:
        return (
            None
            if index in (2, 3, 5)
            else make_sample("niah_single_1", 0, index, 600, tiny_tokenizer)
        )

    monkeypatch.setattr(ruler, "_TOGETHER", 1000)
    lines = answer(gated_hard(), tiny_tokenizer, make, 6)
    assert [line["index"] for line in lines] == [0, 1, 4]
    result = pd.DataFrame(lines)[["index", "score", "density"]].assign(
        task="niah_single_1", length=600
    )
    assert result.notna().all(axis=None)
    rows = ruler_table(result, result, result)
    assert list(rows["num_samples"]) == [3, 3]
    assert rows.drop(columns=["difference", "difference_standard_error"]).notna().all(axis=None)
    assert list(rows["difference"]) == [0, 0]


def gated_hard() -> PreTrainedModel:
    model = gated()
    set_gate_mode(model, "hard")
    return model


def test_questions_do_not_depend_on_the_batch(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """The scores of a round come back in the order in which its questions were drawn."""
    made: list[tuple[str, int, int]] = []

    def make(task: str, length: int, index: int) -> object:
        made.append((task, length, index))
        if length == 400 and index == 1:
            return None  # does not fit
        return make_sample(task, 0, index, length, tiny_tokenizer)

    cells: Sequence[tuple[str, int]] = [("niah_single_1", 400), ("niah_single_1", 500)]
    rounds = QuestionRounds(cells, make, tiny_tokenizer, number=20, seed=1, identity="")  # type: ignore[arg-type]
    measured = rounds.measure(0, tiny_model(vocab_size=300, max_position_embeddings=1024), {})
    assert len(measured) == 16
    assert (measured == -1.0).sum() == 1
    assert len(rounds.scores([measured])) == 15
    drawn = set(made)
    assert len({question[:2] for question in drawn}) == 2
    more = QuestionRounds(cells, make, tiny_tokenizer, number=40, seed=1, identity="")  # type: ignore[arg-type]
    assert (more.identity, more.num_rounds, rounds.num_rounds) == (rounds.identity, 3, 2)
    assert more._questions[:32] == rounds._questions
    assert len(rounds.scores([np.ones(16)] * 2)) == 20
    assert all((task, length, index - 1) in drawn for task, length, index in drawn if index)


@pytest.mark.filterwarnings("ignore:sequences of")  # the checkpoint has 128 positions
class TestCommand:
    @pytest.mark.slow
    def test_scores_of_two_checkpoints(
        self,
        checkpoint: Path,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        save(hybrid(), tiny_tokenizer, tmp_path / "hybrid")
        workspace = tmp_path / "w"
        options = ["--model", checkpoint, "--lengths", "512,600", "--tasks", "vt", "--samples", 2]
        command = [
            "evaluate",
            "ruler",
            *map(str, options),
            "--against",
            str(tmp_path / "hybrid"),
            "-w",
            str(workspace),
        ]
        main(command)
        output = " ".join(capsys.readouterr().out.split())
        assert "average of 1" in output
        assert "ruler.csv" in output
        folder = workspace / "reports" / "mine"
        rows = pd.read_csv(folder / "ruler.csv")
        assert list(rows.columns) == RULER.header
        assert list(rows["task"]) == ["vt", "average of 1"] * 2
        assert list(rows["length"]) == [512] * 2 + [600] * 2
        assert rows["density"].between(0.05, 0.95).all()
        assert list(rows["against_density"]) == pytest.approx([3 / 8] * 4)
        origin = yaml.safe_load((folder / "ruler.yaml").read_text())
        assert origin["model"] == str(checkpoint)
        assert origin["against"]["model"] == str(tmp_path / "hybrid")
        recorded = (
            "tau",
            "floor_window",
            "haystack",
            "questions",
            "seed",
            "samples",
            "samples_version",
        )
        settings = {key: origin[key] for key in recorded}
        assert settings == {
            "tau": 0.4,
            "floor_window": 6,
            "haystack": "RULER's noise",
            "questions": [],
            "seed": 0,
            "samples": 2,
            "samples_version": 2,
        }
        kept = sorted((workspace / "runs" / "mine" / "ruler").iterdir())
        assert [file.name[:6] for file in kept] == ["vt-512"] * 3 + ["vt-600"] * 3
        line = json.loads(kept[0].read_text().splitlines()[1])
        assert set(line) == {"index", "question", "answers", "output", "score", "density"}
        monkeypatch.setattr(ruler.generation, "continue_greedily", None)
        main(command)  # asks nothing again
        assert pd.read_csv(folder / "ruler.csv").equals(rows)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--lengths", "512,x"], "'x'"),
            (["--lengths", "512", "--tasks", "vt,other"], "unknown RULER task 'other'"),
            (["--lengths", "512", "--tasks", "qa_2"], "give --qa FILE.json in HotpotQA format"),
            (["--lengths", "512", "--context", "64"], "No such option: --context"),
            (["--lengths", "512", "--tau", "2"], "--tau must lie in [0, 1]"),
            (["--lengths", "100", "--tasks", "vt"], "vt needs at least"),
            (["--lengths", "512", "--qa", "gone.json"], "questions not found: gone.json"),
            (["--samples", "5"], "Missing option '--lengths'"),
        ],
    )
    def test_invalid_options(
        self,
        options: list[str],
        message: str,
        checkpoint: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert message in fails(
            capsys, "evaluate", "ruler", "--model", checkpoint, *options, "-w", tmp_path / "w"
        )

    def test_a_pair_needs_one_tokenizer(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save(hybrid(), train_bpe(["another text entirely"] * 3, 270), tmp_path / "other")
        options = [
            "--lengths",
            "512",
            "--tasks",
            "vt",
            "--samples",
            "1",
            "--against",
            tmp_path / "other",
        ]
        message = fails(
            capsys, "evaluate", "ruler", "--model", checkpoint, *options, "-w", tmp_path / "w"
        )
        assert "has a different tokenizer" in message
