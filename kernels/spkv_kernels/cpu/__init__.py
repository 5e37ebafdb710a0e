"""CPU backend: PyTorch's flash kernel over chunks of the scores."""

from spkv_kernels.cpu.op import attention as attention
