"""spkv-nas: which attention heads need global attention, measured by Self-Pruned KV attention (SP-KV).

The public functions (see ``__init__.pyi``) are imported on first use, so that ``import spkv_nas`` stays cheap::

    import spkv_nas

    model, tokenizer = spkv_nas.load("checkpoint")
    blocks = spkv_nas.build_blocks(texts, tokenizer)
    table = spkv_nas.head_gates(model, blocks, window=128, budget="25%")
    layouts = spkv_nas.propose(table, budget="25%")
    spkv_nas.apply_layout(model, layouts["densest"])

Import it before torch where you can: it lets OpenMP's threads sleep soon while they wait, which makes attention on busy
CPUs several times faster, and which OpenMP reads once, when torch is loaded (``spkv_kernels/threads.py``).
``GOMP_SPINCOUNT`` and ``OMP_WAIT_POLICY`` of the environment come first.

After ``import spkv_nas``, before or after transformers, its Auto classes load exports with the model type ``spkv``
(``model/custom_model_type.py``).
"""

from typing import Any

import lazy_loader
import spkv_kernels  # noqa: F401  # sets how threads wait, before anything imports torch

from spkv_nas.base.extras import missing_extra
from spkv_nas.base.on_import import when_imported

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """A public name, imported. Raises ``UserError`` where it needs a package that is not installed."""
    try:
        return _attribute(name)
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error


def _register() -> None:
    from spkv_nas.model.custom_model_type import register

    register(_restoring_class)


def _restoring_class(stock: Any) -> Any:
    from spkv_nas.model.restore import restoring_class  # torch, and all that a model needs: when one is loaded

    return restoring_class(stock)


when_imported("transformers.models.auto.configuration_auto", _register)
