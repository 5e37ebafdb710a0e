"""Test a page in a browser: what the layout explorer shows, exports and remembers, and how readers see the rest."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from browser_cases import MAP, NEEDED, OTHER, num_outlined
from command_cases import parsed
from helpers import make_domain_table
from marks import slow_after

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.cli import main
from spkv_nas.proposal.coverage import coverage
from spkv_nas.proposal.propose import propose

pytestmark = NEEDED

ALL_FILES = """() => {
  const slider = document.getElementById("explorer-budget"), texts = [];
  for (let budget = 1; budget <= Number(slider.max); budget++) {
    slider.value = budget;
    slider.dispatchEvent(new Event("input"));
    texts.push(decodeURIComponent(document.getElementById("explorer-download").href).split(",").slice(1).join(","));
  }
  return texts;
}"""


@pytest.mark.parametrize(
    ("budget", "tau", "probe"),
    slow_after(
        2,
        [
            (30, "0.3", "stdlib-21x3"),
            (12, None, OTHER),
            (1, None, "stdlib-21x3"),
            (18, None, "stdlib-21x3"),
            (63, "0.95", "stdlib-21x3"),
        ],
    ),
)
def test_download_is_the_file_that_propose_writes(
    open_page: Any, workspace: Path, tmp_path: Path, budget: int, tau: str | None, probe: str
) -> None:
    for part in ("probes", "layouts"):
        shutil.copytree(workspace / part, tmp_path / part)
    chosen = [] if tau is None else ["--tau", tau]
    main(["propose", "-w", str(tmp_path), "--probe", probe, "--budget", str(budget), *chosen])
    page = open_page(f"#signal={probe}&budget={budget}" + (f"&tau={tau}" if tau else ""))
    with page.expect_download() as download:
        page.click("#explorer-download")
    assert (
        Path(download.value.path()).read_bytes()
        == (tmp_path / "layouts" / probe / "densest.yaml").read_bytes()
    )
    assert download.value.suggested_filename == f"densest-{budget}.yaml"


def test_download_has_the_sink_tokens_of_the_probe(open_file: Any, tmp_path: Path) -> None:
    """Files of stored layouts and of other budgets, with the hash that the page computes."""
    table = make_domain_table(
        ("a", "b"), record=ProbeRecord.of({"head_dim": 16, "dtype": "bfloat16", "sinks": 4})
    )
    table.write(tmp_path / "probes" / table.name)
    chosen = ["-w", str(tmp_path), "--probe", table.name]
    main(["propose", *chosen, "--budget", "2"])
    main(["report", *chosen])
    texts = open_file(tmp_path / "reports" / table.name / "index.html", "#budget=2").evaluate(
        ALL_FILES
    )
    for budget, text in enumerate(texts, 1):
        main(["propose", *chosen, "--budget", str(budget)])
        file = tmp_path / "layouts" / table.name / "densest.yaml"
        assert text == file.read_text()
        assert Layout.read(file).sinks == 4
    assert len(texts) == table.num_heads


def test_page_file_and_command_have_one_coverage(
    open_page: Any, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("probes", "layouts"):
        shutil.copytree(workspace / part, tmp_path / part)
    main(
        [
            "propose",
            "-w",
            str(tmp_path),
            "--probe",
            "stdlib-21x3",
            "--budget",
            "20",
            "--tau",
            "0.4",
            "--json",
            "-q",
        ]
    )
    printed = {
        row["strategy"]: row["coverage"] for row in json.loads(capsys.readouterr().out)["layouts"]
    }
    table = pd.read_csv(tmp_path / "layouts/stdlib-21x3/coverage.csv").set_index("strategy")[
        "coverage"
    ]
    shown = open_page("#budget=20&tau=0.4").inner_text("#explorer-coverage")
    assert (shown, printed["densest"]) == (f"{100 * table['densest']:.2f} %", table["densest"])


@pytest.mark.slow
def test_files_of_every_budget_equal_those_of_propose(open_page: Any, workspace: Path) -> None:
    """Several thresholds are compared; some of the hashes need quotes in YAML."""
    table = HeadScores.read(workspace / "probes/stdlib-21x3")
    for tau in (0.05, 0.5, 0.65, 0.95):
        texts = open_page(f"#budget=1&tau={tau:g}").evaluate(ALL_FILES)
        at = table.at_tau(tau)
        assert texts == [
            propose(at, budget, num_random=0)["densest"].text for budget in range(1, 64)
        ]


@pytest.mark.parametrize("tau", slow_after(2, [0.05, 0.7, 0.5, 0.95]))
def test_the_map_shows_the_table_at_every_threshold(
    open_page: Any, workspace: Path, tau: float
) -> None:
    """Over all text and by domain, exact in the data and rounded in the cells."""
    table = HeadScores.read(workspace / "probes/stdlib-21x3").at_tau(tau)
    page = open_page(f"#budget=18&tau={tau:g}")
    labels = page.eval_on_selector_all(
        MAP + " .cell", "cells => cells.map(cell => cell.getAttribute('aria-label'))"
    )
    texts = page.eval_on_selector_all(
        MAP + " .values text", "texts => texts.map(text => text.textContent)"
    )
    heads = [(layer, head) for head in range(3) for layer in range(21)]
    assert texts == [table.measure.scale.text(table.values[at]) for at in heads]
    chosen = propose(table, 18, num_random=0)["densest"].global_mask
    assert labels == [
        "\n".join(
            [
                f"Layer {at[0]}, KV head {at[1]}: density {table.measure.exact(table.values[at])}, "
                f"{'global' if chosen[at] else 'local'}",
                *(
                    f"{domain}: {table.measure.exact(table.domain_density(domain)[at])}"
                    for domain in table.domains
                ),
            ]
        )
        for at in heads
    ]


def test_hashes_and_their_quotes_are_those_of_python(open_page: Any) -> None:
    texts = ["", "a" * 55, "a" * 56, "b" * 64, "ü" * 100, *map(str, range(200))]
    page = open_page()
    hashes = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]
    assert page.evaluate("texts => texts.map(shortHash)", texts) == hashes
    digits = [
        "12345678",
        "01234567",
        "01234589",
        "0b010101",
        "0b010121",
        "1e234567",
        "1234e567",
        "12345e67",
        "abcdef01",
        "00000000",
        "0e123456",
        "e1234567",
    ]
    assert page.evaluate("digits => digits.map(yamlText)", digits) == [
        _plain(text) for text in digits
    ]


def _plain(text: str) -> str:
    from spkv_nas.base.files import yaml_line

    return yaml_line({"x": text})[4:-1]


def test_the_slider_moves_by_keyboard_and_mouse(open_page: Any) -> None:
    page = open_page()
    slider = page.locator("#explorer-budget")
    assert page.inner_text("#explorer-heads") == "18 of 63 KV heads"
    slider.focus()
    for key in ("ArrowRight", "ArrowUp", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    assert page.inner_text("#explorer-heads") == "20 of 63 KV heads"
    assert num_outlined(page) == 20
    box = slider.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    assert page.inner_text("#explorer-heads") == "63 of 63 KV heads"
    assert page.inner_text("#explorer-coverage") == "100.00 %"
    assert num_outlined(page) == 63
    page.locator("#explorer-limit").fill("100")
    page.locator("#explorer-context").fill("65536")
    # 8 MiB each, and local ones 4 KiB
    assert page.inner_text("#explorer-heads") == "12 of 63 KV heads"
    page.locator("#explorer-limit").fill("0.0001")
    assert page.inner_text("#explorer-heads") == "1 of 63 KV heads"


@pytest.mark.slow
def test_a_link_shows_the_same(open_page: Any) -> None:
    page = open_page()
    page.select_option("#explorer-signal", label=f"{OTHER}: duo score")
    page.select_option("#explorer-domain", label="docs")
    page.select_option("#explorer-compared", label="densest")
    page.locator("#explorer-budget").fill("25")
    page.wait_for_url(lambda url: "budget=25" in url)
    again = open_page(page.evaluate("location.hash"))
    for part in ("form.controls", ".readout", "section[aria-labelledby=density]"):
        assert again.inner_text(part) == page.inner_text(part)
    command = parsed(again.inner_text("#explorer-command"))
    assert (command.probe, command.budget) == ("it's duo", "25")
    assert num_outlined(again) == 25
    assert (
        open_page("#budget=x&tau=9&signal=none&with=none").inner_text("#explorer-heads")
        == "18 of 63 KV heads"
    )


def test_nearest_measured_layouts_can_be_compared_with(open_page: Any) -> None:
    page = open_page("#budget=18")
    row = page.locator("#explorer-measured tr").first
    assert row.inner_text().split("\t")[1:] == ["+0.797 ± 0.050", "densest", "6"]
    row.locator("button").click()
    assert "both 15 · only here 3 · only in densest 3" in page.inner_text("form.controls")


@pytest.mark.slow
def test_two_layouts_are_compared_head_by_head(open_page: Any) -> None:
    """Compare on the map, side by side, in numbers, in cell titles, and by keyboard."""
    page = open_page()
    for control, name in (("selected", "duo"), ("compared", "sparsest")):
        # Typed letters are one search only if they arrive within a second; arrow keys do not depend on time
        select = page.locator(f"#explorer-{control}")
        select.press("Home")
        for _ in range(select.locator("option").all_inner_texts().index(name)):
            select.press("ArrowDown")
    assert (
        page.inner_text("#explorer-difference")
        == "both 5 \u00b7 only here 13 \u00b7 only in sparsest 13"
    )
    assert num_outlined(page) == 18
    assert page.get_attribute(MAP + " .other", "d").count("M") == 13
    assert [page.inner_text(f"#explorer-pair figure:nth-child({at}) h3") for at in (1, 2)] == [
        "duo",
        "sparsest",
    ]
    assert page.inner_text("#explorer-coverage") == "30.44 %"
    with page.expect_download() as download:
        page.click("#explorer-download")
    assert Layout.read(Path(download.value.path())).strategy == "duo"
    page.wait_for_url(lambda url: "layout=duo" in url)
    assert "in sparsest" in page.get_attribute(MAP + " .cell", "aria-label")
    again = open_page(page.evaluate("location.hash"))
    assert again.inner_text(".controls") == page.inner_text(".controls")
    again.locator("#explorer-budget").press("ArrowRight")
    assert again.inner_text("#explorer-heads") == "19 of 63 KV heads"
    assert again.is_visible("#explorer-download")


def test_two_probes_are_compared_at_the_same_number_of_heads(
    open_page: Any, workspace: Path
) -> None:
    page = open_page("#budget=10")
    page.select_option("#explorer-compared", label=f"as many heads selected by {OTHER}")
    masks = [
        propose(HeadScores.read(workspace / "probes" / name), 10, num_random=0)[
            "densest"
        ].global_mask
        for name in ("stdlib-21x3", OTHER)
    ]
    both = int((masks[0] & masks[1]).sum())
    sentence = f"both {both} \u00b7 only here {10 - both} \u00b7 only in heads selected by {OTHER} {10 - both}"
    assert page.inner_text("#explorer-difference") == sentence
    page.wait_for_url(lambda url: "against=" in url)
    assert open_page(page.evaluate("location.hash")).inner_text("#explorer-difference") == sentence


def test_measured_layouts_are_sorted_and_filtered(open_page: Any, workspace: Path) -> None:
    """They match the search's table; clicking a name shows its layout on the map."""
    page = open_page()
    search = pd.read_csv(workspace / "reports/stdlib-21x3/search.csv")
    unseen = (
        search.dropna(subset="full_delta_percent")
        .drop_duplicates("heads")
        .sort_values("full_delta_percent")
    )
    rows = "#measured-all tbody tr"
    shown = [row.split("\t") for row in page.locator(rows).all_inner_texts()]
    names = page.locator(rows + " button").all_inner_texts()
    assert names[: len(unseen)] == unseen["name"].tolist()
    assert [row[1].split()[0] for row in shown[: len(unseen)]] == [
        f"{d:+.3f}" for d in unseen["full_delta_percent"]
    ]
    table = HeadScores.read(workspace / "probes/stdlib-21x3")  # measured after the search
    covered = [
        100 * coverage(table, Layout(tuple(heads.split()), window=table.window))
        for heads in unseen["heads"].head(5)
    ]
    assert [float(row[5]) for row in shown[:5]] == pytest.approx(covered, abs=0.07)
    page.fill("#measured-filter", "surrogate 46")
    assert [row.split("\t")[0] for row in page.locator(rows).all_inner_texts()] == [
        "surrogate-0-46"
    ]
    assert page.inner_text("#measured-count").startswith("1 of ")
    page.fill("#measured-filter", "surrogate")
    page.locator("#measured-all th button", has_text="Layout").press("Enter")
    assert page.locator("#measured-all th[aria-sort]").inner_text() == "Layout"
    names = [row.split("\t")[0] for row in page.locator(rows).all_inner_texts()]
    assert names == sorted(names, key=lambda name: [int(part) for part in name.split("-")[1:]])
    page.locator(rows + " button").first.press("Enter")
    assert page.evaluate("document.activeElement.id") == "explorer-selected"
    assert page.locator("#explorer-selected option:checked").inner_text() == names[0]


