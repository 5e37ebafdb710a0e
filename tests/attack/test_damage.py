"""Flip bits and cut files in every kind of file of a workspace, and run the command that reads it.

Allowed are the undisturbed result, a clear error, and another result with a warning that names the file: tables and
layouts may be edited, so what has changed is read. Another result without a word is a failure.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from attack.arena import Arena, Expected, Run
from attack.commands import COMMANDS, TEXT, Command
from attack.recover import is_clear_error
from attack.tally import Round, Tally

FLIPS, CUTS = 40, 12  # of each kind of file


@dataclass(frozen=True)
class Case:
    """Files to damage, and the command that reads them.

    Attributes:
        state: the command after which the workspace is as wanted.
        files: patterns of those that are damaged.
        removed: patterns of what is removed first, so that the reader has work to do.
        reader: the command.
        killed: the state is that of ``state`` killed before the first operation whose path matches this.
        printed: the result is what the command prints, beside its files.
    """

    state: str
    files: tuple[str, ...]
    removed: tuple[str, ...]
    reader: Command
    killed: str = ""
    printed: bool = False


_RUNS = "w/runs/tiny"
_TRAIN, _PROBE, _HYBRID, _REPORT = (
    COMMANDS[name] for name in ("train", "probe", "train-hybrid", "report")
)
_PAGE = (
    "w/reports/tiny/index.html",
    "w/reports/tiny/*.png",
    "w/reports/tiny/*.svg",
    "w/reports/tiny/*.pdf",
)
CASES = {
    "tokenizer and blocks": Case(
        "train",
        (f"{_RUNS}/tokenizer-*/*", f"{_RUNS}/blocks/**/*"),
        (f"{_RUNS}/dense-*", f"{_RUNS}/branches"),
        _TRAIN,
    ),
    "dense model": Case(
        "train", (f"{_RUNS}/dense-*/final/*",), (f"{_RUNS}/branches", "w/reports"), _TRAIN
    ),
    "dense checkpoint": Case(
        "train",
        (f"{_RUNS}/dense-*/checkpoint-3/*",),
        (
            f"{_RUNS}/dense-*/final",
            f"{_RUNS}/dense-*/checkpoint-6",
            f"{_RUNS}/branches",
            "w/reports",
        ),
        _TRAIN,
    ),
    "branch checkpoint": Case(
        "train",
        (f"{_RUNS}/branches/*/checkpoint-*/*",),
        (),
        _TRAIN,
        killed=r"branches/.*/\S*checkpoint-9/",
    ),
    "reference": Case("train", (f"{_RUNS}/branches/sp-kv-*/final/*",), (), _PROBE),
    "branches": Case("train-hybrid", (f"{_RUNS}/branches/*/final/*",), ("w/reports",), _HYBRID),
    "zero-shot scores": Case("train-hybrid", (f"{_RUNS}/zero-shot/**/*",), ("w/reports",), _HYBRID),
    "probe, proposed from": Case(
        "propose", ("w/probes/tiny/*",), ("w/layouts",), COMMANDS["propose"]
    ),
    "probe, at another tau": Case(
        "propose",
        ("w/probes/tiny/*",),
        ("w/layouts",),
        replace(
            COMMANDS["propose"],
            name="propose-tau",
            words=(*COMMANDS["propose"].words, "--tau", "0.4"),
        ),
    ),
    "probe, reported": Case("report", ("w/probes/tiny/*",), _PAGE, _REPORT),
    "layouts": Case("report", ("w/layouts/tiny/*", "w/layouts/tiny/search/*"), _PAGE, _REPORT),
    "layout, scored": Case(
        "score",
        ("w/layouts/tiny/densest.yaml",),
        ("w/reports", f"{_RUNS}/zero-shot"),
        COMMANDS["score"],
    ),
    "tables of reports": Case(
        "report", ("w/reports/tiny/*.csv", "w/reports/tiny/*.yaml"), _PAGE, _REPORT
    ),
    "search": Case(
        "search",
        (f"{_RUNS}/search/**/*",),
        ("w/reports/tiny/search*", "w/layouts/tiny/search"),
        COMMANDS["search"],
    ),
    "ablations": Case(
        "ablate", ("w/runs/tiny-ablations/branches/*/final/*",), ("w/reports",), COMMANDS["ablate"]
    ),
    "palindrome": Case(
        "palindrome", ("w/runs/palindrome/*/final/*",), ("w/reports",), COMMANDS["palindrome"]
    ),
    "export": Case(
        "export",
        ("out/*",),
        (),
        Command("evaluate-export", ("evaluate", "--model", "out", *TEXT)),
        printed=True,
    ),
    "calibration": Case(
        "calibrate",
        ("w/reports/tiny/calibration.*",),
        (),
        Command(
            "plan-attention",
            ("plan", "attention", "micro-3", "--context", "64", "--calibration", "tiny"),
        ),
        printed=True,
    ),
}

# Whose first round ``python -m spkv_nas`` reads
OWN_PROCESS = (
    "dense checkpoint",
    "probe, proposed from",
)


@pytest.mark.parametrize("name", CASES)
def test_damage(
    name: str, arena: Arena, attack: Callable[[str], AbstractContextManager[Tally]]
) -> None:
    case = CASES[name]
    with attack(f"damage {name}") as tally:
        state, expected = prepare(arena, name, case)
        files = one_of_each_kind(state, case)
        tally.counts["kinds"] = len(files)
        assert files, f"no files {case.files}"
        hurts = [(file, cut) for file in files for cut in [False] * FLIPS + [True] * CUTS]
        Random(f"{arena.seed} {name}").shuffle(hurts)
        for round_ in arena.rounds(tally, len(hurts)):
            file, cut = hurts[round_.number % len(hurts)]
            arena.reset(state)
            story = f"{file.name}: {hurt(arena.ground / file, cut, round_.random)}, read by {case.reader.name}"
            separate = round_.number == 0 and name in OWN_PROCESS
            judge(round_, case, file, expected, arena.run(case.reader, forked=not separate), story)


def prepare(arena: Arena, name: str, case: Case) -> tuple[Path, Expected]:
    """Return the ground before the damage, and the reader's undamaged result."""
    state = arena.folder / "states" / f"damage {name}".replace(" ", "-")
    if case.killed:
        command = COMMANDS[case.state]
        point = next(
            o for o in arena.expected(command).operations if re.search(case.killed, o.path)
        )
        arena.reset(command.start)
        arena.run(command, kill_at=point.number)
    else:
        arena.reset(case.state)
    for pattern in case.removed:
        for path in arena.ground.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(state, ignore_errors=True)
    shutil.copytree(arena.ground, state)
    return state, arena.expected(case.reader, state)


