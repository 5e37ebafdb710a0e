"""Attention and cache operators of SP-KV. Knows nothing of models; needs torch (and triton on GPUs) alone.

The operators are imported on first use, so that ``import spkv_kernels`` needs no torch, and says how threads wait
(``threads.py``) before torch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spkv_kernels.threads import spin_briefly

if TYPE_CHECKING:
    from spkv_kernels.api import attention, decode_attention, extend_attention
    from spkv_kernels.paged_cache import PagedKVCache
    from spkv_kernels.pages import CacheFullError

__all__ = ["CacheFullError", "PagedKVCache", "attention", "decode_attention", "extend_attention"]

_MODULES = {"PagedKVCache": "paged_cache", "CacheFullError": "pages"}

spin_briefly()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return __all__
