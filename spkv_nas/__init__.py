"""spkv-nas: which attention heads need global attention, measured by Self-Pruned KV attention (SP-KV).

The public functions (see ``__init__.pyi``) are imported on first use, so that ``import spkv_nas`` stays cheap::

    import spkv_nas

    model, tokenizer = spkv_nas.load("checkpoint")
    spkv_nas.attach_gates(model, spkv_nas.GateConfig(window=128))
    table = spkv_nas.probe(model, blocks)
    layouts = spkv_nas.propose(table, budget=18)
    spkv_nas.apply_layout(model, layouts["densest"])
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
