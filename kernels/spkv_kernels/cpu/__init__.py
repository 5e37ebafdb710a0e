"""CPU backend, based on PyTorch's flash attention kernel."""

from spkv_kernels.cpu.op import attention as attention
