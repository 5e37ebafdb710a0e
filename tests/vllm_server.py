"""Run vLLM's server for tests, in the environment whose Python is SPKV_VLLM_PYTHON."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

PYTHON = os.environ.get("SPKV_VLLM_PYTHON", "")
needs_vllm = pytest.mark.skipif(
    not PYTHON,
    reason="SPKV_VLLM_PYTHON names no Python with vLLM 0.32 and spkv-nas (docs/guides/vllm.md)",
)
_SECONDS = 900.0  # to start
_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def serving(folder: str, options: Sequence[str], log: Path) -> Iterator[str]:
    """Serve a folder on a free port, yield the server's ``host:port`` when it answers, and stop it in the end.

    Args:
        folder: model folder, by whose name clients ask for it.
        options: options of ``vllm serve``.
        log: file for the server's output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"localhost:{free.getsockname()[1]}"
    # The module, because the command ``vllm`` of the package vllm-cpu does not start
    command = [
        PYTHON,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        folder,
        *options,
        "--enforce-eager",
    ]
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--port", address.partition(":")[2]],
            env={**os.environ, **_SETTINGS}, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            _wait(server, address, log)
            yield address
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Wait until the server answers. Fails if it ends, or does not within ``_SECONDS``."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urlopen(f"http://{address}/health", timeout=5):
                return
        except (URLError, TimeoutError, ConnectionError):
            time.sleep(1)
    pytest.fail(f"the server did not start within {_SECONDS:.0f} s: {log.read_text()[-3000:]}")
