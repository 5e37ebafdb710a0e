"""Measure which attention heads need global attention, and design hybrid local-global layouts.

The measurements use the gates of Self-Pruned KV attention (SP-KV). The public functions are listed in
``__init__.pyi`` and imported on first use, so that ``import spkv_nas`` stays cheap::

    import spkv_nas

    model, tokenizer = spkv_nas.load("checkpoint")
    blocks = spkv_nas.build_blocks(texts, tokenizer)
    table = spkv_nas.head_gates(model, blocks, window=128, budget="25%")
    layouts = spkv_nas.propose(table, budget="25%")
    spkv_nas.apply_layout(model, layouts["densest"])

Import spkv_nas before torch if possible: it shortens how long idle OpenMP threads spin before they sleep, which makes
attention several times faster on busy CPUs. OpenMP reads that setting once, when torch is loaded
(``spkv_kernels/threads.py``). ``GOMP_SPINCOUNT`` and ``OMP_WAIT_POLICY`` in the environment take precedence.

Once spkv_nas is imported, before or after transformers, the Auto classes of transformers load exports with the model
type ``spkv`` (``model/custom_model_type.py``).
"""

from inspect import isfunction
from typing import Any

import lazy_loader
import spkv_kernels  # noqa: F401  # sets OpenMP's wait policy before torch is imported

from spkv_nas.base import extras

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a public name on first access; functions check and convert their arguments (``stages.python_api``).

    Raises ``UserError``: the name needs a package that is not installed.
    """
    try:
        value = _attribute(name)
    except ModuleNotFoundError as error:
        raise extras.missing_extra(error) or error from error
    if isfunction(value):
        from spkv_nas.stages.python_api import public

        value = public(value)
        value.__module__ = __name__  # where pickle finds it
    globals()[name] = value
    return value


def _register() -> None:
    """Register the model type ``spkv`` with the Auto classes of transformers."""
    from spkv_nas.model.custom_model_type import register

    register(_restoring_class)


def _restoring_class(native: Any) -> Any:
    """Return a subclass of a transformers model that restores gates and windows from its config on loading."""
    from spkv_nas.model.restore import restoring_class  # imports torch: only once a model is loaded

    return restoring_class(native)


extras.when_imported("transformers.models.auto.configuration_auto", _register)
