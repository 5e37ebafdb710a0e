"""Attention and cache operators of SP-KV. Knows nothing of models; needs torch (and triton on GPUs) alone."""

from spkv_kernels.api import attention

__all__ = ["attention"]
