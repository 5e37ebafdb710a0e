"""Choose a device, and a dtype that its hardware supports natively."""

import re
from typing import TYPE_CHECKING

from spkv_nas.base import distributed, errors

if TYPE_CHECKING:
    import torch

AUTO = "auto"  # distribute one model over all GPUs
DTYPES = ("float32", "bfloat16", "float16")


def choose_device(device: str | None = None) -> str:
    """Return ``device``, or by default "cuda" if there is a GPU, else "cpu"; ``UserError`` without that GPU."""
    import torch

    check_device(device)
    if device == "cuda" and not torch.cuda.is_available():
        raise errors.UserError("--device cuda: no CUDA device is available")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def check_device(device: str | None, *, spreads: bool = False) -> None:
    """Raise ``UserError`` unless a device is None, cpu, cuda, cuda:N, or ``AUTO`` if a command ``spreads`` models."""
    if device == AUTO and not spreads:
        raise errors.UserError(
            "--device auto is for probe, evaluate and score, "
            "which place a model's layers on all GPUs\n"
            "leave it out; training uses several GPUs with torchrun, "
            "and sharding: fsdp in the recipe"
        )
    if device not in (None, AUTO) and not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device):
        raise errors.UserError(f"--device '{device}' is unknown; expected cpu or cuda")


def measuring_device(device: str | None) -> str:
    """Return the device of the first layers, as ``choose_device`` but also for ``AUTO``, in a single process."""
    if device == AUTO and distributed.num_processes() > 1:
        raise errors.UserError(
            "--device auto places a model on all GPUs in one process, "
            "but torchrun starts a process per GPU\n"
            "use one of the two: torchrun is faster if the model fits on one GPU"
        )
    return choose_device(None if device == AUTO else device)


def choose_dtype(
    device: str, checkpoint_dtype: "torch.dtype", dtype: str | None = None
) -> "torch.dtype":
    """Return the dtype to compute in: ``dtype``, else ``checkpoint_dtype``, or float32 if the device emulates that.

    An AVX2 CPU emulates bfloat16: a linear layer of the embedded model then takes 8 times as long as in float32. Raises
    ``UserError`` if ``dtype`` is not one of ``DTYPES``.
    """
    import torch

    if dtype is not None:
        check_dtype(dtype)
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    return checkpoint_dtype if is_native(device, checkpoint_dtype) else torch.float32


def check_dtype(dtype: str | None) -> None:
    """Raise ``UserError`` for a dtype that is not one of ``DTYPES``; None means not specified."""
    if dtype is not None and dtype not in DTYPES:
        raise errors.UserError(f"--dtype '{dtype}' is unknown; expected one of {', '.join(DTYPES)}")


def named_dtype(dtype: "str | torch.dtype | None") -> "torch.dtype | None":
    """Return the dtype of a name, None for None and "auto"; raise ``UserError`` for a name not in ``DTYPES``."""
    import torch

    if not isinstance(dtype, str):
        return dtype
    if dtype != "auto" and dtype not in DTYPES:
        raise errors.UserError(f"dtype '{dtype}' is unknown; expected auto, {', '.join(DTYPES)}")
    return None if dtype == "auto" else getattr(torch, dtype)


def training_precision(device: str) -> str:
    """Return the dtype of matrix products in training: "bfloat16" if it is native to the device, else "float32"."""
    import torch

    return "bfloat16" if is_native(device, torch.bfloat16) else "float32"


def dtype_name(dtype: "torch.dtype") -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def is_native(device: str, dtype: "torch.dtype") -> bool:
    """Return whether the device has instructions for products in ``dtype``; True for dtypes that are not 16-bit floats.

    On a CPU, oneDNN multiplies PyTorch's matrices, so it is queried. It accepts plain AVX-512 as support, which without
    dedicated instructions is 5 times slower in bfloat16 than in float32; so on x86 those instructions are required too.
    """
    import torch

    if dtype not in (torch.bfloat16, torch.float16):
        return True
    # Ask CUDA about a GPU
    if device.startswith("cuda"):
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # Query oneDNN, and on x86 the processor too
    library = torch.ops.mkldnn
    processor: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # from torch 2.10
    if dtype == torch.bfloat16:
        names = ("avx512_bf16", "amx_bf16")
        supported = library._is_mkldnn_bf16_supported()
    else:
        names = ("avx512_fp16", "amx_fp16")
        supported = library._is_mkldnn_fp16_supported()
    is_x86 = processor.get("architecture") == "x86_64"
    return bool(supported) and (not is_x86 or any(processor.get(name) for name in names))
