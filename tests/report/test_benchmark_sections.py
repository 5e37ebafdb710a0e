"""Test the page's sections about benchmarks: numbers equal those of the files, whose damage is named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from attack.readers import make_results, use_results
from helpers import Page, make_domain_table, make_search
from paths import ROOT

from spkv_nas.artifacts.result_tables import BASELINES, LONGPPL, RULER, TASKS, ResultTable
from spkv_nas.base.errors import UserError
from spkv_nas.base.tables import write_csv
from spkv_nas.contrib.evaluate.baselines import stage as baselines
from spkv_nas.contrib.evaluate.longppl import stage as longppl
from spkv_nas.contrib.evaluate.longppl.stage import LongPPLResult
from spkv_nas.contrib.evaluate.ruler import stage as ruler
from spkv_nas.contrib.evaluate.samples import SampledTable
from spkv_nas.contrib.evaluate.tasks import stage as tasks
from spkv_nas.report import page as report_page
from spkv_nas.report.benchmark_sections import SECTIONS, read_benchmarks
from spkv_nas.report.chart import Row, Section
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.page import write_report
from spkv_nas.stages.subject import NLLTable

COMMITTED = ROOT / "reports" / "stdlib-21x3"
NAN = np.nan
RULER_ROWS = (
    (512, "niah_single_1", 100, 0.98, 0.014, 0.0, 0.28, 0.99, 1.0, -0.01, 0.0099),
    (512, "cwe", 100, 0.1234, 0.0123, 0.11, 0.31, 0.2, 1.0, -0.0766, 0.0234),
    (512, "average of 2", 200, 0.5517, 0.0093, 0.055, 0.295, 0.595, 1.0, -0.0433, 0.0127),
)
TASKS_ROWS = (
    ("arc_easy", "acc", 25, 200, 0.61, 0.0345, 0.3, 0.58, 1.0, 0.03, 0.0212),
    ("lambada", "perplexity", 0, 200, 12.3456, 0.789, 0.32, 11.0, 1.0, 1.3456, 0.21),
)
LONGPPL_ROWS = (
    ("all", 12, 60000, 813, 2.2333, 0.1061, 7.345, 0.27, 1.9001, 7.234, 1.0, 17.5678, 4.3912),
    ("docs", 3, 10000, 20, NAN, NAN, 9.123, 0.26, NAN, 9.012, 1.0, NAN, NAN),
)


def write(table: ResultTable, folder: Path, rows: Any, **origin: Any) -> None:
    table.write(folder, pd.DataFrame(rows, columns=table.header), origin)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write results with every table: the committed one, and three that are made up."""
    for file in COMMITTED.glob("baselines.*"):
        shutil.copy(file, tmp_path)
    write(RULER, tmp_path, RULER_ROWS, model="m/own", against={"model": "m/other"}, floor_window=32)
    write(TASKS, tmp_path, TASKS_ROWS, limit=200)
    write(
        LONGPPL,
        tmp_path,
        LONGPPL_ROWS,
        evaluator={"model": "m/other"},
        withheld={"docs": "20 key tokens"},
    )
    return tmp_path


def numbers(text: str) -> list[str]:
    """Return every number in a text that has a decimal point, without its sign."""
    return re.findall(r"\d[\d,]*\.\d+", text)


def rows_of(section: Section) -> list[Row]:
    return [row for rows in (*section.groups, *section.folded) for row in rows]


def cells(section: Section) -> str:
    return " ".join(" ".join((row.head, *row.cells)) for row in rows_of(section))


