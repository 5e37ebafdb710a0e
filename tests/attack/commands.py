"""Define the commands under attack, and the workspace states that they start from.

Every command runs in one folder, the ground, with the project in ``project`` and the workspace in ``w``, all as
relative paths, so that no result names the place where it was made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from helpers import RECIPE, write_project
from sampled_cases import write_model

ATTACK_RECIPE = RECIPE.replace("branch: {steps: 8", "branch: {steps: 12")
# Of the dense model, and of a branch with soft gates and in all
DENSE_STEPS = 6
SOFT_STEPS = 9
STEPS = 12
ABLATIONS = """\
name: tiny-ablations
recipe: recipe.yaml
rows:
  baseline: {}
  local: {layout: local.yaml}
"""
LOCAL = "format: spkv-nas/layout/1\nwindow: 8\nheads: [LL, GL]\nstrategy: local\n"
TEXT = ("--data", "project/text", "--context", "32", "--max-tokens", "2000")


@dataclass(frozen=True)
class Command:
    """A command of the program, and how the attack treats it.

    Attributes:
        words: its arguments; ``{dense}`` and ``{reference}`` stand for the checkpoints of the recipe's runs.
        start: the state it starts from: "empty", or the name of the command that made it.
        reader: the command that reads its result, to be run when this one was killed; "" for none.
        grows: whether it writes its result row by row, so that readers may see less than all.
        trains: whether it trains.
        once: whether it refuses to write over its finished result.
    """

    name: str
    words: tuple[str, ...]
    start: str = "empty"
    reader: str = ""
    grows: bool = False
    trains: bool = False
    once: bool = False

    def arguments(self, ground: Path) -> list[str]:
        """Return the command-line arguments, with checkpoints inserted."""
        runs = ground / "w" / "runs" / "tiny"
        places = {
            "{dense}": lambda: next(runs.glob("dense-*/final")),
            "{reference}": lambda: next(runs.glob("branches/sp-kv-*/final")),
        }
        words = [
            str(places[word]().relative_to(ground)) if word in places else word
            for word in self.words
        ]
        return words if self.name == "export" else [*words, "--workspace", "w"]


_RECIPE = "project/recipe.yaml"
_PROPOSE = ("propose", "--probe", "tiny", "--num-random", "1", "--budget")
_SEARCH = ("--max-tokens", "1280", "--budget", "2")
_EFFORT = ("--trials", "12", "--retrain", "1")
_AUTO = ("--out", "out", "--context", "64", "--margin", "nll=40%", "--memory", "40%,80%")
_LAYOUTS = ("w/layouts/tiny/densest.yaml", "w/layouts/tiny/sparsest.yaml")
COMMANDS = {
    command.name: command
    for command in (
        Command("train", ("train", _RECIPE), trains=True),
        Command("probe", ("probe", _RECIPE), "train", reader="propose"),
        Command("probe-again", ("probe", _RECIPE, "--tau", "0.3"), "probe", reader="propose"),
        Command(
            "probe-checkpoint",
            ("probe", "--model", "{reference}", "--name", "mine", *TEXT),
            "probe",
        ),
        Command(
            "probe-frozen",
            (
                "probe",
                "--model",
                "{dense}",
                "--name",
                "frozen",
                "--signal",
                "density",
                "--steps",
                "25",
                *TEXT,
            ),
            "train",
        ),
        Command("propose", (*_PROPOSE, "2"), "probe", reader="report"),
        Command("propose-again", (*_PROPOSE, "1"), "propose", reader="report"),
        Command(
            "train-hybrid",
            ("train-hybrid", "w/layouts/tiny/densest.yaml", "--probe", "tiny", "--recipe", _RECIPE),
            "propose",
            reader="report",
            grows=True,
            trains=True,
        ),
        Command(
            "ablate", ("reproduce", "ablate", "project/ablations.yaml"), grows=True, trains=True
        ),
        Command(
            "palindrome",
            ("reproduce", "palindrome", "--steps", "4", "--batch-size", "4"),
            grows=True,
            trains=True,
        ),
        Command(
            "search",
            ("search", "--recipe", _RECIPE, "--probe", "tiny", *_SEARCH, *_EFFORT),
            "train-hybrid",
            reader="report",
            grows=True,
            trains=True,
        ),
        Command(
            "score",
            ("score", *_LAYOUTS, "--model", "{dense}", "--probe", "tiny", *TEXT),
            "search",
            reader="report",
        ),
        Command(
            "evaluate",
            (
                "evaluate",
                "nll",
                "--model",
                "{reference}",
                "--name",
                "tiny",
                "--taus",
                "0.2,0.6",
                *TEXT,
            ),
            "train",
        ),
        Command("compare", ("compare", "tiny", "mine", "--budget", "2"), "probe-checkpoint"),
        Command("report", ("report", "--probe", "tiny"), "score"),
        Command(
            "export",
            ("export", "w/layouts/tiny/densest.yaml", "--model", "{dense}", "--out", "out"),
            "propose",
            once=True,
        ),
        Command("auto", ("auto", "project/sampled", "project/sampled.jsonl", *_AUTO)),
        Command("scaling", ("reproduce", "scaling")),
        Command(
            "calibrate",
            ("calibrate", "micro-3", "--context", "64", "--window", "8", "--name", "tiny"),
        ),
    )
}


def write_ground(ground: Path) -> None:
    """Write the project to a new folder, without a workspace."""
    ground.mkdir(parents=True)
    write_project(ground / "project", ATTACK_RECIPE)
    (ground / "project" / "local.yaml").write_text(LOCAL)
    (ground / "project" / "ablations.yaml").write_text(ABLATIONS)
    documents = write_model(ground / "project" / "sampled", 64, 120)
    lines = [json.dumps({"text": document}) for document in documents]
    (ground / "project" / "sampled.jsonl").write_text("\n".join(lines))
