"""Test that undefined figures are marked or left out, and that messages name the problem and the remedy."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import fails, make_domain_table, make_table, tiny_model
from scipy.stats import binomtest
from transformers import PreTrainedTokenizerBase

from spkv_nas.base.errors import first_line
from spkv_nas.base.statistics import mean_and_error, share_interval, share_text
from spkv_nas.cli import main
from spkv_nas.cli.app import name_each
from spkv_nas.data.sources import LeftOut, documents
from spkv_nas.model.checkpoint import save
from spkv_nas.model.generation import Generation
from spkv_nas.report.density_charts import domain_chart
from spkv_nas.stages.generate import show as show_generation
from spkv_nas.stages.probe import show as show_probe

OutputOf = Callable[..., str]


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Checkpoint of a dense model with 128 positions."""
    save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str]) -> OutputOf:
    """Run a command; all that it prints, in one line."""

    def run(*arguments: str | Path) -> str:
        main([str(a) for a in arguments])
        return " ".join(" ".join(capsys.readouterr()).split())

    return run


class TestFigures:
    @pytest.mark.parametrize("number", [2, 5, 100])
    def test_equal_samples_have_an_interval(self, number: int) -> None:
        """Five equal samples do not give an error of 0."""
        for share in (0.0, 1.0):
            mean, error = mean_and_error(np.full(number, share))
            exact = binomtest(int(share * number), number).proportion_ci(0.95, method="exact")
            assert share_interval(mean, error) == pytest.approx((exact.low, exact.high))
        difference, error = mean_and_error(np.zeros(number))
        assert difference == 0.0
        assert error > 0.0

    def test_other_samples_have_the_error_of_their_mean(self) -> None:
        values = np.array([1.0, 0.5, 0.0, 1.0])
        assert mean_and_error(values) == pytest.approx((0.625, values.std(ddof=1) / 2))
        assert share_interval(*mean_and_error(values)) is None
        assert np.isnan(mean_and_error(np.ones(1))[1])
        assert mean_and_error(np.full(4, 37.0)) == (37.0, 0.0)  # no share

    def test_how_shares_are_written(self) -> None:
        assert share_text(*mean_and_error(np.ones(5))) == "1.000 (0.478 to 1)"
        assert share_text(*mean_and_error(np.zeros(100))) == "0.000 (0 to 0.0362)"
        assert share_text(0.8421, 0.0361) == "0.842 ± 0.036"
        assert share_text(1.0, float("nan")) == "1.000 ± -"

    def test_a_plan_omits_times_below_launch_overhead(
        self, checkpoint: Path, output_of: OutputOf
    ) -> None:
        """Contexts beyond the model's positions are omitted, too."""
        shown = output_of("plan", checkpoint, "--hardware", "h100")
        assert "< 1 s" in shown
        assert " ms" not in shown.replace("at least 1 ms", "").replace("< 1 ms", "")
        assert "generate at 128 " in shown
        assert "max_position_embeddings" not in shown

    def test_a_context_beyond_the_positions_is_marked(
        self, checkpoint: Path, output_of: OutputOf
    ) -> None:
        for command in (
            ("plan", checkpoint, "--hardware", "h100"),
            ("plan", checkpoint, "--engine", "vllm"),
            ("plan", "attention", "--model", checkpoint),
        ):
            shown = output_of(*command, "--context", "2k")
            assert "the model supports 128 tokens (max_position_embeddings)" in shown
            assert "2,048" in shown
            assert "max_position_embeddings" not in output_of(*command)
        assert "128 tokens" in output_of("plan", "attention", "--model", checkpoint)
        assert "131,072 tokens" in output_of("plan", "attention", "level-8")

    def test_a_cache_larger_than_full_attentions_says_why(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for held, reason in ((254, True), (40, False)):
            show_generation(Generation("", 3, 5, 0.1, 0.1, held, 100, None, None))
            assert ("so short a text does not fill" in capsys.readouterr().err) == reason

    def test_domains_with_little_text_are_marked(self, capsys: pytest.CaptureFixture[str]) -> None:
        """One domain has 272 tokens, the other 64,763."""
        table = make_domain_table(("code", "docs"))
        for small, drawn in ((1024, ("code", "docs")), (272, ("code",))):
            table.rows["num_tokens"] = np.where(table.rows["domain"] == "docs", small, 64_763)
            chart = domain_chart(table)
            assert sum(mark.shape == "stroke" for mark in chart.marks) == len(drawn)  # type: ignore[union-attr]
            assert ("docs (272 tokens)" in chart.note) == (len(drawn) == 1)
            show_probe(table)
            assert ("docs (272 tokens)" in " ".join("".join(capsys.readouterr()).split())) == (
                len(drawn) == 1
            )


class TestProposal:
    @pytest.fixture
    def table(self, tmp_path: Path) -> Path:
        """Table of 2 layers x 4 KV heads, three of them equal, without a window."""
        rows = zip(
            np.repeat((0, 1), 4),
            (0, 1, 2, 3) * 2,
            (0.9, 0.5, 0.5, 0.5, 0.1, 0.2, 0.05, 0.01),
            strict=True,
        )
        file = tmp_path / "mine.csv"
        file.write_text("layer,kv_head,density\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
        return file

    def test_undecided_heads_are_reported(
        self, table: Path, tmp_path: Path, output_of: OutputOf
    ) -> None:
        propose = ("propose", "--probe", table, "-w", tmp_path / "w")
        shown = output_of(*propose, "--budget", "3")
        assert "3 heads are tied at a score of 0.5, and the budget includes only 2 of them" in shown
        assert "'mine' does not record a window: using 128 tokens" in shown
        assert (
            "these layouts do not have 3 global heads: interleaved-first (4), interleaved-last (4)"
            in shown
        )
        assert shown.index("sparsest") < shown.index("interleaved-first")
        shown = output_of(*propose, "--budget", "4", "--window", "16")
        assert "tied" not in shown
        assert "window" not in shown
        assert "global heads:" not in shown

    def test_a_table_reports_its_window(self, tmp_path: Path, output_of: OutputOf) -> None:
        make_table(np.arange(8.0).reshape(2, 4) / 10).write(tmp_path / "w" / "probes" / "p")
        shown = output_of("propose", "-w", tmp_path / "w", "--budget", "4")
        assert "does not record a window" not in shown
        assert "tied" not in shown


class TestText:
    def test_several_files_may_follow_one_option(
        self, checkpoint: Path, text: Path, tmp_path: Path, output_of: OutputOf
    ) -> None:
        """A shell expands ``--data corpus/*.txt`` to them."""
        evaluate = ("evaluate", "--model", checkpoint, "--context", "32", "-w", tmp_path / "w")
        shown = output_of(*evaluate, "--data", *sorted(text.glob("*.txt")), "--name", "several")
        measured = [part.split(";")[0] for part in re.findall(r"NLL \d.*", shown)]
        again = output_of(*evaluate, "--data", text, "--name", "folder")
        assert measured == [part.split(";")[0] for part in re.findall(r"NLL \d.*", again)] != []

    def test_which_words_follow(self) -> None:
        meant = {  # by what is written
            "probe --data a b --window 8 c": "probe --data a --data b --window 8 c",
            "probe --data a r.yaml": "probe --data a r.yaml",
            "score --data a b l.yaml m.yaml": "score --data a --data b l.yaml m.yaml",
            "evaluate --haystack a b --qa c d -q": "evaluate --haystack a --haystack b --qa c --qa d -q",
            "layout show --probe p x.yaml y": "layout show --probe p x.yaml y",
            "generate --file a b": "generate --file a b",
            "probe --data a -- b --data c d": "probe --data a -- b --data c d",
            "probe --data": "probe --data",
        }
        assert {line: " ".join(name_each(line.split())) for line in meant} == meant

    def test_dropped_documents_are_counted(
        self, checkpoint: Path, tmp_path: Path, output_of: OutputOf
    ) -> None:
        lines = [f"word{number % 179}" for number in range(300)] + ["", "  "]
        (tmp_path / "short.jsonl").write_text(
            "".join(json.dumps({"text": line}) + "\n" for line in lines)
        )
        left_out = LeftOut()
        assert (
            len(list(documents([str(tmp_path / "short.jsonl")], Path(), left_out=left_out))) == 179
        )
        assert left_out == LeftOut(empty=2, repeated=121, read=302)
        where = ("--data", tmp_path / "short.jsonl", "--context", "16", "-w", tmp_path / "w")
        for _ in range(2):  # also of blocks that are there already
            shown = output_of("evaluate", "--model", checkpoint, *where)
            assert "302 documents were read" in shown
            assert "121 repeat an earlier one, 2 are empty" in shown
        assert LeftOut(repeated=4, read=100).notes() == []

    def test_a_missing_field_lists_the_existing_ones(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The message names the fields, and where to name one: in the option and in a recipe."""
        (tmp_path / "rows.jsonl").write_text('{"content": "some text"}\n')
        options = ("--model", checkpoint, "--data", tmp_path / "rows.jsonl", "--context", "16")
        message = fails(capsys, "evaluate", *options)
        assert "its fields: content" in message
        assert "--data PATH:column=FIELD" in message
        assert "recipe's data.sources, add text_field: FIELD" in message


class TestErrors:
    def test_baselines_blame_the_limit_for_one_document(
        self, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        command = (
            "evaluate",
            "baselines",
            "--model",
            checkpoint,
            "--data",
            text,
            "--context",
            "32",
            "-w",
            tmp_path / "w",
        )
        message = fails(capsys, *command, "--max-tokens", "32")
        assert "--max-tokens 32 keeps 32 tokens, all of a single document" in message
        assert "give a larger --max-tokens" in message
        for file in sorted(text.glob("*.txt"))[1:]:
            file.unlink()
        assert "the text is one document" in fails(capsys, *command)

    def test_a_missing_tokenizer_is_named(
        self, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bare = tmp_path / "bare"
        shutil.copytree(
            checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer*", "spkv-manifest.json")
        )
        message = fails(capsys, "evaluate", "--model", bare, "--data", text, "-w", tmp_path / "w")
        assert f"model {bare} has no tokenizer" in message
        assert "copy the tokenizer files" in message

    def test_an_error_that_introduces_a_list_has_it(self) -> None:
        assert (
            first_line(ValueError("one of:\n(1) a file,\n(2) another\n\nmore"))
            == "one of: (1) a file, (2) another"
        )
        assert first_line(ValueError("one line\nanother")) == "one line"
        assert first_line(ValueError("a list:")) == "a list:"
        assert first_line(ValueError()) == "ValueError"
        assert first_line(KeyError("key")) == "KeyError: 'key'"
