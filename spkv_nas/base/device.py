"""Which device to compute on, and in which dtype: one that its arithmetic is made for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from spkv_nas.base.distributed import num_processes
from spkv_nas.base.errors import UserError

if TYPE_CHECKING:
    import torch

AUTO = "auto"  # of all GPUs together, for one model
DTYPES = ("float32", "bfloat16", "float16")


def choose_device(device: str | None = None) -> str:
    """``device``, by default "cuda" where there is a GPU and "cpu" elsewhere.

    Raises:
        UserError: "cuda" is asked for and there is none, or ``AUTO``, which only some commands know.
    """
    import torch

    check_device(device)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no CUDA device here")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def check_device(device: str | None, *, spreads: bool = False) -> None:
    """Check the name of a device without torch; None is nothing asked.

    Args:
        spreads: whether ``AUTO`` is known.

    Raises:
        UserError: it is none of cpu, cuda and cuda:N.
    """
    if device == AUTO and not spreads:
        raise UserError(
            "--device auto is for probe, evaluate and score, which part a model over the GPUs to measure it\n"
            "leave it out; training is parted by torchrun, and by sharding: fsdp in its recipe"
        )
    if device not in (None, AUTO) and not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device):
        raise UserError(f"--device '{device}' is unknown; there are cpu and cuda")


def measuring_device(device: str | None) -> str:
    """As ``choose_device``, of what also knows ``AUTO``: the kind of device that the first layers will be on.

    Raises:
        UserError: as ``choose_device``, or ``AUTO`` in one of several processes.
    """
    if device == AUTO and num_processes() > 1:
        raise UserError(
            "--device auto has one process part a model over all GPUs, and torchrun starts one for each\n"
            "leave out one of the two: torchrun is faster where a GPU has room for the model"
        )
    return choose_device(None if device == AUTO else device)


def choose_dtype(device: str, own: torch.dtype, asked: str | None = None) -> torch.dtype:
    """What to compute in: ``asked``, by default a checkpoint's ``own`` dtype, or float32 where that is emulated.

    An AVX2 processor emulates bfloat16: a linear layer of the embedded model takes 8 times as long as in float32.

    Raises:
        UserError: ``asked`` is none of ``DTYPES``.
    """
    import torch

    if asked is not None:
        check_dtype(asked)
        return getattr(torch, asked)  # type: ignore[no-any-return]
    return own if is_native(device, own) else torch.float32


def check_dtype(asked: str | None) -> None:
    """Raises ``UserError`` for what is none of ``DTYPES``; None is nothing asked."""
    if asked is not None and asked not in DTYPES:
        raise UserError(f"--dtype '{asked}' is unknown; there are {', '.join(DTYPES)}")


def named_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a name; None for None and "auto". Raises ``UserError``: the name is none of ``DTYPES``."""
    import torch

    if not isinstance(dtype, str):
        return dtype
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"dtype '{dtype}' is unknown; there are auto, {', '.join(DTYPES)}")
    return None if dtype == "auto" else getattr(torch, dtype)


def training_precision(device: str) -> str:
    """The dtype of matrix products in training that suits the device: "bfloat16" where it is native, else "float32"."""
    import torch

    return "bfloat16" if is_native(device, torch.bfloat16) else "float32"


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def is_native(device: str, dtype: torch.dtype) -> bool:
    """Whether the device has instructions for products in ``dtype``; True of dtypes that are not 16-bit floats.

    Of a CPU oneDNN is asked, which multiplies PyTorch's matrices there. It calls AVX-512 enough, which without its own
    instructions takes 5 times as long in bfloat16 as in float32, so of x86 those are asked for too.
    """
    import torch

    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if device.startswith("cuda"):
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    library = torch.ops.mkldnn
    processor: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # from torch 2.10
    if dtype == torch.bfloat16:
        names, supported = ("avx512_bf16", "amx_bf16"), library._is_mkldnn_bf16_supported()
    else:
        names, supported = ("avx512_fp16", "amx_fp16"), library._is_mkldnn_fp16_supported()
    is_x86 = processor.get("architecture") == "x86_64"
    return bool(supported) and (not is_x86 or any(processor.get(name) for name in names))