def test_numbers_equal_those_of_the_file_and_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every number on the page is the file's, rounded, and the command's tables agree."""
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    sections = {section.name: section for section in read_benchmarks(folder)}
    file = write_report(
        folder, ReportInputs(make_domain_table(), {}, benchmarks=tuple(sections.values()))
    )
    page = Page(file.read_text(encoding="utf-8"))
    results: Mapping[str, Any] = {
        "baselines": (baselines.show, lambda rows: NLLTable("mine", rows, folder, 300, 300.0)),
        "ruler": (ruler.show, lambda rows: SampledTable("mine", rows, folder, folder)),
        "tasks": (tasks.show, lambda rows: SampledTable("mine", rows, folder, folder)),
        "longppl": (longppl.show, lambda rows: LongPPLResult("mine", rows, folder, folder, {})),
    }
    for kind in (kind for kind in SECTIONS if kind.name in results):
        tables = kind.read(folder)
        assert tables is not None
        say, result = results[kind.name]
        say(result(tables[0]))
        on_page = numbers(capsys.readouterr().out.replace("effective number 300.0", ""))
        shown = numbers(cells(sections[kind.name]))
        assert set(on_page) <= set(shown), kind.name
        values = [
            scale * abs(value)
            for value in tables[0].select_dtypes("number").stack().dropna()
            for scale in (1, 100)
        ]
        for number in shown:
            value, digits = float(number.replace(",", "")), len(number.partition(".")[2])
            assert min(abs(value - one) for one in values) <= 0.5000001 * 10**-digits, (
                kind.name,
                number,
            )
        cell_texts = {text.replace("\N{NO-BREAK SPACE}", " ") for text in page.texts["td"]}
        assert {cell for row in rows_of(sections[kind.name]) for cell in row.cells} <= cell_texts


def test_sections_exist_for_existing_tables(folder: Path) -> None:
    (folder / "ruler.csv").unlink()
    (folder / "tasks.yaml").unlink()  # a table alone will do
    assert [section.name for section in read_benchmarks(folder)] == [
        "baselines",
        "tasks",
        "longppl",
    ]
    assert read_benchmarks(folder / "elsewhere") == ()


def test_layouts_not_significantly_different_are_tagged(folder: Path) -> None:
    result = BASELINES.read(folder)
    assert result is not None
    rows, origin = result
    rows.loc[rows["tau"] == 0.3, "delta_nll_standard_error"] = 0.13  # of a change of 0.24
    BASELINES.write(folder, rows, origin)
    pruned, ruler, tasks, longppl = read_benchmarks(folder)
    tagged = {
        row.head
        for group in pruned.folded
        for row in group
        if row.tag == "not significantly different"
    }
    assert tagged == {"SP-KV, τ = 0.3"}
    assert ruler.about.startswith("m/own; baseline m/other. ")
    assert [row.tag for rows in ruler.folded for row in rows] == [
        "not significantly different",
        "not above the floor",
    ]
    assert [row.tag for rows in tasks.groups for row in rows] == ["not significantly different", ""]
    # One is worse, the other is not known
    assert [row.tag for rows in longppl.groups for row in rows] == [
        "",
        "",
    ]
    assert longppl.findings == ("docs: 20 key tokens.",)
    assert "likelier, chosen by m/other" in longppl.about


def test_a_single_checkpoint_is_not_compared(tmp_path: Path) -> None:
    write(RULER, tmp_path, [(*row[:7], *(NAN,) * 4) for row in RULER_ROWS], floor_window=32)
    (ruler,) = read_benchmarks(tmp_path)
    assert "Difference" not in ruler.header
    assert [row.tag for rows in ruler.folded for row in rows] == ["", "not above the floor"]


def test_an_unreadable_table_is_named(folder: Path) -> None:
    text = (folder / "ruler.csv").read_text()
    (folder / "ruler.csv").write_text(text.replace("0.98", "much"))
    with pytest.raises(
        UserError,
        match=r"ruler\.csv, line 2: column 'score' must be a number in \[0, 1\]; found 'mu",
    ):
        read_benchmarks(folder)


class TestDamage:
    @pytest.mark.parametrize("strategy", ["dense", "full-attention", "sp-kv", "densest"])
    def test_a_comparison_without_a_row(self, strategy: str, tmp_path: Path) -> None:
        """Without the row of the control, the report ended with an IndexError."""
        file = make_results("comparison.csv")(tmp_path)
        lines = [
            line for line in file.read_text().splitlines() if not line.startswith(f"{strategy},")
        ]
        file.write_text("\n".join(lines))
        use_results(file)

    @pytest.mark.parametrize(
        ("name", "old", "new", "message"),
        [
            (
                "verdict.yaml",
                '"probe p"',
                "3",
                r"key 'left_out\.selected_by\.0': should be a valid string; found 3",
            ),
            ("verdict.yaml", '"documents"', "null", r"key 'nouns\.nll': should be a valid string"),
            (
                "comparison.yaml",
                "0.2",
                '"x"',
                r"key 'rank_correlation\.interval\.1': .*number; found 'x'",
            ),
            ("search.yaml", "120", "[1]", r"key 'steps\.full': should be a valid number"),
            ("search.csv", "GL LG GL LL", "GL L GL LL", r"column 'heads' must have one word"),
        ],
    )
    def test_a_value_of_another_type_is_named(
        self, name: str, old: str, new: str, message: str, tmp_path: Path
    ) -> None:
        """A number among the names of a verdict's record ended the report with a TypeError."""
        file = make_results(name)(tmp_path)
        file.write_text(file.read_text().replace(old, new, 1))
        with pytest.raises(UserError, match=f"{name}.*{message}"):
            use_results(file)

    def test_a_search_without_scores(self, tmp_path: Path) -> None:
        """Its chart ended the report with a ValueError."""
        file = make_results("search.csv")(tmp_path)
        write_csv(file, make_search().assign(zero_shot_delta_percent=NAN))
        with pytest.raises(
            UserError, match="'zero_shot_delta_percent' is empty: no layout has a score"
        ):
            use_results(file)
