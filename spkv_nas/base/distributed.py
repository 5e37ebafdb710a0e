"""The processes that torchrun started: which one this is, what they do once, what they part and add up.

All of them run the same command. Process 0 alone builds caches, writes files and prints; the others wait for it and
read what it wrote, so the nodes of a cluster share the workspace's file system. What measures takes its share of the
text (``own_share``, of blocks ``data.batches.run_own_batches``) and adds up what it has found (``sum_over_processes``),
so that all have the whole result. Without torchrun there is one process, and everything here does nothing; nor does it
in a program of somebody else's under torchrun, which may well measure on one process alone, unless that calls
``connect``.

What is collective must be called by every process, in the same order.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from spkv_nas.base.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

Result = TypeVar("Result")
Values = TypeVar("Values", "Tensor", "NDArray[np.float64]", "NDArray[np.int64]")
TIMEOUT = timedelta(hours=6)  # process 0 may tokenise for hours; a process that fails is torchrun's to notice, at once


_connected = False  # whether ``connect`` joined the other processes


def num_processes() -> int:
    """Number of processes, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_connected() -> int:
    """Number of processes that share what they do: 1 until ``connect``."""
    return num_processes() if _connected else 1


def process_index() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def num_local_processes() -> int:
    """How many of them this machine runs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def own_share(number: int) -> range:
    """Which of ``number`` things in a row this process does, side by side: as many as any other, or one more or less.

    Some do nothing where there are fewer things than processes.
    """
    processes = num_connected()
    index = process_index() if processes > 1 else 0
    return range(number * index // processes, number * (index + 1) // processes)


def connect(device: str | None = None, *, offloads: bool = False) -> None:
    """Join the other processes: NCCL where there are GPUs, gloo with ``device="cpu"`` or without any.

    ``offloads``: what is on the CPU is exchanged as well.
    """
    if num_processes() == 1:
        return
    import torch
    from accelerate import PartialState

    global _connected
    _connected = True
    if not torch.distributed.is_initialized():
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        if offloads and not on_cpu:
            torch.distributed.init_process_group("cuda:nccl,cpu:gloo", timeout=TIMEOUT)
        PartialState(cpu=on_cpu, timeout=TIMEOUT)


def disconnect() -> None:
    """Leave the other processes, if ``connect`` joined them."""
    import torch

    global _connected
    _connected = False
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


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters of ``model`` are sharded over processes, so that a pass of it is collective."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def pass_device(model: nn.Module) -> torch.device:
    """Where a pass of ``model`` begins: beside its first parameter, or where its shards are put together."""
    import torch
    from torch.distributed.tensor import DTensor

    parameter = next(model.parameters()).data
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def blocks_per_process(batch_size: int, together: int = 1) -> int:
    """Blocks per process of a batch of all processes, a multiple of ``together``.

    Raises:
        UserError: they cannot share it evenly.
    """
    processes = num_processes()
    if batch_size % (processes * together):
        each = "" if together == 1 else f", {together} together"
        raise UserError(
            f"a batch_size of {batch_size} blocks cannot be shared evenly by {processes} processes{each}\n"
            f"batch sizes are those of all processes together: give a multiple of {processes * together}"
        )
    return batch_size // processes


def on_main(work: Callable[[], Result]) -> Result:
    """What ``work`` returns on process 0, which alone runs it; the others wait, and get its ``UserError`` too."""
    if num_connected() == 1:
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


def after_main(work: Callable[[], Result]) -> Result:
    """What ``work`` returns on each process, once process 0 is done with it: the others find on disk what it has left.

    Collective. An error of process 0 is one of all.
    """
    done: list[Result] = []
    on_main(lambda: done.append(work()))
    return done[0] if done else work()


def gathered(value: Result) -> list[Result]:
    """What every process gives, in their order; collective. Tensors in it must be on the CPU."""
    if num_connected() == 1:
        return [value]
    import torch

    values: list[Any] = [None] * num_connected()
    torch.distributed.all_gather_object(values, value)
    return values


def sum_over_processes(values: Values) -> Values:
    """Values added up over the processes, where they are: whole numbers as such, others in float64.

    Collective, and the same bits on each of them.
    """
    if num_connected() == 1:
        return values
    import torch
    from accelerate import PartialState

    own = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    dtype = torch.float64 if own.is_floating_point() else own.dtype
    total = own.detach().to(PartialState().device, dtype, copy=True).contiguous()
    torch.distributed.all_reduce(total)
    total = total.to(own.device)
    return total if isinstance(values, torch.Tensor) else total.numpy()


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Add up the gradients of parameters over the processes, where one that has none counts as 0; collective."""
    if num_connected() == 1:
        return
    import torch

    for parameter in parameters:
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = sum_over_processes(own).to(parameter.dtype)