def test_points_of_charts_show_their_layout(open_page: Any) -> None:
    page = open_page()
    for chart, name in (
        ("search-retrained-coverage", "surrogate-0-46"),
        ("coverage-nll", "interleaved-last"),
    ):
        page.locator(f"svg[data-chart={chart}] [role=button][aria-label^='{name}']").click(
            force=True
        )
        assert page.locator("#explorer-selected option:checked").inner_text() == name
    first = page.locator("svg[data-chart=coverage-budget] [role=button][tabindex='0']")
    first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    name = page.evaluate("document.activeElement.getAttribute('aria-label')").split("\n")[0]
    page.keyboard.press("Enter")
    assert page.locator("#explorer-selected option:checked").inner_text() == name


def test_nothing_is_cut_off_in_print(open_page: Any) -> None:
    """Maps and tables do not scroll on paper, and no page is left empty."""
    page = open_page()
    page.set_viewport_size({"width": 688, "height": 1000})  # A4 less its margins
    page.emulate_media(media="print")
    wide = "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.ariaLabel)"
    assert page.eval_on_selector_all(".scroll", wide) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 688
    assert not page.is_visible("#explorer-budget")
    assert page.inner_text("#explorer-measured tr:first-child button") == "duo"


def test_without_javascript_the_page_shows_the_map(browser: Any, workspace: Path) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto((workspace / "reports/stdlib-21x3/index.html").as_uri())
    assert not page.is_visible("form.controls")
    assert not page.is_visible(".readout")
    assert page.is_visible("svg[data-chart=density]")
    page.close()


