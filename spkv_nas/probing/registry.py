"""Registry of the signals that ``probe --signal`` measures."""

from __future__ import annotations

from spkv_nas.base.registry import Registry
from spkv_nas.probing.signal import Signal
from spkv_nas.probing.signals.ablation import ADD_ONE_HEAD, LEAVE_ONE_OUT
from spkv_nas.probing.signals.density import DENSITY
from spkv_nas.probing.signals.duo import DUO
from spkv_nas.probing.signals.head_gates import HEAD_GATES

SIGNALS: Registry[Signal] = Registry(
    "spkv_nas.signals",
    "signal",
    Signal,  # type: ignore[type-abstract]
    (DENSITY, HEAD_GATES, ADD_ONE_HEAD, LEAVE_ONE_OUT, DUO),
)
