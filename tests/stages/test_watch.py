"""Test ``report --watch``: pages follow what other commands write, and half-written files are waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import Recorder

from spkv_nas.artifacts.layout import Layout
from spkv_nas.stages.report.options import ReportOptions
from spkv_nas.stages.report.watch import watch

TABLE = "layer,kv_head,density\n0,0,0.1\n0,1,0.9\n1,0,0.8\n1,1,0.3\n"
COMPARISON = "strategy,density_percent,coverage_percent,nll\nfull-attention,100,,2.0\n{name},50,81.0,2.1\n"


class Ended(BaseException):
    """Stands in for the signal that ends the watching."""


@pytest.mark.filterwarnings("ignore")  # of a table of four heads that nobody probed
def test_the_report_follows_its_files(tmp_path: Path) -> None:
    probe, results = tmp_path / "probes/mine/density.csv", tmp_path / "reports/mine"
    other = tmp_path / "reports/other/comparison.csv"
    Layout(("LG", "GL"), 8, "densest").write(tmp_path / "layouts/mine/densest.yaml")
    page, messages = results / "index.html", list[str]()
    pages = list[str]()  # after each look, "" where none was written

    def write(path: Path, text: str) -> Callable[[], None]:
        def act() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        return act

    def steps() -> Iterator[Callable[[], None]]:
        yield write(probe, TABLE[:30])
        yield write(probe, TABLE)
        yield lambda: None
        yield write(results / "comparison.csv", COMPARISON[:5])
        yield write(results / "comparison.csv", COMPARISON.format(name="one-more"))
        yield write(other, COMPARISON)

    to_do = steps()

    def wait(_: float) -> None:
        pages.append(page.read_text() if page.exists() else "")
        page.unlink(missing_ok=True)
        act = next(to_do, None)
        if act is None:
            raise Ended
        act()

    with pytest.raises(Ended):
        watch(ReportOptions(workspace=tmp_path), Recorder(announced=messages.append), wait)

    nothing, half, first, same, cut, compared, elsewhere = pages
    assert (nothing, half, same, cut, elsewhere) == ("",) * 5  # not begun, half written, or nothing of this report
    assert "one-more" in compared
    assert all('id="reload"' in one and "<time" in one for one in (first, compared))
    assert [line.split(":")[0] for line in messages] == ["waiting", "waiting", "written", "waiting", "written"]
