"""spkv-nas: which attention heads need global attention, measured by Self-Pruned KV attention (SP-KV).

The public functions (see ``__init__.pyi``) are imported on first use, so that ``import spkv_nas`` stays cheap::

    import spkv_nas

    model, tokenizer = spkv_nas.load("checkpoint")
    spkv_nas.attach_gates(model, spkv_nas.GateConfig(window=128))
    table = spkv_nas.probe(model, blocks)
    layouts = spkv_nas.propose(table, budget=18)
    spkv_nas.apply_layout(model, layouts["densest"])

After ``import spkv_nas``, before or after transformers, its Auto classes load exports with the model type ``spkv``
(``model/own_type.py``).
"""

import lazy_loader

from spkv_nas.base.on_import import when_imported

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _register() -> None:
    from spkv_nas.model.own_type import register

    register()


when_imported("transformers.models.auto.configuration_auto", _register)
