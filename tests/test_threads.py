"""Threads of the commands sleep soon while they wait, unless the environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers import ENVIRONMENT

WAITS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
COMMAND = """
import os, sys
from spkv_nas.cli import main
before = "torch" in sys.modules
try:
    main(["--version"])
finally:
    print(before, os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["by default", "spins given", "policy given"],
)
def test_a_command_says_how_threads_wait_before_torch_is_there(given: dict[str, str], spins: str) -> None:
    environment = {name: value for name, value in {**os.environ, **ENVIRONMENT}.items() if name not in WAITS}
    ran = subprocess.run([sys.executable, "-c", COMMAND], env={**environment, **given}, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == f"False {spins}", ran.stderr
