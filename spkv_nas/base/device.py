"""Which device to compute on."""

from __future__ import annotations

from spkv_nas.base.errors import UserError


def choose_device(device: str | None = None) -> str:
    """``device``, by default "cuda" where there is a GPU and "cpu" elsewhere.

    Raises:
        UserError: "cuda" is asked for and there is none.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no CUDA device here")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")
