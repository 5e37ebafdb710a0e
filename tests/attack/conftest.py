"""Add options and a summary for the attack, which only runs on request: ``pytest tests/attack -m attack``.

``--rounds P`` plays P percent of the full number (default 1, at least one round of each; 100: all), ``--attack-seed S``
chooses other moments, ``--round N`` plays one round again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from attack.arena import Arena
from attack.faults import compile_library
from attack.tally import Tally

_TALLIES = pytest.StashKey[list[Tally]]()
_HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attack")
    group.addoption(
        "--rounds", type=float, default=1.0, help="percent of the attack's full number of rounds"
    )
    group.addoption(
        "--attack-seed", type=int, default=0, help="of all that the attack chooses at random"
    )
    group.addoption(
        "--round", type=int, default=None, help="play this round of every attack, no other"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "attack: hurts the commands and looks at what is left; left out by default"
    )
    config.stash[_TALLIES] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    attacks = [item for item in items if item.path.is_relative_to(_HERE)]
    for item in attacks:
        item.add_marker("attack")
    if "attack" not in config.option.markexpr and attacks:
        config.hook.pytest_deselected(items=attacks)
        items[:] = [item for item in items if item not in attacks]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    tallies = config.stash.get(_TALLIES, [])
    if tallies:
        seed = config.getoption("--attack-seed", 0)
        terminalreporter.section(
            f"attack, seed {seed}, {config.getoption('--rounds', 1.0):g} % of the rounds"
        )
        for tally in tallies:
            terminalreporter.line(str(tally))


@pytest.fixture(scope="session")
def arena(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Arena]:
    """Arena of the session."""
    folder = tmp_path_factory.mktemp("arena")
    library = compile_library(folder)
    if library is None:
        pytest.skip("there is no gcc to compile faults.c with")
    option = request.config.getoption
    made = Arena(
        folder,
        library,
        percent=option("--rounds", 1.0),
        seed=option("--attack-seed", 0),
        only=option("--round", None),
    )
    yield made
    made.close()


@pytest.fixture
def attack(request: pytest.FixtureRequest) -> Callable[[str], AbstractContextManager[Tally]]:
    """Context manager ``with attack("kills train") as tally``: it prints the counts, and fails the test on failures."""

    @contextmanager
    def begin(name: str) -> Iterator[Tally]:
        tally = Tally(name)
        tally.counts["rounds"] = tally.counts["failed"] = 0
        request.config.stash[_TALLIES].append(tally)
        start = time.monotonic()
        try:
            yield tally
        finally:
            tally.seconds = time.monotonic() - start
        tally.check()

    return begin
