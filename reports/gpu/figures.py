"""Read figures from the output of commands, and set them beside the bars.

A figure is a dictionary of ``name``, ``value`` and ``unit``, and of ``error`` where a standard error is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Figure = dict[str, Any]
Reader = Callable[[str, float], list[Figure]]  # of the output and the seconds of a command
Figures = Mapping[str, list[Figure]]  # by "piece/step"


def figure(name: str, value: float, unit: str, **more: Any) -> Figure:
    """Return a figure."""
    return {"name": name, "value": value, "unit": unit, **more}


def nothing(_output: str, _seconds: float) -> list[Figure]:
    """Return no figures: the command prepares others."""
    return []


def timed(_output: str, seconds: float) -> list[Figure]:
    """Return the time of the whole process."""
    return [figure("whole process", round(seconds, 1), "s")]


def tests(output: str, _seconds: float) -> list[Figure]:
    """Count the outcomes in the verbose output of pytest, which may have been stopped, and name what failed."""
    outcomes = re.findall(
        r"\b(PASSED|FAILED|ERROR|SKIPPED)\b(?: +\[ *\d+%\])? *(\S*::\S*)?", output
    )
    before = re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.MULTILINE)
    named = dict(before) | {name: outcome for outcome, name in outcomes if name}
    counts = [
        figure(kind.lower(), list(named.values()).count(kind), "tests")
        for kind in ("PASSED", "SKIPPED")
    ]
    failed = sorted(name for name, outcome in named.items() if outcome in ("FAILED", "ERROR"))
    return [*counts, figure("failed", len(failed), "tests", names=failed)]


def training_speed(output: str, _seconds: float) -> list[Figure]:
    """Read the table of reports/training_speed.py: tokens per second, and the ratio to its first case."""
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) tokens/s \| ([\d.]+) \|$", output, re.MULTILINE)
    figures = []
    for name, tokens, ratio in rows:
        figures.append(figure(name, float(tokens.replace(",", "")), "tokens/s", ratio=float(ratio)))
    return figures


def benchmark(output: str, _seconds: float) -> list[Figure]:
    """Read the lines of kernels/benchmarks/attention.py: our time, and ratios of the time of others to it."""
    figures = []
    for name, milliseconds, rest in re.findall(r"^(\S.*?) +([\d.]+) ms(.*)$", output, re.MULTILINE):
        ratios = {
            other.strip(): float(ratio)
            for other, ratio in re.findall(r"[;,] ([A-Za-z][\w ,]*?) (\d+\.\d\d)\b", rest)
        }
        figures.append(figure(name, float(milliseconds), "ms", ratios=ratios))
    return figures


def json_lines(output: str, _seconds: float) -> list[Figure]:
    """Read every line that is a JSON object."""
    objects = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [
        figure(each.get("stage", "figures"), each.get("seconds", 0.0), "s", all=each)
        for each in objects
    ]


def hybrids(output: str, _seconds: float) -> list[Figure]:
    """Read the losses of retrained models, in percent of the control's NLL, from ``train-hybrid --json``."""
    figures = []
    for layout in json.loads(output)["layouts"]:
        kept = (
            "steps",
            "num_global",
            "coverage_percent",
            "density_percent",
            "zero_shot_delta_percent",
            "nll",
        )
        more = {name: layout[name] for name in kept}
        loss, error = layout["delta_control_percent"], layout["delta_control_standard_error"]
        figures.append(
            figure(layout["strategy"], loss, "% behind the control", error=error, **more)
        )
    return figures


def verdicts(output: str, _seconds: float) -> list[Figure]:
    """Read the losses of candidates by criterion from ``verdict --json``."""
    kept = ("low", "high", "answer", "num_samples")
    return [
        figure(
            f"{row['candidate']}, {row['criterion']}",
            row["loss"],
            row["unit"],
            **{name: row[name] for name in kept},
        )
        for row in json.loads(output)["criteria"]
    ]


class Bar(NamedTuple):
    """Row of the table of bars."""

    what: str
    last: str  # last measured, on an H100 at commit 827e6ca
    bar: str
    # From all figures; raises ``LookupError`` if it was not measured
    measure: Callable[[Figures], float]
    unit: str = ""


