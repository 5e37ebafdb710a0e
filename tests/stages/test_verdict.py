"""Test the command ``verdict``: its answers and exit codes, what it refuses, and that it resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fails, tiny_model
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import VERDICT
from spkv_nas.artifacts.selection import write_selection
from spkv_nas.base.errors import UserError
from spkv_nas.base.records import write_record
from spkv_nas.cli import main
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.tokenizer import SeparateDocuments
from spkv_nas.evaluation.verdict.criteria import DocumentRounds
from spkv_nas.model.checkpoint import save
from spkv_nas.model.windows import apply_layout
from spkv_nas.proposal.coverage import provenance
from spkv_nas.stages import decision
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.verdict import VerdictOptions
from spkv_nas.stages.probe import probe
from spkv_nas.stages.verdict import VerdictResult, document
from spkv_nas.stages.verdict import run as verdict


@pytest.fixture
def folder(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Write a dense model, a much worse one, a text of 60 documents, and layouts; make it the current folder."""
    monkeypatch.chdir(tmp_path)
    model = tiny_model(vocab_size=300)
    save(model, tiny_tokenizer, Path("dense"))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30.0)
    save(model, tiny_tokenizer, Path("worse"))
    for name in ("text", "other"):
        Path(name).mkdir()
        for number in range(60):
            words = " ".join(f"{name}{(number * word) % 17} returns" for word in range(4))
            Path(name, f"{number}.txt").write_text(f"document {number}: {words}\n")
    Layout(("GG",) * 4, window=4, strategy="full").write("full.yaml")
    Layout(("GL",) * 4, window=4, strategy="mixed").write("mixed.yaml")
    return tmp_path


def run(*candidates: str, **options: Any) -> VerdictResult:
    options = {"model": "dense", "data": ["text"], "context": "32"} | options
    return verdict(VerdictOptions(candidates=[*candidates], **options)).value


