"""Attention and cache operators of SP-KV, independent of any model; they need only torch (and triton on GPUs).

The operators are imported on first use, so that ``import spkv_kernels`` does not import torch, and sets how OpenMP
threads wait (``threads.py``) before torch is loaded.
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
    """Import an operator on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
