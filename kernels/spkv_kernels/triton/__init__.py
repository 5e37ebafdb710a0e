"""Triton backend, for CUDA devices (and, with TRITON_INTERPRET=1, for tests on the CPU)."""

from spkv_kernels.triton.op import attention as attention
