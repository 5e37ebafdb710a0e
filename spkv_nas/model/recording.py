"""Record what a model asks of the attention function and of its mask function, to learn how its layers attend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import nn


@dataclass
class AttentionCall:
    """One recorded call of the attention function.

    Attributes:
        module: attention layer that made the call.
        num_kv_heads: KV heads of the keys it passed.
        native_window: sliding window it asked for; None: full attention.
    """

    module: nn.Module
    num_kv_heads: int
    native_window: int | None


@dataclass
class Recording:
    """Hold what a model asked of the attention function and of its mask function.

    Attributes:
        calls: calls of the attention function, in order.
        mask_windows: numbers of recent keys to which masks limit attention: sliding windows, and chunks.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    mask_windows: set[int] = field(default_factory=set)

    @property
    def undeclared_windows(self) -> list[int]:
        """Return the limits of masks that no attention layer passes to the attention function, ascending."""
        return sorted(self.mask_windows - {call.native_window for call in self.calls})


RECORDING: ContextVar[Recording | None] = ContextVar("spkv_recording", default=None)


@contextmanager
def watch_calls() -> Iterator[Recording]:
    """Record the calls of the attention function made in this thread inside the ``with`` block."""
    recording = Recording()
    token = RECORDING.set(recording)
    try:
        yield recording
    finally:
        RECORDING.reset(token)
