"""Command-line interface: parse the arguments, call the stage, print its result."""

from __future__ import annotations

from spkv_nas.cli.app import main

__all__ = ["main"]
