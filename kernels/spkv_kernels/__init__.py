"""Attention and cache operators of SP-KV. Knows nothing of models; needs torch (and triton on GPUs) alone."""

from spkv_kernels.api import attention, decode_attention, extend_attention
from spkv_kernels.cache import PagedKVCache
from spkv_kernels.pages import CacheFullError

__all__ = ["CacheFullError", "PagedKVCache", "attention", "decode_attention", "extend_attention"]
