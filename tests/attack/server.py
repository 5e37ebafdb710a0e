"""Fork commands from one process, since importing torch and transformers takes longer than running a command.

Started by ``arena.Server`` with ``faults.c`` preloaded; reads one request per line on standard input and answers on
standard output, both JSON. Every command runs in a child with files as its output, its faults armed, and, if asked for,
an injection of ``inject.py``. Nothing is reaped before it is waited for, so a child's number stays its own.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from attack import inject

HEAVY = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "pandas",
    "scipy.optimize",
    "matplotlib.pyplot",
    "optuna",
    "sqlalchemy",
    "spkv_nas",
    "spkv_nas.cli.app",
    "spkv_nas.stages.train",
    "spkv_nas.contrib.search.stage",
    "spkv_nas.stages.report",
    "spkv_nas.stages.probe",
    "spkv_nas.stages.propose",
    "spkv_nas.stages.evaluate.nll",
    "spkv_nas.stages.score",
    "spkv_nas.stages.sized_model",
    "spkv_nas.contrib.reproduce.scaling.stage",
    "spkv_nas.stages.export",
    "spkv_nas.training.trainer",
)


def child(job: dict[str, Any]) -> None:
    """Run one command as the console script does, and exit without Python's cleanup."""
    code: int | str | None = 1
    before = set(sys.modules)
    faults = ctypes.CDLL(None)
    try:
        os.chdir(job["folder"])
        for number, name in ((1, job["out"]), (2, job["err"])):
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.update(job["environment"])
        if job["trace"]:
            inject.trace(Path(job["trace"]))
        if job["injection"]:
            inject.inject(**job["injection"])
        if job["faults"]:
            root, kill_at, full_after, log = job["faults"]
            faults.faults_arm(
                root.encode(), ctypes.c_long(kill_at), ctypes.c_long(full_after), log.encode()
            )
        from spkv_nas.cli import main
        from spkv_nas.contrib.search import storage

        # Seconds: workers are killed, and the next one waits for that long
        storage.HEARTBEAT = 1
        storage.GRACE = 4
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Ignored if the attack runs by nohup, and then by commands, too
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        main(job["arguments"])
        code = 0
    except SystemExit as done:
        code = done.code
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the command is over, whatever comes now
        sys.stdout.flush()
        sys.stderr.flush()
        done = {"operations": faults.faults_operations(), "bytes": faults.faults_bytes()}
        Path(job["done"]).write_text(
            json.dumps({**done, "imported": sorted(set(sys.modules) - before)})
        )
        os._exit(0 if code is None else code if isinstance(code, int) else 1)


def start(job: dict[str, Any]) -> int:
    """Fork a child; return its process number."""
    number = os.fork()
    if not number:
        child(job)
    return number


def wait(number: int, seconds: float) -> int | None:
    """Return a child's exit code, negative for a signal, or None if it still runs after ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        result, status = os.waitpid(number, os.WNOHANG)
        if result:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.002)


def load(modules: list[str]) -> int:
    """Import what commands import, so that the next child starts faster; return the number of threads, always 1."""
    for name in modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(name)
            except Exception:
                continue  # a name that a library put there itself
    return len(os.listdir("/proc/self/task"))


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load(list(HEAVY))
    import torch

    torch.set_num_threads(1)
    inject.shrink_palindrome()
    faults = ctypes.CDLL(None)
    faults.faults_operations.restype = faults.faults_bytes.restype = ctypes.c_long
    # Of a terminal: the session ends this process by ending its input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    actions = {"start": start, "wait": wait, "load": load}
    print(json.dumps(load([])), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(actions[request.pop("action")](**request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
