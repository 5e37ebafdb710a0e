"""spkv-nas: which attention heads need global attention, measured by Self-Pruned KV attention (SP-KV).

The public functions are imported on first use, so that ``import spkv_nas`` stays cheap::

    import spkv_nas

    model, tokenizer = spkv_nas.load("checkpoint")
    spkv_nas.attach_gates(model, spkv_nas.GateConfig(window=128))
    table = spkv_nas.probe(model, blocks)
    layouts = spkv_nas.propose(table, budget=18)
    spkv_nas.apply_layout(model, layouts["densest"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from spkv_nas.density import DensityTable as DensityTable
    from spkv_nas.errors import UserError as UserError
    from spkv_nas.gate_config import GateConfig as GateConfig
    from spkv_nas.layout import Layout as Layout
    from spkv_nas.model.cache import SPKVCache as SPKVCache
    from spkv_nas.model.checkpoint import load as load
    from spkv_nas.model.checkpoint import save as save
    from spkv_nas.model.hook import apply_layout as apply_layout
    from spkv_nas.model.hook import attach_gates as attach_gates
    from spkv_nas.model.hook import detach as detach
    from spkv_nas.model.hook import set_gate_mode as set_gate_mode
    from spkv_nas.probing import probe as probe
    from spkv_nas.proposal import propose as propose
    from spkv_nas.search.coverage import coverage as coverage

_HOMES = {
    "DensityTable": "spkv_nas.density",
    "GateConfig": "spkv_nas.gate_config",
    "Layout": "spkv_nas.layout",
    "SPKVCache": "spkv_nas.model.cache",
    "UserError": "spkv_nas.errors",
    "apply_layout": "spkv_nas.model.hook",
    "attach_gates": "spkv_nas.model.hook",
    "coverage": "spkv_nas.search.coverage",
    "detach": "spkv_nas.model.hook",
    "load": "spkv_nas.model.checkpoint",
    "probe": "spkv_nas.probing",
    "propose": "spkv_nas.proposal",
    "save": "spkv_nas.model.checkpoint",
    "set_gate_mode": "spkv_nas.model.hook",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spkv_nas' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
