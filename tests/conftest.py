"""Set up the processes that run tests: their environment, options and garbage collection."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import zlib

import pytest

if gc.isenabled():
    gc.disable()  # until all tests are collected: nothing that imports create is garbage
# From 700: objects die by reference counting, and each collection looks at much
gc.set_threshold(50_000)
sys.dont_write_bytecode = False  # every process that a test starts would compile the package again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tiny weights need no threads to be read
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
}
NUM_FROZEN = pytest.StashKey[int]()  # modules that garbage collections leave out


def pytest_configure(config: pytest.Config) -> None:
    """Import the fixtures, and with them torch, in every process but the one of pytest-xdist that runs no test.

    Other ``conftest.py`` may not import torch: they are read before ``shared_fixtures.py`` sets its environment.
    """
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        default="100",
        metavar="PERCENT[:SEED]",
        help="run about this share of the selected tests, drawn by the seed (default: all)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests beyond ``--share``; every process of pytest-xdist draws the same ones."""
    percent, _, seed = config.getoption("--share").partition(":")
    if float(percent) >= 100:
        return
    drawn = {
        item: zlib.crc32(f"{seed} {item.nodeid}".encode()) % 10_000 < 100 * float(percent)
        for item in items
    }
    config.hook.pytest_deselected(items=[item for item in items if not drawn[item]])
    items[:] = [item for item in items if drawn[item]]


def pytest_collection_finish() -> None:
    """Exclude all modules and tests from garbage collections, each of which would take a second."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # Triton names all of its objects that are left


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Exclude modules that a test has imported, too: the trainer collects garbage at every run."""
    if len(sys.modules) > item.config.stash.get(NUM_FROZEN, 0) + 20:
        gc.collect()
        gc.freeze()
        item.config.stash[NUM_FROZEN] = len(sys.modules)
