"""Count how large the project is: lines, files, options, tests. ``python tests/product/size.py`` prints the table.

``BUDGETS`` holds the largest count that is allowed of each (the smallest of comments); ``test_structure.py`` compares.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from spkv_nas.cli.app import app

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "spkv_nas"
COMMANDS = ("stages", "commands", "cli")  # packages that hold commands
SHARED_OPTIONS = ("help", "json", "workspace", "device", "quiet", "verbose", "debug")  # declared once for all commands

# Budgets only fall: lower one with its count; raising one needs a line in CHANGELOG.md that says what it buys
BUDGETS: dict[str, float] = {
    "lines": 48_934,
    "lines without contrib": 41_636,
    "files": 289,
    "files without contrib": 242,
    "lines of commands": 6_685,
    "files of commands": 55,
    "option slots": 230,
    "option slots of one command": 20,
    "imports in 100 lines": 7.0,
    "comments in 1,000 lines": 28.0,  # lines that hold nothing else; at least, not at most
    "tracked files": 788,
    "lines of tests": 42_184,
    "quick test items": 3_601,
}
AT_LEAST = ("comments in 1,000 lines",)


def modules(folder: Path, *, contrib: bool = True) -> list[Path]:
    """Return every Python file below a folder, with or without those of ``contrib``."""
    return [file for file in sorted(folder.rglob("*.py")) if contrib or "contrib" not in file.relative_to(ROOT).parts]


def num_lines(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


@cache
def nodes(file: Path) -> list[ast.stmt | ast.Call]:
    """Return the imports, functions and calls of ``import_module`` in a file."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, kinds) or (isinstance(node, ast.Call) and _name(node.func) == "import_module")
    ]


def _name(function: ast.expr) -> str:
    """Return the last part of the name of a function that is called."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def num_import_lines(file: Path) -> int:
    """Return the number of lines that import statements take, those in functions and for types included."""
    imports = [node for node in nodes(file) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)


def num_comments(file: Path) -> int:
    """Return the number of lines that hold a comment and nothing else."""
    return sum(line.lstrip().startswith("#") for line in file.read_text().splitlines())


@cache
def options() -> dict[str, list[str]]:
    """Return the names of each command's own options, by command.

    Arguments are not options, and those of ``SHARED_OPTIONS`` are no command's own. An option that several commands
    take counts once in each.
    """
    return {
        name: [
            parameter.name
            for parameter in command.get_params(context)
            if parameter.param_type_name == "option" and parameter.name not in SHARED_OPTIONS
        ]
        for name, command, context in _commands("", typer.main.get_command(app), None)
    }


def _commands(name: str, command: Any, parent: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, command, context) of a command, or of all commands of a group. Groups import some on request."""
    context = command.context_class(command, info_name=name, parent=parent)
    if not hasattr(command, "list_commands"):
        yield name, command, context
        return
    for part in command.list_commands(context):
        yield from _commands(f"{name} {part}".strip(), command.get_command(context, part), context)


def counts() -> dict[str, float]:
    """Return all counts of ``BUDGETS`` but that of test items, which takes a collection by pytest."""
    files, core = modules(PACKAGE), modules(PACKAGE, contrib=False)
    commands = [file for name in COMMANDS for file in modules(PACKAGE / name)]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {
        "lines": num_lines(files),
        "lines without contrib": num_lines(core),
        "files": len(files),
        "files without contrib": len(core),
        "lines of commands": num_lines(commands),
        "files of commands": len(commands),
        "option slots": sum(map(len, options().values())),
        "option slots of one command": max(map(len, options().values())),
        "imports in 100 lines": round(100 * sum(map(num_import_lines, files)) / num_lines(files), 1),
        "comments in 1,000 lines": round(1000 * sum(map(num_comments, files)) / num_lines(files), 1),
        "tracked files": len(tracked.splitlines()),
        "lines of tests": num_lines(modules(ROOT / "tests")),
    }


def num_quick_items() -> int:
    """Return the number of tests that ``make test`` runs."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", "-m", "not slow"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sum("::" in line for line in output.splitlines())


def main() -> None:
    """Print every count beside its budget, and the commands with the most options."""
    found = {**counts(), "quick test items": num_quick_items()}
    print(f"{'':30}{'now':>10}{'budget':>10}")
    for name, budget in BUDGETS.items():
        least = " at least" if name in AT_LEAST else ""
        print(f"{name:30}{found[name]:10,.10g}{budget:10,.10g}{least}")
    most = sorted(options().items(), key=lambda row: -len(row[1]))[:5]
    print("Most options:", ", ".join(f"{name} {len(own)}" for name, own in most))


if __name__ == "__main__":
    main()
