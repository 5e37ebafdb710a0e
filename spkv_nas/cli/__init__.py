"""The command line: parses, calls, prints."""

from __future__ import annotations

from spkv_nas.cli.app import main

__all__ = ["main"]