def _ratio(step: str, name: str, against: str | None = None) -> Callable[[Figures], float]:
    """Return the ratio of a case of training_speed.py to the plain loop, or of its tokens per second to another's."""

    def measure(figures: Figures) -> float:
        values = {each["name"]: each for each in figures[f"training-speed/{step}"]}
        if against is None:
            return float(values[name]["ratio"])
        return float(values[name]["value"] / values[against]["value"])

    return measure


def _kernel(step: str, case: str, against: str = "cuDNN") -> Callable[[Figures], float]:
    """Return the ratio of another kernel's time to ours."""

    def measure(figures: Figures) -> float:
        values = {each["name"]: each for each in figures[f"kernels-speed/{step}"]}
        return float(values[case]["ratios"][against])

    return measure


def _per_token(figures: Figures) -> float:
    """Return the time per token of windows alone at 32,768 tokens, divided by that at 8,192."""
    values = {each["name"]: each["value"] for each in figures["kernels-speed/windows"]}
    # 16,384 tokens in two sequences, and 32,768 in one
    short, long = (
        values[f"windows alone fwd+bwd, 512 keys, T={length}"] for length in (8192, 32768)
    )
    return float(long / 32768 / (short / 16384))


def _process(step: str) -> Callable[[Figures], float]:
    """Return the seconds of a process."""
    return lambda figures: float(figures[f"auto-smollm2/{step}"][0]["value"])


FULL, LAYOUT, HARD = "full attention", "layout, a quarter global", "SP-KV, hard gates"
HEADS = "fwd+bwd, Hq=32 Hkv=8 T="
BARS = (
    Bar(
        "training step, full attention / plain compiled loop",
        ".22 with teacher",
        ".80",
        _ratio("30m-2048", FULL),
    ),
    Bar("the same with a teacher", ".22", ".60", _ratio("30m-2048", f"{FULL}, teacher")),
    Bar(
        "layout of a quarter of the heads / full attention, T 8,192",
        "-",
        "1.3",
        _ratio("30m-8192", LAYOUT, FULL),
    ),
    Bar("the same, T 32,768", "-", "1.8", _ratio("30m-32768", LAYOUT, FULL)),
    Bar(
        "SP-KV, hard gates at .25 / full attention, T 8,192",
        "-",
        "1.2",
        _ratio("30m-8192", HARD, FULL),
    ),
    Bar("soft gates / cuDNN, T 8,192", ".69", ".85", _kernel("gates-8192", f"soft {HEADS}8192")),
    Bar("the same, T 32,768", ".70", ".85", _kernel("gates-32768", f"soft {HEADS}32768")),
    Bar(
        "hard gates at .25 / cuDNN, T 8,192",
        "1.46",
        "1.7",
        _kernel("gates-8192", f"hard {HEADS}8192, 0.25, independent"),
    ),
    Bar(
        "hard gates at .11 / cuDNN, T 8,192",
        "2.10",
        "2.6",
        _kernel("gates-8192", f"hard {HEADS}8192, 0.11, independent"),
    ),
    Bar(
        "windows of 512 alone, time per token at T 32,768 / at 8,192", "-", "0.9 to 1.1", _per_token
    ),
    Bar(
        "head gates of the 30 M model, whole process",
        "45 s",
        "20 s",
        _process("head-gates-30m"),
        " s",
    ),
    Bar("auto on SmolLM2 at 8,192 tokens, default margin", "-", "180 s", _process("auto"), " s"),
)


def bars(figures: Figures) -> Iterator[str]:
    """Yield the lines of the table of bars; "-" where nothing was measured."""
    yield "| | last measured (H100, 827e6ca) | bar | measured |"
    yield "|---|---|---|---|"
    for bar in BARS:
        try:
            measured = f"{bar.measure(figures):.2f}{bar.unit}"
        except LookupError:
            measured = "-"
        yield f"| {bar.what} | {bar.last} | {bar.bar} | {measured} |"


def tables(figures: Figures) -> Iterator[str]:
    """Yield a table of all figures of every step."""
    for step, rows in figures.items():
        if not rows:
            continue
        yield f"\n**{step}**\n\n| | value | more |\n|---|---|---|"
        for row in rows:
            more = {
                name: value for name, value in row.items() if name not in ("name", "value", "unit")
            }
            value = "-" if row["value"] is None else f"{row['value']:,.4g}"
            yield f"| {row['name']} | {value} {row['unit']} | {json.dumps(more) if more else ''} |"