def test_the_page_begins_with_the_layout_of_its_headline(open_page: Any, workspace: Path) -> None:
    """Map, file and numbers are those of the layout in the headline."""
    page = open_page()
    search = pd.read_csv(workspace / "reports/stdlib-21x3/search.csv").set_index("name")
    heads = (
        search.loc["duo", "heads"].iloc[0]
        if search.index.duplicated().any()
        else search.loc["duo", "heads"]
    )
    link = page.locator("p.lead a")
    assert (link.inner_text(), page.inner_text("#explorer-selected option:checked")) == (
        "duo",
        "duo",
    )
    with page.expect_download() as download:
        page.click("#explorer-download")
    layout = Layout.read(Path(download.value.path()))
    assert (layout.strategy, " ".join(layout.heads)) == ("duo", heads)
    assert download.value.suggested_filename == "duo.yaml"
    page.focus("#explorer-budget")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#explorer-selected option:checked") == "from sliders"
    link.press("Enter")
    assert page.inner_text("#explorer-selected option:checked") == "duo"
    assert num_outlined(page) == 18


@pytest.mark.slow
def test_changes_of_nll_are_visible_on_a_phone(open_page: Any) -> None:
    """Every table shows the change of NLL beside the names at 390 pixels."""
    page = open_page()
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    checked = 0
    for table in page.locator("table:has(thead th:nth-child(2))").all():
        if not table.is_visible() or "NLL" not in table.locator("thead").inner_text():
            continue
        heads = table.locator("thead th").all_inner_texts()
        column = next(
            at for at, name in enumerate(heads) if name.replace("\u00a0", " ").startswith("Δ NLL")
        )
        for cell in table.locator(f"tbody tr td:nth-child({column + 1})").all():
            inside = (
                "cell => cell.getBoundingClientRect().right"
                " <= cell.closest('.scroll').getBoundingClientRect().right"
            )
            assert cell.evaluate(inside), heads
            checked += 1
    assert checked > 30


def test_words_explain_themselves_by_pointer_and_keyboard(open_page: Any) -> None:
    page = open_page()
    term = page.locator("section[aria-labelledby=comparison] a.term", has_text="control").first
    term.hover()
    assert "retrained like the layouts" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    term.focus()
    assert "retrained like the layouts" in page.inner_text("#tip")
    page.keyboard.press("Enter")
    assert "retrained like the layouts" in page.inner_text("#tip")
    page.emulate_media(media="print")
    assert page.is_visible("#word-control")
