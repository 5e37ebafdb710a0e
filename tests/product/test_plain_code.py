"""Test how densely the package is written: syntax nodes a line, branches a function, and habits that hide a step.

What is counted cannot be met by joining lines, because syntax nodes stay the same. ``python
tests/product/test_plain_code.py`` prints the figures and the densest functions, which is where to begin.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest
from paths import ROOT

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)
NOT_COUNTED = (*IMPORTS, ast.alias, ast.expr_context)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.Assert, ast.comprehension)
MAX_COLUMNS = 100
MANY_BRANCHES = 10
MOST_BRANCHES = 15
# What the package had when they were set, and about 2 %
LIMITS = {
    "nodes per line of logic": 6.4,
    "lines of logic over 100 columns, per 1,000": 6.5,
    "functions of more than 10 branches, percent": 2.0,
    "functions of more than 15 branches": 2,
    "assignments of unrelated values in one statement, per 1,000 lines": 0.2,
    "keyword arguments from a dict built on the spot": 13,
    "conditional expressions inside others": 2,
    "uses of Any, per 1,000 lines": 14.7,
}


def num_branches(parts: list[ast.AST]) -> int:
    """Return one more than the branches of a function with these nodes, those of nested functions included."""
    total = 1
    for node in parts:
        if isinstance(node, BRANCHES):
            total += 1 + len(getattr(node, "ifs", []))  # of a comprehension
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
    return total


def num_nodes(nodes: list[ast.AST]) -> int:
    """Return the number of syntax nodes of a tree, of all its nodes; imports and docstrings do not count."""
    total = 0
    for node in nodes:
        if _is_text(node):
            total -= 1  # its constant
        elif not isinstance(node, NOT_COUNTED):
            total += 1
    return total


def _is_text(node: ast.AST) -> bool:
    """Return whether a statement is a string that nothing takes, as a docstring is."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def logic_lines(nodes: list[ast.AST], lines: list[str]) -> set[int]:
    """Return the numbers from 1 of the lines that are no import, docstring, comment or blank."""
    numbers = set()
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            numbers.add(number)
    for node in nodes:
        if isinstance(node, IMPORTS) or _is_text(node):
            numbers -= set(range(node.lineno, node.end_lineno + 1))
    return numbers


def is_pair(node: ast.AST) -> bool:
    """Return whether a statement assigns values to several names that none of the values reads."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    written = {name.id for name in target.elts if isinstance(name, ast.Name)}
    read = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    return not written & read


def num_splats(parts: list[ast.AST]) -> int:
    """Return how often a function with these nodes passes a dict that it builds as keyword arguments."""
    built = set()
    splats = [part for part in parts if isinstance(part, ast.keyword) and not part.arg]
    for part in parts:
        if isinstance(part, (ast.Assign, ast.AnnAssign)) and isinstance(part.value, ast.Dict):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            built |= {target.id for target in targets if isinstance(target, ast.Name)}
    names = [getattr(splat.value, "id", None) for splat in splats]
    on_the_spot = [splat for splat in splats if isinstance(splat.value, ast.Dict)]
    return len(on_the_spot) + sum(name in built for name in names)


def figures(files: list[Path]) -> dict[str, float]:
    """Return the figures that ``LIMITS`` limits."""
    counts: Counter[str] = Counter()
    for file in files:
        text = file.read_text()
        lines = text.splitlines()
        nodes = list(ast.walk(ast.parse(text)))
        logic = logic_lines(nodes, lines)
        counts["lines"] += len(logic)
        counts["nodes"] += num_nodes(nodes)
        counts["long"] += sum(len(lines[number - 1]) > MAX_COLUMNS for number in logic)
        for function in nodes:
            if not isinstance(function, FUNCTIONS):
                continue
            parts = list(ast.walk(function))
            branches = num_branches(parts)
            counts["functions"] += 1
            counts["many branches"] += branches > MANY_BRANCHES
            counts["most branches"] += branches > MOST_BRANCHES
            counts["splats"] += num_splats(parts)
        counts["pairs"] += sum(map(is_pair, nodes))
        for node in nodes:
            if isinstance(node, ast.Name):
                counts["any"] += node.id == "Any"
            elif isinstance(node, ast.IfExp):
                counts["chains"] += isinstance(node.orelse, ast.IfExp)
                counts["chains"] += isinstance(node.body, ast.IfExp)
    per_thousand = 1000 / counts["lines"]
    values = (
        counts["nodes"] / counts["lines"],
        counts["long"] * per_thousand,
        100 * counts["many branches"] / counts["functions"],
        counts["most branches"],
        counts["pairs"] * per_thousand,
        counts["splats"],
        counts["chains"],
        counts["any"] * per_thousand,
    )
    return dict(zip(LIMITS, values, strict=True))


def package() -> list[Path]:
    """Return the modules of the package."""
    return sorted((ROOT / "spkv_nas").rglob("*.py"))


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    """Figures of the package."""
    return figures(package())


@pytest.mark.parametrize("name", LIMITS)
def test_the_package_is_no_denser(measured: dict[str, float], name: str) -> None:
    assert measured[name] <= LIMITS[name], "unpack what you added; see this file's docstring"


def test_dense_code_is_detected(tmp_path: Path) -> None:
    """Each habit moves its figure."""
    plain = tmp_path / "plain.py"
    plain.write_text("def add(first, second):\n    total = first + second\n    return total\n")
    dense = tmp_path / "dense.py"
    branches = " or ".join(f"(x[{number}] if x else y)" for number in range(9))
    dense.write_text(
        "def add(x: Any, y: Any):\n"
        "    a, b = len(x), len(y)\n"
        "    c = 1 if a else 2 if b else 3\n"
        f"    d = {branches}\n"
        "    return add(**{'x': a, 'y': d})\n"
    )
    before = figures([plain])
    after = figures([dense])
    assert all(after[name] > before[name] for name in LIMITS)


def _densest(number: int) -> None:
    """Print the figures of the package, and its densest functions."""
    for name, value in figures(package()).items():
        print(f"{value:8.2f}  {name} (at most {LIMITS[name]:g})")
    found = []
    for file in package():
        lines = file.read_text().splitlines()
        nodes = list(ast.walk(ast.parse("\n".join(lines))))
        logic = logic_lines(nodes, lines)
        for function in nodes:
            if not isinstance(function, FUNCTIONS):
                continue
            size = len(logic & set(range(function.lineno, function.end_lineno + 1)))
            if size > 4:
                found.append(
                    (num_nodes(list(ast.walk(function))) / size, f"{file.name}:{function.lineno}")
                )
    for density, place in sorted(found, reverse=True)[:number]:
        print(f"{density:8.1f}  nodes a line in {place}")


if __name__ == "__main__":
    _densest(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