class TestAnswers:
    def test_full_attention_passes_at_the_smallest_margin(self, folder: Path) -> None:
        # Of which every document fits into one
        result = run("full.yaml", margin="nll=0.001%", context="64")
        assert result.answers == {"full": "passes"}
        assert result.answer == "passes"
        (row,) = result.rows.to_dict("records")
        assert abs(row["loss"]) < 1e-3
        assert row["high"] < 0.001
        assert row["num_samples"] < 60

    def test_a_candidate_is_judged_once(self, folder: Path) -> None:
        Layout(("GG",) * 4, window=4, strategy="again").write("again.yaml")
        result = run("full.yaml", "again.yaml", "full.yaml", margin="nll=0.001%")
        assert result.answers == {"full": "passes"}

    @pytest.mark.slow
    def test_more_questions_continue_after_the_first(
        self, folder: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Continue stored rounds with another number of questions, and give the answer of a new workspace."""
        save(tiny_model(vocab_size=300, max_position_embeddings=1024), tiny_tokenizer, Path("long"))
        margin = "ruler=1:lengths=400:tasks=niah_single_1:questions="
        long = {"model": "long", "data": None}
        for number in (20, 40):
            run("mixed.yaml", **long, margin=f"{margin}{number}")
        first = run("mixed.yaml", "full.yaml", **long, margin=f"{margin}40").rows
        anew = run(
            "mixed.yaml", "full.yaml", **long, margin=f"{margin}40", workspace=Path("anew")
        ).rows
        assert first.equals(anew)
        assert set(first["num_samples"]) == {40}

    def test_a_worse_model_fails(self, folder: Path) -> None:
        result = run("worse")
        assert result.answers == {"worse": "fails"}
        assert result.rows["low"].item() > 1.0

    def test_another_batch_size_changes_nothing(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = run("mixed.yaml", name="eight")
        measure = DocumentRounds.measure_all

        def in_threes(self: DocumentRounds, *arguments: Any) -> Any:
            self.batch_size = 3
            return measure(self, *arguments)

        monkeypatch.setattr(DocumentRounds, "measure_all", in_threes)
        second = run("mixed.yaml", name="three")
        assert second.answers == first.answers
        assert second.rows["loss"].item() == pytest.approx(first.rows["loss"].item(), abs=1e-5)

    def test_too_few_documents_leave_it_open(self, folder: Path) -> None:
        result = run("mixed.yaml", max_tokens=320)
        assert result.answers == {"mixed": "open"}
        assert result.rows["num_samples"].item() < 20

    @pytest.mark.slow
    def test_generated_answers(self, folder: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        save(
            tiny_model(vocab_size=300, max_position_embeddings=512), tiny_tokenizer, folder / "long"
        )
        margin = "ruler=40:lengths=400:tasks=niah_single_1:questions=32"
        result = run("full.yaml", model="long", data=None, margin=margin)
        assert result.compared.num_left_out is None, "no text judges"
        (row,) = result.rows.to_dict("records")
        assert (row["criterion"], row["answer"], row["loss"], row["unit"]) == (
            "ruler",
            "passes",
            0.0,
            "points",
        )


class TestCommand:
    def test_exit_codes_and_document(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = ["--against", "dense", "--data", "text", "--context", "32"]
        with pytest.raises(SystemExit) as failed:
            main(["verdict", "worse", *text, "--json"])
        assert failed.value.code == 1
        document = json.loads(capsys.readouterr().out)
        assert document["answer"] == "fails"
        assert document["criteria"][0]["more_samples"] is None
        assert "fails: its loss is above 1 % (nll)" in document["sentences"][0]
        with pytest.raises(SystemExit) as undecided:
            main(["verdict", "mixed.yaml", *text, "--max-tokens", "320"])
        assert undecided.value.code == 3
        assert "mixed is open" in capsys.readouterr().out
        main(["verdict", "full.yaml", "worse", *text])
        shown = " ".join(capsys.readouterr().out.split())
        assert "full passes" in shown
        assert "worse fails" in shown
        assert "for all 2 candidates together (Holm)" in shown

    def test_the_table_is_read_back(self, folder: Path) -> None:
        result = run("mixed.yaml", "worse")
        read = VERDICT.read(result.folder)
        assert read is not None
        assert read[0]["candidate"].tolist() == ["mixed", "worse"]
        assert read[1]["answers"]["worse"] == "fails"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"margin": "nll=0"}, "above 0 and below 100"),
            ({"margin": "nll"}, "above 0 and below 100"),
            ({"margin": "speed=1"}, "unknown criterion 'speed'; expected one of nll, "),
            ({"margin": "nll=1,nll=2"}, "two margins"),
            ({"margin": "nll=1:length=2"}, "criterion nll takes no options"),
            ({"margin": "ruler=2"}, "needs lengths"),
            (
                {"margin": "ruler=2:length=4k"},
                "criterion ruler has no option 'length'; it has lengths, tasks, ",
            ),
            ({"margin": "ruler=2:lengths=4k:questions=0"}, "questions=0: it must be at least 1"),
            (
                {"margin": "ruler=2:lengths=4k:questions=few"},
                "questions=few: Input should be a valid integer",
            ),
            ({"risk": "60%"}, "up to 50%"),
            ({"data": None}, "--against needs --data"),
        ],
    )
    def test_mistakes(self, folder: Path, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            run("full.yaml", **options)

    def test_a_missing_layout(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "layout not found: none.yaml" in fails(
            capsys, "verdict", "none.yaml", "--against", "dense", "--data", "text"
        )


class TestResuming:
    def test_a_killed_verdict_gives_the_same_bytes(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = run("mixed.yaml", margin="nll=0.5%", workspace=Path("whole"))
        measure, calls = DocumentRounds.measure_all, []

        def killed(self: DocumentRounds, index: int, *arguments: Any) -> Any:
            calls.append(index)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return measure(self, index, *arguments)

        monkeypatch.setattr(DocumentRounds, "measure_all", killed)
        with pytest.raises(KeyboardInterrupt):
            run("mixed.yaml", margin="nll=0.5%", workspace=Path("killed"))
        resumed = run("mixed.yaml", margin="nll=0.5%", workspace=Path("killed"))
        assert (resumed.folder / "verdict.csv").read_bytes() == (
            whole.folder / "verdict.csv"
        ).read_bytes()
        number = len(calls)
        run("mixed.yaml", margin="nll=0.5%", workspace=Path("killed"))
        assert len(calls) == number, "finished rounds are measured again"


class TestChoice:
    """Documents that a layout was selected on are never used for its verdict."""

    def chosen(self, data: str, file: str = "chosen.yaml", row: str = "GL", **options: Any) -> str:
        """Write a layout that was selected by a probe on a text, and return its file."""
        options = {"context": "32", "signal": "attention-mass", "name": "mine", **options}
        table = probe(ProbeOptions(model="dense", data=[data], **options))
        layout = Layout((row,) * 4, window=4, strategy="chosen")
        replace(layout, provenance=provenance(table, layout, 1)).write(file)
        return file

    def test_the_text_of_the_probe_is_refused(self, folder: Path) -> None:
        layout = self.chosen("text")
        with pytest.raises(UserError, match=r"all 60 documents .* select a layout \(probe mine\)"):
            run(layout)

    def test_shared_documents_are_left_out(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The text is read as that of the probe, whose documents are separate."""
        layout = self.chosen("text", documents="separate", separator="eos")
        read: list[TokenBlocks] = []
        original = decision.text_in_random_order
        monkeypatch.setattr(
            decision,
            "text_in_random_order",
            lambda x, **more: original(read.append(x) or x, **more),
        )
        result = run(layout, data=["text", "other"])
        assert isinstance(read[0].boundaries, SeparateDocuments)
        with pytest.raises(UserError, match="different separators or documents"):
            run(
                layout,
                self.chosen("text", "joined.yaml", "LG", name="joined"),
                data=["text", "other"],
            )
        assert result.compared.num_left_out == 60
        assert result.rows["num_samples"].item() <= 60
        assert not result.compared.selected.unknown

    def test_score_says_how_many_documents_were_used(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        layout = self.chosen("text")
        for data, sentence in (
            ("text", "60 of these documents were used to select a layout (probe mine)"),
            ("other", None),
        ):
            main(["score", layout, "--model", "dense", "--data", data, "--context", "32"])
            printed = " ".join(capsys.readouterr().out.split())
            assert "used to select" not in printed if sentence is None else sentence in printed

    @pytest.mark.slow
    def test_pieces_of_a_text_are_known_by_the_text(self, folder: Path) -> None:
        """Fewer than twenty documents are cut into pieces, and more are not, so that pieces differ from documents."""
        for name, number in (("few", 5), ("many", 30)):
            Path(name).mkdir()
            for index in range(number):
                words = " ".join(f"{name}{(index * word) % 23} returns" for word in range(300))
                Path(name, f"{index}.txt").write_text(f"document {index}: {words}\n")
        layout = self.chosen("few")
        with pytest.raises(
            UserError, match=r"documents of the text were used to select a layout \(probe mine"
        ):
            run(layout, data=["few"])
        result = run(layout, data=["few", "many"], max_tokens=2048)
        assert result.compared.num_left_out == 5

    @pytest.mark.slow
    def test_a_checkpoint_has_the_choice_of_its_layout(
        self,
        folder: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """A hybrid's config names no probe, but the workspace has its layout."""
        layout = Layout.read(self.chosen("text"))
        (folder / "layouts" / "mine").mkdir(parents=True)
        layout.write(folder / "layouts" / "mine" / "chosen.yaml")
        model = tiny_model(vocab_size=300)
        apply_layout(model, layout)
        save(model, tiny_tokenizer, folder / "hybrid")
        with pytest.raises(UserError, match=r"all 60 documents .* select a layout \(probe mine\)"):
            run("hybrid")
        main(
            [
                "evaluate",
                "nll",
                "--model",
                "hybrid",
                "--against",
                "dense",
                "--data",
                "text",
                "--context",
                "32",
            ]
        )
        shown = " ".join(capsys.readouterr().out.split())
        assert "60 of these documents were used to select a layout (probe mine)" in shown
        assert "reports/mine/evaluation.csv" in shown  # under the name of the layout's probe

    def test_the_text_of_score_is_refused(self, folder: Path) -> None:
        main(["score", "mixed.yaml", "--model", "dense", "--data", "text", "--context", "32"])
        with pytest.raises(
            UserError,
            match=r"select a layout \(score dense among 1 layout scored on 60 documents\)",
        ):
            run("mixed.yaml")

    @pytest.mark.slow
    def test_the_sentence_says_among_how_many_layouts_it_was_chosen(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(
            [
                "score",
                "mixed.yaml",
                "full.yaml",
                "--model",
                "dense",
                "--data",
                "text",
                "--context",
                "32",
            ]
        )
        sentence = document(run("mixed.yaml", data=["other", "text"]))["sentences"][-1]
        assert (
            "selected by score dense among 2 layouts scored on 60 documents: 60 documents of this text excluded"
            in sentence
        )

    def test_a_search_counts_its_layouts(self, folder: Path) -> None:
        layout, other = Layout.read("mixed.yaml"), Layout.read("full.yaml")
        reports = folder / "reports" / "new"
        selection = write_selection(reports, frozenset(["0" * 16]))
        hashes = (layout.hash, other.hash, layout.hash)  # two samplers found the same layout
        (reports / "search.csv").write_text("\n".join(["hash", *hashes]) + "\n")
        write_record(
            reports / "search.yaml", {"documents": {"chosen_on": 30}, "selection": selection}
        )
        assert list(run("mixed.yaml", data=["other"]).compared.selected.by) == [
            "search new among 2 layouts scored on 30 documents"
        ]

    def test_missing_evidence_is_said(self, folder: Path) -> None:
        """A verdict says "on other text" only if the documents of all that selected the layout are known."""
        layout = self.chosen("text")
        known = document(run(layout, data=["other"]))["sentences"][-1]
        assert known.endswith("selected by probe mine: on other text")
        for file in Path("probes").rglob("selection-*.txt"):
            file.write_text(file.read_text() + "0" * 16)  # damaged
        unknown = document(run(layout, data=["other"]))["sentences"][-1]
        assert unknown.endswith(
            "the documents used to select chosen are not known, so they may be in this text"
        )

    def test_a_layout_without_a_record_is_named(self, folder: Path) -> None:
        assert list(run("mixed.yaml").compared.selected.unknown) == ["mixed"]
