"""Run what only a GPU can show, in pieces that fit into calls of ten minutes, and write tables of it.

    python reports/gpu/measure.py --smollm2 SMOLLM2 --small LLAMA_30M --text TEXT --out OUT    # until nothing is left
    python reports/gpu/measure.py ... --only training-speed kernels-speed
    python reports/gpu/measure.py ... --dry-run         # the commands and their limits
    python reports/gpu/measure.py ... --rehearse        # everything with tiny shapes on a CPU

OUT receives ``results.json`` (machine and steps), ``results.csv`` (all figures), ``summary.md`` (the tables), layouts
and tables of scores in ``tables/``, the output of every command in ``logs/``, and a workspace in ``work/``. A step that
is done is not repeated, one that failed only with ``--again``. README.md beside this file says what is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from figures import Figures, bars, tables
from pieces import PIECES, ROOT, TOKENS_PER_STEP, Settings, Step, steps

GRACE = 20.0  # seconds that a command has to write what it needs to go on, before it is killed
TAIL_LINES = 12  # of a command's output that results.json keeps
STEP_RANGE = (20, 200)  # training steps of retraining
RUNS = 6  # retrained models of the study that full steps are for: the control, four layouts, the reference model
RETRAINED = "@retrained"
SPEED_STEP, SPEED_CASE = "training-speed/smollm2-8192", "layout, a quarter global, teacher"


def machine(commit: str | None) -> dict[str, str]:
    """Return the names and versions to record with the figures."""
    import torch

    from spkv_nas.base.version import environment

    facts = dict(environment())
    facts["commit"] = commit or facts["commit"]
    facts["cpu"] = _processor()
    facts["cores"] = str(os.cpu_count())
    facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    try:
        facts["triton"] = __import__("triton").__version__
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (ImportError, OSError, subprocess.CalledProcessError):
        facts.setdefault("triton", "none")
        facts["driver"] = "none"
    return facts


def _processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


class Results:
    """Keep the steps that have run in ``results.json``, and write the tables."""

    def __init__(self, out: Path) -> None:
        """Read what earlier calls have written."""
        self.out = out
        self.file = out / "results.json"
        content = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.machine: dict[str, str] = content.get("machine", {})
        self.steps: dict[str, dict[str, Any]] = content.get("steps", {})
        # Chosen once: recipes name them
        self.training_steps: int | None = content.get("training_steps")

    @property
    def figures(self) -> Figures:
        """Return the figures of all steps that have some."""
        return {name: step["figures"] for name, step in self.steps.items()}

    def write(self) -> None:
        """Write all files; an interruption leaves the old or the new ones."""
        content = {
            "machine": self.machine,
            "training_steps": self.training_steps,
            "steps": self.steps,
        }
        text = json.dumps(content, indent=1)
        unfinished = self.file.with_suffix(".new")
        unfinished.write_text(text)
        unfinished.replace(self.file)
        rows = [
            {"step": name, **figure} for name, figures in self.figures.items() for figure in figures
        ]
        pd.DataFrame(rows).to_csv(self.out / "results.csv", index=False)
        lines = [
            ", ".join(f"{name} {value}" for name, value in self.machine.items()),
            "",
            *bars(self.figures),
        ]
        states = (
            f"| {name} | {step['status']} | {step['seconds']:.0f} s |"
            for name, step in self.steps.items()
        )
        answer = self.steps.get("auto-smollm2/auto", {}).get("tail", [])
        lines += ["", "```text", *answer, "```"] if answer else []
        lines += ["", "| step | | time |", "|---|---|---|", *states, *tables(self.figures)]
        (self.out / "summary.md").write_text("\n".join(lines) + "\n")


def chosen_steps(results: Results, seconds: float) -> int:
    """Return the training steps that retraining has time for, by the speed measured; 200, the most, if none was.

    Text and recipes are written with this number, so that it stays once they are there.
    """
    if results.training_steps is not None and "study/prepare" in results.steps:
        return results.training_steps
    rows = {row["name"]: row for row in results.figures.get(SPEED_STEP, [])}
    if SPEED_CASE not in rows:
        return STEP_RANGE[1]
    of_step = TOKENS_PER_STEP / rows[SPEED_CASE]["value"]
    return int(min(max(seconds / (RUNS * of_step), STEP_RANGE[0]), STEP_RANGE[1]))


def expanded(command: list[str], settings: Settings) -> list[str]:
    """Replace ``RETRAINED`` by the checkpoints that ``train-hybrid`` wrote."""
    if RETRAINED not in command:
        return command
    table = pd.read_csv(settings.retrained)
    place = command.index(RETRAINED)
    checkpoints = [str(settings.work / path) for path in table["checkpoint"]]
    return [*command[:place], *checkpoints, *command[place + 1 :]]


def run(step: Step, settings: Settings, seconds: float) -> dict[str, Any]:
    """Run a step for at most this time, and return its record."""
    command = expanded(step.command, settings)
    for folder in step.folders:
        shutil.rmtree(folder, ignore_errors=True)
    log = settings.out / "logs" / f"{step.piece}.{step.name}"
    log.parent.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    start = time.monotonic()
    with (
        log.with_name(log.name + ".out").open("w") as out,
        log.with_name(log.name + ".err").open("w") as err,
    ):
        options: dict[str, Any] = {
            "stdout": out,
            "stderr": err,
            "start_new_session": True,
            "cwd": settings.out,
        }
        process = subprocess.Popen(command, env={**os.environ, **variables}, **options)
        try:
            code: int | None = process.wait(max(1.0, seconds - GRACE))
        except subprocess.TimeoutExpired:
            code = None
            _stop(process)
        except BaseException:
            _stop(process)
            raise
    spent = time.monotonic() - start
    status = "stopped" if code is None else "done" if code in step.accepts else "failed"
    record: dict[str, Any] = {
        "status": status,
        "seconds": round(spent, 1),
        "code": code,
        "limit": round(seconds),
    }
    record["command"] = [part.replace(str(ROOT), ".") for part in command]
    for file in filter(Path.exists, step.keeps):
        kept = settings.out / "tables" / f"{step.piece}.{step.name}.{file.name}"
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, kept)
    output = log.with_name(log.name + ".out").read_text(errors="replace")
    record["tail"] = output.splitlines()[-TAIL_LINES:]
    try:
        record["figures"] = (
            step.read(output, spent) if status == "done" or step.piece in READ_UNFINISHED else []
        )
    except (ValueError, LookupError, TypeError) as error:
        record |= {"status": "failed", "figures": [], "error": f"{type(error).__name__}: {error}"}
    return record


# Whose output has a line for each figure
READ_UNFINISHED = (
    "kernels-speed",
    "kernels-tests",
    "eight-b",
)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a command and its children, and kill them if they go on."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_left(step: Step, record: dict[str, Any] | None, *, again: bool) -> bool:
    """Return whether a step is to run: it has not, or was stopped by the end of a call, or can go on."""
    if record is None:
        return True
    if record["status"] in ("failed", "missing"):
        return again or record["status"] == "missing"
    goes_on = "spkv_nas" in step.command or record["limit"] < step.limit
    return record["status"] == "stopped" and (goes_on or again)


def left(
    settings: Settings, options: argparse.Namespace, results: Results
) -> Iterator[tuple[str, Step]]:
    """Yield the names of steps, and the steps, that are selected and to run."""
    for step in steps(settings):
        name = f"{step.piece}/{step.name}"
        if step.piece in options.only and is_left(
            step, results.steps.get(name), again=options.again
        ):
            yield name, step


def work_through(
    settings: Settings, options: argparse.Namespace, results: Results, deadline: float
) -> None:
    """Run the steps that are left, in order, until ``deadline``; a piece waits for a step that has no time."""
    waiting: set[str] = set()
    for name, step in left(settings, options, results):
        remaining = deadline - time.monotonic()
        if step.piece in waiting:
            continue
        if remaining < step.needed + GRACE:
            print(
                f"{name}: needs {step.needed} s, {remaining:.0f} s are left of this call",
                flush=True,
            )
            waiting.add(step.piece)
            continue
        missing = [file for file in step.requires if not file.exists()]
        record: dict[str, Any] = {"status": "missing", "seconds": 0.0, "limit": 0, "figures": []}
        if missing:
            record["error"] = f"no {missing[0]}"
        else:
            record = run(step, settings, min(step.limit + GRACE, remaining))
        results.steps[name] = record
        results.write()
        print(f"{name}: {record['status']} after {record['seconds']:.0f} s", flush=True)
        if record["status"] in ("stopped", "missing"):
            waiting.add(step.piece)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smollm2", type=Path, required=True, help="folder of SmolLM2-135M-Instruct"
    )
    parser.add_argument(
        "--small", type=Path, required=True, help="folder of the Llama of 30 M parameters"
    )
    parser.add_argument(
        "--text", type=Path, required=True, help="folder with a JSON Lines file for each domain"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument(
        "--minutes", type=float, default=9.5, help="minutes that this call may take"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PIECES, default=PIECES, metavar="PIECE", help=", ".join(PIECES)
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="steps of retraining (default: as many as --retraining has time for)",
    )
    parser.add_argument(
        "--retraining",
        type=float,
        default=8.0,
        help="minutes for retraining, from which steps follow",
    )
    parser.add_argument("--commit", help="commit to record, where there is no git")
    parser.add_argument("--again", action="store_true", help="repeat steps that failed")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands and their limits"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run steps until the time is up; return 0 if none is left, 2 if some are, and 1 if some failed."""
    deadline = time.monotonic()
    options = parse(arguments)
    deadline += 60.0 * options.minutes
    out = options.out.absolute()
    settings = Settings(
        options.smollm2.absolute(), options.small.absolute(), options.text.absolute(), out
    )
    if options.rehearse:
        settings = replace(settings, rehearses=True, steps=2, context=256)
    if options.dry_run:
        for step in steps(settings):
            if step.piece in options.only:
                print(f"{step.piece}/{step.name}, at most {step.limit} s: {' '.join(step.command)}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out)
    results.machine = machine(options.commit)
    if results.machine["gpu"] == "none" and not options.rehearse:
        raise SystemExit("no GPU: --rehearse tries the commands with tiny shapes")
    if not options.rehearse:
        results.training_steps = options.steps or chosen_steps(results, 60.0 * options.retraining)
        settings = replace(settings, steps=results.training_steps)
    work_through(settings, options, results, deadline)
    results.write()
    print((out / "summary.md").read_text())
    failed = any(record["status"] in ("failed", "missing") for record in results.steps.values())
    options.again = False
    return 2 if any(left(settings, options, results)) else int(failed)


if __name__ == "__main__":
    sys.exit(main())
