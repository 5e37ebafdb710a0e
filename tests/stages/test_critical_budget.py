"""Test ``critical-budget``: the critical budget of a model on text that it wrote itself, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Page, Recorder, fails, make_table
from sampled_cases import write_model

import spkv_nas
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.measurement import loss_text, measurements
from spkv_nas.artifacts.result_tables import CRITICAL_BUDGET, VERDICT
from spkv_nas.artifacts.selection import read_selection
from spkv_nas.artifacts.tried_layouts import TriedLayout
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.cli import main
from spkv_nas.evaluation.verdict.criteria import DocumentRounds
from spkv_nas.model.checkpoint import load
from spkv_nas.report.formatting import with_minus
from spkv_nas.stages import critical_budget, verdict
from spkv_nas.stages.critical_budget import BudgetResult, document
from spkv_nas.stages.options.critical_budget import CriticalBudgetOptions
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.verdict import VerdictOptions
from spkv_nas.stages.probe import probe

TOKENS = 48  # per document
NUM_HEADS = 8


def write_model_and_text(folder: Path, size: int = TOKENS, decisive: float = 20.0) -> None:
    """Write a model, and a folder of text that it wrote itself."""
    documents = write_model(folder / "dense", size, decisive=decisive)
    (folder / "text").mkdir()
    for number, text in enumerate(documents):
        (folder / "text" / f"{number}.txt").write_text(text)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with model, text, a table that prefers the heads of low layers, and losses of some budgets."""
    folder = tmp_path_factory.mktemp("measured")
    write_model_and_text(folder)
    table = make_table(np.arange(NUM_HEADS, 0, -1.0).reshape(4, 2) / NUM_HEADS)
    replace(table, window=4).write(folder / "probes" / "mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run()
    shutil.rmtree(folder / "reports")
    return folder


@pytest.fixture
def folder(tmp_path: Path, measured: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with the measured one's contents the current one; what it measured is not measured again."""
    monkeypatch.chdir(tmp_path)
    for name in ("dense", "text"):
        Path(name).symlink_to(measured / name)
    for name in ("probes", "runs"):
        shutil.copytree(measured / name, name)
    return tmp_path


def run(reporter: Reporter = SILENT, **options: Any) -> BudgetResult:
    chosen = {
        "budgets": ["1..8"],
        "probe": "mine",
        "model": "dense",
        "data": ["text"],
        "margin": "nll=10%",
    }
    return critical_budget.run(
        CriticalBudgetOptions(**{"context": str(TOKENS)} | chosen | options), reporter
    ).value


class TestAnswer:
    def test_the_critical_budget_and_the_interval_around_it(self, folder: Path) -> None:
        """The losses are 16.5 % with 4 heads, 10.3 % with 5 and 5.0 % with 6; the layout is that of ``propose``."""
        result = run()
        assert (result.fails, result.passes, result.answer) == (4, 6, "passes")
        assert result.answers[5] == "open"
        assert len(result.critical.looks) < NUM_HEADS
        losses = result.rows.sort_values("num_global")["loss"]
        assert (losses.diff().dropna() < 0).all()
        main(["propose", "--probe", "mine", "--budget", str(result.passes)])
        _, record = CRITICAL_BUDGET.read(result.folder) or pytest.fail("no table")
        layout = Layout.read("layouts/p/densest.yaml")
        assert (record["heads"], record["critical_budget"]) == ([*layout.heads], layout.num_global)
        assert layout.num_global == result.passes

    def test_a_ranking_for_another_budget_is_named(self, folder: Path) -> None:
        table = HeadScores.read(folder / "probes" / "mine")
        for learned_for, warnings in ((2, ["'mine' was learned for 2 global heads"]), (5, [])):
            name = f"for-{learned_for}"
            mine = replace(table, name="mine").with_record(budget=learned_for)
            mine.write(Path("probes") / name)
            cautions: list[str] = []
            run(Recorder(cautioned=cautions.append), probe=name)
            assert [line.partition(",")[0] for line in cautions] == warnings

    def test_each_look_halves_the_risk(self, folder: Path) -> None:
        rows = run(risk="8%").rows.set_index("num_global")
        assert rows["passes_level"][4] == pytest.approx(0.04)
        assert rows["passes_level"][6] == pytest.approx(0.02)
        for result, column in (("passes", "p_passes"), ("fails", "p_fails")):
            decided = rows[rows["result"] == result]
            assert len(decided)
            assert (decided[column] <= decided[f"{result}_level"]).all()

    def test_rows_say_what_their_intervals_and_the_answers_say(self, folder: Path) -> None:
        """An end that no bisection asked for is not determined, so no open budget shows a loss below the margin."""
        result = run(margin="nll=12%")
        assert {"passes", "open"} <= set(result.rows["result"])
        for row in result.rows.itertuples():
            assert row.result == row.answer == result.answers[row.num_global]
            assert (row.high <= row.margin) == (row.result == "passes")
            assert (row.low >= row.margin) == (row.result == "fails")

    def test_no_budget_passes(self, folder: Path) -> None:
        result = run(budgets=["1..3"])
        assert (result.passes, result.fails, result.answer) == (None, 3, "fails")
        assert result.memory is None
        assert not result.next

    def test_budgets_that_were_not_looked_at_may_pass(self, folder: Path) -> None:
        result = run(budgets=["1..5"], margin="nll=1%,longppl=99%:short-context=8")
        sentence = document(result)["sentences"][0]
        unseen = [budget for budget in result.budgets if budget not in result.answers]
        assert result.answer == "fails"
        assert unseen
        assert "the loss is above 1 % (nll) or 99 % (longppl)" in sentence
        assert f"; {', '.join(map(str, unseen))} not looked at, so they may pass" in sentence

    def test_too_few_documents_leave_it_open(self, folder: Path) -> None:
        result = run(max_tokens=20 * TOKENS)
        assert (result.passes, result.answer) == (None, "open")

    def test_an_open_criterion_spares_the_others(self, folder: Path) -> None:
        """A budget that is open by one criterion cannot pass by the others."""
        result = run(max_tokens=20 * TOKENS, margin="nll=1%,agreement=50:new-tokens=4")
        assert (result.passes, result.answer) == (None, "open")
        assert set(result.rows["criterion"]) == {"nll"}

    def test_constraints_skip_budgets_with_the_same_layout(self, folder: Path) -> None:
        result = run(budgets=["2..8"], granularity="layer")
        assert list(result.budgets) == [2, 4, 6, 8]
        assert result.file is not None
        assert Layout.read(result.file).is_layerwise

    def test_layouts_from_files(self, folder: Path) -> None:
        """Layouts that ``propose`` writes with constraints, sinks and another window are judged as they are."""
        options = ["--window", "6", "--sinks", "1", "--constraint", "min-per-layer=1"]
        main(["propose", "--probe", "mine", "--budget", "4..8", *options])
        files = sorted(map(str, Path("layouts/p/budgets").glob("*.yaml")))
        result = run(budgets=files)
        assert list(result.budgets) == [4, 5, 6, 7, 8]
        assert result.file is not None
        assert Layout.read(result.file).heads == result.layouts[result.critical.passes or 0].heads
        assert {(layout.window, layout.sinks) for layout in result.layouts} == {(6, 1)}
        assert not result.next


class TestResuming:
    @pytest.mark.slow
    def test_a_killed_command_gives_the_same_bytes_and_measures_nothing_twice(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = run(workspace=folder, name="whole")
        shutil.rmtree("runs/dense/verdict")
        measure, calls = DocumentRounds.measure_all, []

        def killed(self: DocumentRounds, index: int, model: Any, prepared: Any) -> Any:
            calls.append(index)
            if len(calls) == 9:
                raise KeyboardInterrupt
            return measure(self, index, model, prepared)

        monkeypatch.setattr(DocumentRounds, "measure_all", killed)
        with pytest.raises(KeyboardInterrupt):
            run(workspace=folder, name="killed")
        resumed = run(workspace=folder, name="killed")
        number = len(calls)
        again = run(workspace=folder, name="killed")
        assert len(calls) == number
        tables = [
            (each.folder / "critical-budget.csv").read_bytes() for each in (whole, resumed, again)
        ]
        assert tables[0] == tables[1] == tables[2]


class TestChoice:
    def test_documents_of_the_probe_do_not_judge(self, folder: Path) -> None:
        table = probe(
            ProbeOptions(
                model="dense",
                data=["text"],
                context=str(TOKENS),
                signal="attention-mass",
                name="chosen",
            )
        )
        with pytest.raises(
            UserError, match=r"all 200 documents .* select a layout \(probe chosen\)"
        ):
            run(probe=table.name)

    def test_a_table_without_a_record_is_named(self, folder: Path) -> None:
        assert list(run(max_tokens=20 * TOKENS).unrecorded) == ["the layouts of p"]


class TestCommand:
    TEXT = ("--against", "dense", "--data", "text", "--context", str(TOKENS), "--margin", "nll=10%")

    def test_sentences_exit_codes_and_document(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["critical-budget", "1..8", "--probe", "mine", *self.TEXT])
        shown = " ".join(capsys.readouterr().out.split())
        assert (
            "6 of 8 KV heads pass: the loss is below 10 % (nll); 4 are too few; 5 is open" in shown
        )
        assert "for all 8 budgets together, of which" in shown
        with pytest.raises(SystemExit) as failed:
            main(["critical-budget", "1..3", "--probe", "mine", *self.TEXT, "--json"])
        assert failed.value.code == 1
        document = json.loads(capsys.readouterr().out)
        assert (document["answer"], document["largest_failing"]) == ("fails", 3)
        with pytest.raises(SystemExit) as undecided:
            main(["critical-budget", "5", "--probe", "mine", *self.TEXT])
        assert undecided.value.code == 3

    def test_memory(self, folder: Path) -> None:
        keys = run(context="64").memory
        assert keys is not None
        head = 2 * 8 * 4 * 64  # bytes of keys and values, head dimension 8, float32
        assert keys.full == NUM_HEADS * head
        assert keys.used == 6 * head + 2 * head * 4 // 64
        assert keys.sentence.startswith(
            "24.50 KiB of keys and values at 64 tokens x 1, head dimension 8, float32"
        )
        served = run(context="64", engine="vllm").memory
        assert served is not None
        assert "in vLLM 0.32 at 64 tokens x 1" in served.sentence
        assert "7 global heads take no more memory there than 6" in served.sentence
        assert served.used != keys.used

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("", "Missing argument"),
            ("4 none.yaml", "layout not found: none.yaml"),
            ("4 dense.yaml", "give either budgets or layout files"),
            ("8..1", "descending"),
            ("1..9", "the model has 8 KV heads"),
            ("1..8 --engine sglang", "unknown engine 'sglang'; expected one of vllm"),
            ("1..8 --engine vllm:pages=16", "engine vllm has no setting 'pages'"),
        ],
    )
    def test_mistakes(
        self, folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
    ) -> None:
        text = ["--against", "dense", "--data", "text", "--context", str(TOKENS)]
        Layout(("GG",) * 4, window=4).write("dense.yaml")
        assert message in fails(capsys, "critical-budget", *arguments.split(), *text)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a model and documents of 96 tokens."""
    folder = tmp_path_factory.mktemp("written")
    write_model_and_text(folder, 96, decisive=25.0)
    return folder


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the page out, which takes half of the time of ``auto``."""
    monkeypatch.setattr(
        "spkv_nas.stages.report.write_report", lambda folder, *_, **__: folder / "index.html"
    )


class TestAuto:
    """The tiny model loses much with any local head, so the margin is wide."""

    @pytest.fixture
    def folder(self, tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Make a folder with the model and the text the current one."""
        monkeypatch.chdir(tmp_path)
        for name in ("dense", "text"):
            Path(name).symlink_to(written / name)
        return tmp_path

    COMMAND = ("auto", "dense", "text", "--out", "hybrid", "--context", "96", "--margin", "nll=30%")

    def test_finds_the_smallest_memory_and_writes_the_hybrid(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([*self.COMMAND, "--memory", "20%..80%"])
        lines = capsys.readouterr().out.splitlines()
        rows, record = CRITICAL_BUDGET.read(Path("reports/dense-window-costs")) or pytest.fail(
            "no table"
        )
        assert set(rows.loc[rows["memory"] == record["critical_budget"], "result"]) == {"passes"}
        layout = Layout.read("layouts/dense-window-costs/critical-budget.yaml")
        assert Layout.read("hybrid/layout.yaml") == layout
        assert lines[-6].startswith(
            f"dense: {layout.num_global} of 8 KV heads global, {layout.reach}"
        )
        assert lines[-4].endswith("; passes 30 % (nll) at a risk of 5 %")
        assert lines[-3].startswith("KL divergence 0.")
        assert Path(lines[-2].rpartition("report: ")[2]).is_file()
        # Documents that chose the layout did not judge it
        assert 0 < record["left_out"]["documents"] < 100
        assert record["left_out"]["selected_by"] == [
            "probe dense-window-costs",
            "the comparison of layouts of each budget",
        ]
        # Every budget that was looked at takes the layout that lost least on other documents again
        contests = {float(memory): rows for memory, rows in record["contests"].items()}
        assert contests.keys() == set(rows["memory"])
        tried = [TriedLayout.parse(row) for row in contests[record["critical_budget"]]]
        finalists = [row for row in tried if row.blocks == tried[0].blocks]
        assert layout.content in {row.layout.content for row in finalists}
        probed = HeadScores.read("probes/dense-window-costs").selected_on
        chosen_on = read_selection(
            layout.provenance["selection"], [Path("layouts/dense-window-costs")]
        )
        assert probed is not None
        assert chosen_on is not None
        assert probed < chosen_on
        assert record["left_out"]["documents"] == len(chosen_on)

    @pytest.mark.usefixtures("no_page")
    def test_head_gates_of_an_earlier_probe_choose_rivals(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = ["--data", "text", "--context", "96", "--max-tokens", "1920"]
        main(
            [
                "probe",
                "--model",
                "dense",
                *text,
                "--signal",
                "head-gates",
                "--budget",
                "4",
                "--steps",
                "2",
            ]
        )
        main([*self.COMMAND, "--memory", "50%"])
        assert (
            "layouts by the head gates of probe 'dense-head-gates' are compared"
            in capsys.readouterr().err
        )
        _, record = CRITICAL_BUDGET.read(Path("reports/dense-window-costs")) or pytest.fail(
            "no table"
        )
        assert any(row["name"].startswith("head-gates-") for row in record["contests"]["50"])
        # No document that ranked the gates compares layouts, or decides
        layout = Layout.read("layouts/dense-window-costs/critical-budget.yaml")
        chosen_on = read_selection(
            layout.provenance["selection"], [Path("layouts/dense-window-costs")]
        )
        ranked_on = HeadScores.read("probes/dense-head-gates").selected_on
        assert ranked_on
        assert chosen_on is not None
        assert ranked_on < chosen_on

    @pytest.mark.usefixtures("no_page")
    def test_memory_in_bytes_is_that_of_a_batch(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # Bytes of 4 sequences of 96 tokens, head dimension 8, float32
        whole = 4 * NUM_HEADS * 2 * 8 * 4 * 96
        main([*self.COMMAND, "--batch", "4", "--memory", f"{whole * 6 // 10}"])
        rows, _ = CRITICAL_BUDGET.read(Path("reports/dense-window-costs")) or pytest.fail(
            "no table"
        )
        assert rows["memory"].unique().tolist() == [59.99]
        assert 0.5 * whole < rows["kv_bytes"].max() <= 0.6 * whole
        assert "96 tokens x 4" in " ".join(capsys.readouterr().out.split())
        # Refused before anything is measured
        told = fails(
            capsys, *self.COMMAND, "--batch", "4", "--memory", str(whole), "--workspace", "other"
        )
        assert "holds the whole KV cache of full attention, 192.00 KiB" in told
        assert not Path("other/probes").exists()

    @pytest.mark.slow
    def test_an_interrupted_run_resumes_to_the_same_files(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        main([*self.COMMAND])
        whole = contents()
        for name in ("hybrid", "probes/dense-window-costs", "layouts", "reports", "runs"):
            shutil.rmtree(name)

        for name in (
            "probing.measure.measure_signal",
            "evaluation.verdict.trial.Trial.rows",
            "stages.export.export",
        ):
            with monkeypatch.context() as patch:
                patch.setattr(f"spkv_nas.{name}", interrupt)
                with pytest.raises(SystemExit):
                    main([*self.COMMAND])
        with monkeypatch.context() as patch:
            patch.setattr("spkv_nas.probing.measure.measure_signal", interrupt)  # it was measured
            main([*self.COMMAND])
        assert contents() == whole

    @pytest.mark.slow
    def test_two_runs_in_one_workspace_are_kept_apart(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """After a run of another margin, one sentence of the page had numbers of three candidates of two runs."""
        few = ("--context", "96", "--memory", "40%,60%,80%")
        printed = {}
        for margin in ("30", "60"):
            main(
                [*self.COMMAND[:3], "--out", f"hybrid-{margin}", *few, "--margin", f"nll={margin}%"]
            )
            printed[margin] = capsys.readouterr().out
        # The same run again replaces itself: it leaves out the documents that the first left out, and no others
        main([*self.COMMAND[:3], "--out", "again", *few, "--margin", "nll=60%"])
        assert Path("again/layout.yaml").read_bytes() == Path("hybrid-60/layout.yaml").read_bytes()
        # The first result and its layout are there under the hash of its inputs
        reports, layouts = Path("reports/dense-window-costs"), Path("layouts/dense-window-costs")
        (kept,) = reports.glob("critical-budget-*.csv")
        (kept_layout,) = (layouts / "earlier").iterdir()
        assert kept_layout.stem == kept.stem
        # Every sentence on the chosen layout is one row of its own table
        page = Page((reports / "index.html").read_text(encoding="utf-8"))
        shown = " ".join(text for texts in page.texts.values() for text in texts).replace(
            "\N{NO-BREAK SPACE}", " "
        )
        files = {
            "30": (kept, kept_layout),
            "60": (reports / "critical-budget.csv", layouts / "critical-budget.yaml"),
        }
        chosen = {}
        left_out: list[Any] = []
        for margin, (file, layout_file) in files.items():
            rows, record = replace(CRITICAL_BUDGET, name=file.stem).read(reports) or pytest.fail(
                "no table"
            )
            (chosen[margin],) = measurements(
                rows[rows["memory"] == record["critical_budget"]], record
            )
            sentence = f"nll {chosen[margin].finding}; {chosen[margin].conclusion}"
            assert sentence in printed[margin]
            assert f"passes {margin} % (nll)" in chosen[margin].conclusion
            layout = Layout.read(layout_file)
            assert layout == Layout.read(f"hybrid-{margin}/layout.yaml")
            assert layout.provenance["critical_budget"] == record["inputs"]
            left_out.append(record["left_out"])
            assert (
                layout.strategy
                == chosen[margin].candidate
                == f"window-per-head-{record['critical_budget']:g}"
            )
            card = Path(f"hybrid-{margin}/README.md").read_text()
            assert f"a loss of {with_minus(chosen[margin].finding)}" in card
            assert chosen[margin].conclusion in card
        # Both compared layouts of one budget on the same documents, so that no run uses up the text of the next
        assert left_out[0] == left_out[1]
        lead = page.texts["p"][0].replace("\N{NO-BREAK SPACE}", " ")
        assert lead.endswith(with_minus(f"nll {chosen['60'].finding}; {chosen['60'].conclusion}."))
        # No loss stands beside a number of documents that it was not measured on
        every = [
            each
            for file, _ in files.values()
            for each in measurements(
                *(replace(CRITICAL_BUDGET, name=file.stem).read(reports) or pytest.fail("none"))
            )
        ]
        pairs = {(with_minus(loss_text(each.loss)), str(each.num_samples)) for each in every}
        found = re.findall(r"nll ([+\N{MINUS SIGN}][\d.]+) %[^;]*?, on (\d+) documents", shown)
        assert found
        assert set(found) <= pairs

    @pytest.mark.usefixtures("no_page")
    def test_a_number_of_heads_and_its_finished_folder(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A finished folder is kept if it is of the same command, and not if it is damaged."""
        command = [*self.COMMAND, "--budget", "6"]
        main(command)
        layout = Layout.read("hybrid/layout.yaml")
        assert (layout.num_global, layout.windows) == (6, {})
        assert "dense: 6 of 8 KV heads global, window" in capsys.readouterr().out
        main(command)
        assert "hybrid holds this hybrid already" in capsys.readouterr().err
        # For another engine, the same layout of the same weights may have another form
        assert "hybrid holds another hybrid" in fails(capsys, *command, "--for", "transformers")
        Path("hybrid/model.safetensors").unlink()
        assert "folder hybrid is damaged: model.safetensors is missing" in fails(capsys, *command)

    @pytest.mark.usefixtures("no_page")
    def test_no_memory_passes(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as failed:
            main([*self.COMMAND, "--memory", "20%", "--margin", "nll=1%"])
        assert failed.value.code == 1
        assert "no layout passes nll=1%: try a larger --margin" in capsys.readouterr().out
        assert not Path("hybrid").exists()

    def test_a_model_that_is_replaced_meanwhile(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Costs of one model chose the layout of another of its name."""

        def replaced(*_: Any) -> object:
            shutil.copytree("dense", "other")
            config = json.loads(Path("other/config.json").read_text())
            Path("other/config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
            Path("other/spkv-manifest.json").unlink()
            Path("dense").unlink()
            Path("other").rename("dense")
            return object()

        monkeypatch.setattr("spkv_nas.stages.critical_budget.run", replaced)
        assert "model dense was replaced while it was measured" in fails(capsys, *self.COMMAND)

    def test_a_text_that_changes_meanwhile(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Costs of the old text chose a layout that was judged on the new one."""
        Path("text").unlink()
        shutil.copytree(folder.joinpath("dense").resolve().parent / "text", "text")

        def appended(*_: Any, **__: Any) -> HeadScores:
            with Path("text/7.txt").open("a") as file:
                file.write(" w5 w6")
            return make_table([[0.5]])

        monkeypatch.setattr("spkv_nas.stages.probe.probe", appended)
        message = fails(capsys, *self.COMMAND)
        assert (
            "the text text/7.txt was changed while it was measured run the same command again"
            in message
        )

    def test_a_second_run_on_the_model_waits(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two runs at once replaced each other's layout between the choice and the export."""
        monkeypatch.setattr("spkv_nas.cli.workflows._auto", lambda *_: iter(()))
        program = (
            "import pathlib, sys, time\n"
            "from spkv_nas.base import locks\n"
            "with locks.locked(pathlib.Path('runs/dense'), 'runs'):\n"
            "    print('locked', flush=True)\n"
            "    time.sleep(1.0)\n"
        )
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"locked\n"
            main([*self.COMMAND])
        expected = f"waiting for process {other.pid} on .*, which runs auto on this model in this workspace"
        assert re.search(expected, " ".join(capsys.readouterr().err.split()))

    @pytest.mark.usefixtures("no_page")
    def test_no_further_memory_is_tried_after_the_time(self, folder: Path) -> None:
        with pytest.raises(SystemExit) as failed:
            main(
                [
                    *self.COMMAND,
                    "--memory",
                    "10%,20%,80%",
                    "--margin",
                    "nll=1%",
                    "--minutes",
                    "0.0001",
                ]
            )
        assert failed.value.code in (1, 3)
        table = CRITICAL_BUDGET.read(Path("reports/dense-window-costs"))
        assert table is not None
        assert len(table[0]) == 1

    @pytest.mark.slow
    def test_retrained_hybrids_are_judged_on_other_documents(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The margin is below what the layout loses without training, and above what it loses after a few steps."""
        # The model is random
        monkeypatch.setattr("spkv_nas.evaluation.alarms.Circumstances.symptom", None)
        command = [*self.COMMAND, "--memory", "50%", "--margin", "nll=18%", "--retrain", "40"]
        with monkeypatch.context() as patch:
            patch.setattr("spkv_nas.training.retraining.selection.write_selection", interrupt)
            with pytest.raises(SystemExit):
                main(command)
        main(command)
        assert "dense, retrained: " in capsys.readouterr().out
        assert "`dense`, retrained, with hybrid attention" in Path("hybrid/README.md").read_text()
        # The documents that it learned from are listed in the folder, and left out here and later
        (file,) = Path("hybrid").glob("selection-*.txt")
        _, record = VERDICT.read(Path("reports/dense-window-costs")) or pytest.fail("no table")
        assert record["risk"] == 0.025
        assert record["left_out"]["documents"] == len(file.read_text().split())
        options = {"model": "dense", "data": ["text"], "context": "96", "name": "later"}
        later = verdict.run(VerdictOptions(candidates=["hybrid"], **options)).value
        assert later.compared.num_left_out == record["left_out"]["documents"]
        assert "training" in later.compared.selected.by
        whole = contents()
        main(command)
        assert contents() == whole
        # Weights of another retraining do not pass for these, which have the same layout
        assert "hybrid holds another hybrid" in fails(capsys, *command[:-1], "50")
        assert contents()["hybrid/spkv-manifest.json"] == whole["hybrid/spkv-manifest.json"]

    @pytest.mark.slow
    def test_in_python(self, folder: Path) -> None:
        model, tokenizer = load("dense")
        texts = [file.read_text() for file in sorted(Path("text").iterdir())]
        result = spkv_nas.auto(model, tokenizer, texts, margin="nll=30%", memory="20%,70%")
        assert result.layout is not None
        assert result.answers[result.passes] == "passes"
        assert result.memories is not None
        assert result.memories[0] == 20.0


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def contents() -> dict[str, bytes]:
    """Return the files that ``auto`` wrote, but for records, which hold times."""
    folders = map(Path, ("hybrid", "layouts", "reports"))
    files = (
        file
        for folder in folders
        for file in folder.rglob("*")
        if file.suffix in (".yaml", ".csv", ".json")
    )
    return {str(file): file.read_bytes() for file in files if file.name != "probe.yaml"}
