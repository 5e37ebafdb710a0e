"""Test the structure: packages import from lower layers only, functions stay short, and options few."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer
from paths import ROOT

from spkv_nas.cli.app import app

FLOORS = (
    ("base", "kernels"),
    ("artifacts", "engines"),
    ("cost",),
    ("data", "model"),
    ("evaluation", "proposal"),
    ("probing",),
    ("training", "report", "serving"),
    ("stages",),
    ("cli",),
    ("__main__",),
    ("contrib",),  # above all: nothing imports it
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS, 1) for room in rooms}
STAGES = ROOT / "spkv_nas" / "stages"
MAX_FUNCTION_LINES = 60
MAX_FUNCTION_STATEMENTS = 40
MAX_PARAMETERS = 15
# An option of several commands counts once in each. More than these takes a reason that is worth every reader's time.
MAX_OPTIONS = 236
MAX_OPTIONS_OF_A_COMMAND = 20
# Declared once for all commands
SHARED_OPTIONS = (
    "help",
    "json",
    "workspace",
    "device",
    "quiet",
    "verbose",
    "debug",
)


@cache
def nodes(file: Path) -> list[ast.stmt | ast.Call]:
    """Return the imports, functions and calls of ``import_module`` in a file."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, kinds)
        or (isinstance(node, ast.Call) and _name(node.func) == "import_module")
    ]


def _name(function: ast.expr) -> str:
    """Return the last part of the name of a function that is called."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def options() -> dict[str, list[str]]:
    """Return the names of each command's own options, by command. Arguments are not options."""
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


def sources() -> list[Path]:
    """Return every module of the package and of the kernels, including benchmarks."""
    return sorted([*(ROOT / "spkv_nas").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])


def room(module: str) -> str:
    """Return the top-level package of a module's dotted name; "" for ``spkv_nas`` itself."""
    package, _, rest = module.partition(".")
    return "kernels" if package == "spkv_kernels" else rest.partition(".")[0]


def home(file: Path) -> str:
    """Return the top-level package of a file."""
    path = file.relative_to(ROOT)
    return (
        "kernels"
        if path.parts[0] == "kernels"
        else path.parts[1].removesuffix(".py").replace("__init__", "")
    )


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import of this project, including those in functions and for types only."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("spkv_nas", "spkv_kernels"):
                yield node.lineno, name


def imports_by_name(file: Path) -> Iterator[str]:
    """Yield every module of this project that is imported by a string."""
    for node in nodes(file):
        if isinstance(node, ast.Call):
            yield from (
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def is_upward(origin: str, target: str) -> bool:
    """Return whether an import is forbidden: from the same layer, a higher one, or ``spkv_nas`` itself.

    The face itself, "", stands on top.
    """
    return origin != target and (
        target not in FLOOR or FLOOR[target] >= FLOOR.get(origin, len(FLOORS) + 1)
    )


def test_every_package_has_a_layer() -> None:
    packages = {home(file) for file in sources()} - {""}
    assert packages == set(FLOOR)
    flat = {path.name for path in (ROOT / "spkv_nas").iterdir() if path.is_file()}
    assert flat == {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}


def test_imports_go_down() -> None:
    upward = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in sources()
        for line, name in imports(file)
        if is_upward(home(file), room(name))
    ]
    assert not upward, "\n".join(upward)


def test_nothing_outside_contrib_names_its_modules() -> None:
    """Only entry points do (``pyproject.toml``): it is added like a package of somebody else."""
    files = [
        file for file in [*sources(), ROOT / "spkv_nas/__init__.pyi"] if home(file) != "contrib"
    ]
    name = re.compile(r"""\.contrib\b|["']contrib""")
    naming = [str(file.relative_to(ROOT)) for file in files if name.search(file.read_text())]
    assert not naming, "\n".join(naming)


def test_no_import_by_name_goes_up() -> None:
    upward = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sources()
        for name in imports_by_name(file)
        if is_upward(home(file), room(name))
    ]
    assert not upward, "\n".join(upward)


