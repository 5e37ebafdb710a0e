"""Measure the report page's size and the latency of its sliders: python reports/page_speed.py, a minute of one core.

Tables are synthetic: every head's logits have their own mean, and a search has scored 250 random layouts. A step sets a
value and fires the input event, and lasts until the frame that shows it has been drawn; its time is the CPU time of the
page's main thread in Chromium's trace, so that other load on the machine does not count. A drag makes a step in every
frame; a jump starts when the page is idle.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from playwright.sync_api import sync_playwright

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.histogram import LogitHistogram
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.proposal.propose import propose
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.page import write_report

# Layers, KV heads, domains, layouts scored
SIZES = (
    (32, 8, 4, 0),
    (32, 8, 4, 250),
    (80, 8, 9, 250),
)
STEPS = """async ([name, values, rest]) => {
  const slider = document.getElementById("explorer-" + name);
  for (const value of values) {
    await new Promise(done => setTimeout(done, rest));
    const { port1, port2 } = new MessageChannel();
    performance.mark("step");
    slider.value = value;
    slider.dispatchEvent(new Event("input"));
    await new Promise(done => { port1.onmessage = done; requestAnimationFrame(() => port2.postMessage(0)); });
    performance.mark("drawn");
  }
}"""
TRACED = ["blink.user_timing", "disabled-by-default-devtools.timeline", "toplevel"]


def make_table(num_layers: int, num_kv_heads: int, num_domains: int) -> HeadScores:
    """Create head scores from logits of 20 thousand tokens per head and domain."""
    generator = np.random.default_rng(0)
    shape, bins = (num_domains, num_layers, num_kv_heads), np.arange(482)
    means = generator.uniform(50, 430, (*shape, 1))
    weights = np.exp(-(((bins - means) / 40) ** 2)) + 1e-9
    counts = generator.multinomial(20_000, weights / weights.sum(-1, keepdims=True))
    domains = tuple(f"domain-{number}" for number in range(num_domains))
    histogram = LogitHistogram(np.linspace(-12, 12, 481), counts, domains)
    domain, layer, head = (axis.ravel() for axis in np.indices(shape))
    rows = pd.DataFrame(
        {"layer": layer, "kv_head": head, "score": histogram.density(0.5).ravel()}
    ).assign(
        domain=[domains[number] for number in domain],
        num_tokens=20_000,
        num_documents=20,
        standard_error=generator.uniform(0, 0.01, domain.size).round(6),
    )
    metadata = {"head_dim": 128, "dtype": "bfloat16"}
    return HeadScores(
        "made-up", rows, window=128, histogram=histogram, record=ProbeRecord.of(metadata)
    )


def make_search(table: HeadScores, number: int) -> pd.DataFrame | None:
    """Create the table of a search over layouts with 2 of 7 heads global, none retrained."""
    if not number:
        return None
    generator, nan = np.random.default_rng(1), np.nan
    masks = [
        generator.permutation(table.num_heads) < table.num_heads * 2 // 7 for _ in range(number)
    ]
    letters = [np.where(mask.reshape(table.grid), "G", "L") for mask in masks]
    return pd.DataFrame(
        {"name": [f"surrogate-0-{trial}" for trial in range(number)], "sampler": "surrogate"}
    ).assign(
        seed=0,
        trial=np.arange(number, dtype=float),
        hash=[f"{trial:08x}" for trial in range(number)],
        num_global=table.num_heads * 2 // 7,
        coverage_percent=generator.uniform(20, 80, number).round(4),
        cost=nan,
        zero_shot_delta_percent=generator.uniform(1, 5, number),
        zero_shot_standard_error=0.1,
        short_delta_percent=nan,
        short_standard_error=nan,
        full_delta_percent=nan,
        full_standard_error=nan,
        heads=[" ".join("".join(row) for row in grid) for grid in letters],
    )


def write_page(
    folder: Path, num_layers: int, num_kv_heads: int, num_domains: int, scored: int
) -> Path:
    """Write a report page without its picture files; return its path."""
    table = make_table(num_layers, num_kv_heads, num_domains)
    layouts = propose(table, table.num_heads * 2 // 7, num_random=1)
    with patch("spkv_nas.report.plot.save_chart"):
        return write_report(folder, ReportInputs(table, layouts, search=make_search(table, scored)))


def time_steps(
    browser: Any, page: Any, slider: str, values: list[int], rest: int
) -> dict[str, float]:
    """Return the median and 95th percentile of slider steps in milliseconds.

    Args:
        browser: Playwright's browser, which traces the page.
        page: the open report page.
        slider: name of the slider.
        values: values to set in turn.
        rest: milliseconds to wait before each step.
    """
    # Trace the steps
    browser.start_tracing(page=page, categories=TRACED)
    page.evaluate(STEPS, [slider, values, rest])
    events = json.loads(browser.stop_tracing())["traceEvents"]
    # Sum the main thread's task time between the marks of each step
    marks = {
        name: sorted(event["ts"] for event in events if event["name"] == name)
        for name in ("step", "drawn")
    }
    thread = next((event["pid"], event["tid"]) for event in events if event["name"] == "step")
    complete_tasks = (event for event in events if event["name"] == "RunTask" and "dur" in event)
    tasks = [event for event in complete_tasks if (event["pid"], event["tid"]) == thread]
    times = [
        sum(task.get("tdur", 0) for task in tasks if start < task["ts"] + task["dur"] < end) / 1000
        for start, end in zip(marks["step"], marks["drawn"], strict=True)
    ]
    return {
        "median": round(statistics.median(times), 1),
        "p95": round(statistics.quantiles(times, n=20)[-1], 1),
    }


def main() -> None:
    """Print a JSON line per page: size of page and data in bytes, step times in milliseconds."""
    browser_file = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_file, args=["--no-sandbox"])
        for number, size in enumerate(SIZES):
            # Write and open the page
            file = write_page(Path(folder) / str(number), *size)
            text = file.read_text(encoding="utf-8")
            data = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0]
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.goto(file.as_uri())
            page.wait_for_selector("[data-explorer][hidden]", state="detached")
            measurements: dict[str, Any] = {
                "size": size,
                "page": len(text.encode()),
                "data": len(data.encode()),
            }
            # Drag and jump both sliders
            for slider in ("budget", "tau"):
                maximum = int(page.get_attribute(f"#explorer-{slider}", "max") or 0)
                drag = [1 + (3 * step) % maximum for step in range(60)]
                jump = [1 + (259 * step) % maximum for step in range(30)]
                measurements[f"{slider}, dragged"] = time_steps(browser, page, slider, drag, 0)
                measurements[f"{slider}, jumping"] = time_steps(browser, page, slider, jump, 500)
            print(json.dumps(measurements), flush=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