def one_of_each_kind(state: Path, case: Case) -> list[Path]:
    """Return the first file of each kind, by path without hashes and names of variants, relative to the ground."""
    kinds: dict[str, Path] = {}
    for path in _matching(state, case.files):
        kind = re.sub(
            r"[0-9a-f]{12,}|(?<=branches/)[^/]*|(?<=palindrome/)[^/]*|(density|random)-\d-\d",
            "*",
            str(path),
        )
        kinds.setdefault(kind, path)
    return list(kinds.values())


def _matching(state: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        for path in sorted(state.glob(pattern)):
            if path.is_file() and path.stat().st_size and not path.name.startswith("."):
                yield path.relative_to(state)


def hurt(file: Path, cut: bool, random: Random) -> str:
    """Flip a bit or cut off the end; return a description. A layout's strategy may be renamed, so it is left alone."""
    content = bytearray(file.read_bytes())
    if cut:
        length = random.randrange(len(content))
        file.write_bytes(content[:length])
        return f"cut to {length} of {len(content)} bytes"
    name = re.search(rb"\nstrategy: .*", content)
    renamed = range(*name.span()) if name else range(0)
    position = random.choice([i for i in range(len(content)) if i not in renamed])
    bit = random.randrange(8)
    content[position] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {position} of {len(content)} flipped"


def judge(round_: Round, case: Case, file: Path, expected: Expected, run: Run, story: str) -> None:
    """Check that the reader's response is allowed."""
    round_.note("rounds")
    wrong = [
        line for line in round_.arena.differences(expected) if line.split(" ", 1)[1] != str(file)
    ]
    if case.printed and run.out != expected.run.out:
        wrong.append("differs standard output")
    named = re.sub(r"\s+", "", run.err)
    if is_clear_error(run):
        round_.note("refused")
    elif run.status != 0 or run.has_traceback:
        round_.fail("hung" if run.status is None else "traceback", story, run)
    elif not wrong:
        round_.note("same")
    elif "warning" in named.lower() and file.name in named:
        round_.note("warned")
    else:
        round_.fail("changed without a word", story, run, wrong)
