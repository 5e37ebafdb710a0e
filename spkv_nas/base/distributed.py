"""The processes that torchrun started: which one this is, what they do once, what they add up.

All of them run the same command. Process 0 alone builds caches, writes files and prints; the others wait for it and
read what it wrote, so the nodes of a cluster share the workspace's file system. Without torchrun there is one process,
and everything here does nothing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from spkv_nas.base.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")
TIMEOUT = timedelta(hours=6)  # process 0 may tokenise for hours; a process that fails is torchrun's to notice, at once


def num_processes() -> int:
    """Number of processes, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_index() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def connect(device: str | None = None) -> None:
    """Join the other processes: NCCL where there are GPUs, gloo with ``device="cpu"`` or without any."""
    if num_processes() == 1:
        return
    import torch
    from accelerate import PartialState

    if not torch.distributed.is_initialized():
        PartialState(cpu=device == "cpu" or not torch.cuda.is_available(), timeout=TIMEOUT)


def disconnect() -> None:
    """Leave the other processes, if ``connect`` joined them."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave(exit_code: int) -> None:
    """End this process if it is one of several; alone it goes on.

    Without Python's own end, in which the threads of a process group that is gone abort the process now and then.
    """
    if num_processes() == 1:
        return
    disconnect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def is_lost_process(error: BaseException) -> bool:
    """Whether an error says that another process is gone: gloo raises as its connection closes, NCCL as it waits."""
    return num_processes() > 1 and re.search(r"onnection (closed|reset|refused)|gloo|NCCL", str(error)) is not None


def blocks_per_process(batch_size: int) -> int:
    """Blocks per process of a batch of all processes. Raises ``UserError`` if they cannot share it evenly."""
    if batch_size % num_processes():
        raise UserError(
            f"a batch_size of {batch_size} blocks cannot be shared evenly by {num_processes()} processes\n"
            "batch sizes are those of all processes together: give a multiple of their number"
        )
    return batch_size // num_processes()


def on_main(work: Callable[[], Result]) -> Result:
    """What ``work`` returns on process 0, which alone runs it; the others wait, and get its ``UserError`` too."""
    if num_processes() == 1:
        return work()
    import torch

    answer: list[Any] = [None, None]
    if process_index() == 0:
        try:
            answer[0] = work()
        except UserError as error:
            answer[1] = error
    torch.distributed.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    result: Result = answer[0]
    return result


def sum_over_processes(values: Tensor) -> Tensor:
    """``values`` added up over the processes, in float64; collective, and the same bits on each of them."""
    if num_processes() == 1:
        return values
    import torch
    from accelerate import PartialState

    total = values.to(PartialState().device, torch.float64, copy=True)
    torch.distributed.all_reduce(total)
    return total
