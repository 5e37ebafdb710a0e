"""Triton backend, for CUDA devices (and for tests on the CPU with TRITON_INTERPRET=1)."""

from spkv_kernels.triton.op import attention as attention
