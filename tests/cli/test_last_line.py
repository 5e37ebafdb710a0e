"""Test the last line of a command that ends with an error: what happened, the exit code, and no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.cli.app import explained


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (
            ZeroDivisionError("division\nby zero"),
            1,
            "ZeroDivisionError: division\nthis is a bug in spkv-nas",
        ),
        (AssertionError(), 1, "AssertionError\nthis is a bug in spkv-nas"),
        (OSError(28, "No space left on device", "/x/y"), 2, "No space left on device: '/x/y'"),
        (MemoryError(), 2, "out of memory"),
        (OSError(12, "Cannot allocate memory"), 2, "out of memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            2,
            "out of memory",
        ),
        (UserError("wrong"), 2, "wrong"),
        (RuntimeError("x" * 10**6), 1, "RuntimeError: xxx"),
    ],
)
def test_whatever_ends_a_command_is_explained(
    error: Exception,
    code: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message, result = explained(error)
    assert result == code
    assert expected in message
    assert len(message) < 1000

    def broken(arguments: list[str], *, standalone_mode: bool) -> None:
        raise error

    monkeypatch.setattr("spkv_nas.cli.app.app", broken)
    with pytest.raises(SystemExit) as exit_:
        main(["probe"])
    assert exit_.value.code == code
    output = capsys.readouterr().err
    assert output.startswith("error: ")
    assert "Traceback" not in output
    with pytest.raises(type(error)):
        main(["--debug", "probe"])


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("plan --model x.json", "plan has no option --model any more\nname the model by place"),
        ("plan attention --engine vllm", "use spkv-nas plan MODEL --engine NAME --layout FILE"),
        ("plan attention --kv-bytes 2GiB", "use spkv-nas plan MODEL --engine NAME --memory SIZE"),
        ("plan x.json --modell x", "No such option: --modell"),
    ],
)
def test_options_of_earlier_versions_name_what_to_write(
    words: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "code", "printed"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ZeroDivisionError", 1, "ZeroDivisionError"),
    ],
)
def test_nothing_is_torn_down_after_the_last_line(ending: str, code: int, printed: str) -> None:
    """Exit functions run, output is flushed, and the process ends with the code before objects are destroyed."""
    program = (
        "import atexit, sys\n"
        "from spkv_nas import cli\n"
        "class Object:\n"
        "    def __del__(self): print('destroyed')\n"
        "kept = Object()\n"
        "def run(arguments):\n"
        "    atexit.register(print, 'exit function')\n"
        f"    print('last line')\n    {ending}\n"
        "cli._run = run\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stdout == "last line\nexit function\n"
    assert printed in done.stderr
