"""Test that waiting threads sleep soon, in commands and in Python, unless the environment overrides it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import ENVIRONMENT

WAITS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SHOW = 'import os, sys; print("torch" in sys.modules, os.environ.get("GOMP_SPINCOUNT"))'
COMMAND = f"""
from spkv_nas.cli import main
try:
    main(["--version"])
finally:
    {SHOW}
"""


def shown(code: str, **settings: str) -> str:
    """Return the last line that ``code`` prints in a fresh process with only these wait settings."""
    environment = {
        name: value for name, value in {**os.environ, **ENVIRONMENT}.items() if name not in WAITS
    }
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **settings},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "code", [COMMAND, f"import spkv_nas; {SHOW}", f"import spkv_kernels; {SHOW}"]
)
def test_sets_spinning_before_torch_is_loaded(code: str) -> None:
    assert shown(code) == "False 1000"


def test_the_environment_overrides_it() -> None:
    code = f"import spkv_kernels; {SHOW}"
    assert shown(code, GOMP_SPINCOUNT="7") == "False 7"
    assert shown(code, OMP_WAIT_POLICY="active") == "False None"


def test_no_change_after_torch_is_loaded() -> None:
    """OpenMP reads the variable once, so a later change would only reach child processes."""
    loaded = 'import sys, types; sys.modules["torch"] = types.ModuleType("torch")'  # in place of a slow import
    assert shown(f"{loaded}; import spkv_nas, spkv_kernels; {SHOW}") == "True None"


@pytest.mark.slow
def test_operators_come_on_first_use() -> None:
    code = "import spkv_kernels; spkv_kernels.attention, spkv_kernels.PagedKVCache, spkv_kernels.CacheFullError"
    assert (
        shown(f"{code}; from spkv_kernels import *; attention, decode_attention; {SHOW}")
        == "True 1000"
    )


def test_every_name_of_the_package_is_there() -> None:
    kernels = __import__("spkv_kernels")
    assert {"attention", "decode_attention", "PagedKVCache", "CacheFullError"} <= set(
        kernels.__all__
    )
    assert all(hasattr(kernels, name) for name in kernels.__all__)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = kernels.other