def test_upward_imports_are_detected() -> None:
    upward = {("stages", "cli"), ("report", "training"), ("__main__", "contrib")}
    downward = {("cli", "stages"), ("model", "kernels"), ("", "base"), ("contrib", "cli")}
    assert {pair for pair in upward | downward if is_upward(*pair)} == upward


def test_no_cycle_between_files() -> None:
    """Imports inside functions count. Exempt are packages' ``__init__.py``."""
    files = {module(file): file for file in sources() if file.name != "__init__.py"}

    def targets(file: Path) -> set[str]:
        """Return the modules that a file imports."""
        names = {full for _, full in imports(file)}
        return {name for full in names for name in (full, full.rpartition(".")[0]) if name in files}

    left = {name: targets(file) for name, file in files.items()}
    while free := [name for name, names in left.items() if not names & left.keys()]:
        for name in free:
            del left[name]
    assert not left, "\n".join(f"{name}: {names & left.keys()}" for name, names in left.items())


def command_of(file: Path) -> str:
    """Return the command that a module of ``stages/`` runs, such as "evaluate/nll"; "" for one that is shared.

    Modules of ``options/`` declare and check options, and run nothing.
    """
    path = file.relative_to(STAGES)
    if path.parts[0] == "options":
        return ""
    for folder in path.parents[:-1]:
        if (STAGES / folder / "command.py").exists():
            return folder.as_posix()
    run = re.search(
        r"^def \w+\(\s*options: \S+Options, reporter: \S+(\)|[^)]*\) -> \S*Result)",
        file.read_text(),
        re.M,
    )
    return path.with_suffix("").as_posix() if run else ""


def test_no_module_of_stages_imports_a_command() -> None:
    """A command is run by the command line alone: neither shared modules nor other commands import it."""
    files = {module(file): file for file in STAGES.rglob("*.py")}
    found = set()
    for file in files.values():
        names = {
            name
            for _, full in imports(file)
            for name in (full, full.rpartition(".")[0])
            if name in files
        }
        origin, targets = command_of(file), {command_of(files[name]) for name in names} - {""}
        found |= {(origin or file.stem, target) for target in targets - {origin}}
    assert not found


def test_commands_are_recognised() -> None:
    found = {command_of(file) for file in STAGES.rglob("*.py")}
    assert {
        "",
        "probe",
        "layout",
        "generate",
        "evaluate/nll",
        "train_hybrid",
        "verdict",
        "report",
        "plan",
    } <= found
    assert not found & {"subject", "options", "evaluate", "python_api", "flags"}


def module(file: Path) -> str:
    """Return the dotted name of a file."""
    path = file.relative_to(ROOT).with_suffix("")
    return ".".join(path.parts).removeprefix("kernels.")


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_statements(function: ast.AST) -> int:
    """Return the number of statements in a function, its docstring and those of nested functions included."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1


def test_functions_are_short() -> None:
    """Kernels are exempt: they read better in one piece."""
    long = [
        f"{file.name}:{node.lineno} {node.name}"
        for file in sources()
        if home(file) != "kernels"
        for node in functions(file)
        if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
        or num_statements(node) > MAX_FUNCTION_STATEMENTS
    ]
    assert not long, "\n".join(long)


def test_commands_take_few_parameters() -> None:
    for file in (ROOT / "spkv_nas" / "cli").glob("*.py"):
        for node in functions(file):
            assert len(node.args.args) + len(node.args.kwonlyargs) <= MAX_PARAMETERS, (
                f"{file.name}: {node.name}"
            )


def test_options_stay_few() -> None:
    counts = {name: len(own) for name, own in options().items()}
    many = [
        f"{name}: {count}" for name, count in counts.items() if count > MAX_OPTIONS_OF_A_COMMAND
    ]
    assert not many, "\n".join(many)
    assert sum(counts.values()) <= MAX_OPTIONS
