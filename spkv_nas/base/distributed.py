"""Share work among the processes that torchrun starts: ranks, shares, and collective operations.

Process 0 builds caches, writes files and prints; the others wait for it and read its files, so all nodes of a cluster
must share the workspace's file system. Measurements process a share of the text per process (``own_share``; for blocks
``data.batches.run_own_batches``) and sum the results (``sum_over_processes``), so that every process has the complete
result. With one process, and in programs under torchrun that do not call ``connect``, everything here is a no-op.

Functions marked "collective" must be called on all processes, in the same order.
"""

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
# Process 0 may tokenise for hours; torchrun detects failed processes at once
TIMEOUT = timedelta(hours=6)

_connected = False  # whether ``connect`` joined the process group


def num_processes() -> int:
    """Return the number of processes; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_connected() -> int:
    """Return the number of processes that share work; 1 before ``connect``."""
    return num_processes() if _connected else 1


def process_index() -> int:
    """Return the rank of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def num_local_processes() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def own_share(number: int) -> range:
    """Return which of ``number`` items this process handles: a contiguous range; sizes differ by at most one."""
    processes = num_connected()
    index = process_index() if processes > 1 else 0
    return range(number * index // processes, number * (index + 1) // processes)


def connect(device: str | None = None) -> None:
    """Join the process group: gloo for what is on the CPU, and NCCL for what is on GPUs unless ``device`` is "cpu"."""
    if num_processes() == 1:
        return
    import torch
    from accelerate import PartialState

    global _connected
    _connected = True
    if not torch.distributed.is_initialized():
        # Start the process group, with gloo beside NCCL
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        if not on_cpu:
            torch.distributed.init_process_group("cuda:nccl,cpu:gloo", timeout=TIMEOUT)
        PartialState(cpu=on_cpu, timeout=TIMEOUT)


def disconnect() -> None:
    """Leave the process group, if there is one."""
    import torch

    global _connected
    _connected = False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave(exit_code: int) -> None:
    """Exit this process if it is one of several, else return."""
    if num_processes() == 1:
        return
    disconnect()
    sys.stdout.flush()
    sys.stderr.flush()
    # In Python's own shutdown, threads of a process group that is gone may abort the process
    os._exit(exit_code)


def is_lost_process(error: BaseException) -> bool:
    """Return whether an error means that another process exited, as gloo and NCCL report it."""
    return (
        num_processes() > 1
        and re.search(r"onnection (closed|reset|refused)|gloo|NCCL", str(error)) is not None
    )


def is_sharded(model: "nn.Module") -> bool:
    """Return whether ``model`` is sharded across processes, so that its forward pass is collective."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def pass_device(model: "nn.Module") -> "torch.device":
    """Return the device for inputs of ``model``: that of its first parameter, or where its shards are gathered."""
    import torch
    from torch.distributed.tensor import DTensor

    parameter = next(model.parameters()).data
    if isinstance(parameter, DTensor):
        return torch.device(parameter.device_mesh.device_type)
    return parameter.device


def blocks_per_process(batch_size: int, multiple: int = 1) -> int:
    """Return the blocks per process in a global batch; ``UserError`` if they are not a multiple of ``multiple``."""
    processes = num_processes()
    if batch_size % (processes * multiple):
        multiple_text = "" if multiple == 1 else f", {multiple} together"
        raise UserError(
            f"a batch_size of {batch_size} blocks cannot be divided "
            f"evenly among {processes} processes{multiple_text}\n"
            "batch sizes count the blocks of all processes: "
            f"use a multiple of {processes * multiple}"
        )
    return batch_size // processes


def on_main(work: Callable[[], Result]) -> Result:
    """Run ``work`` on process 0; return its result, or raise its ``UserError``, on all processes. Collective."""
    if num_connected() == 1:
        return work()
    import torch

    # Run on process 0, and catch an error so that the others do not wait for a result
    result_and_error: list[Any] = [None, None]
    if process_index() == 0:
        try:
            result_and_error[0] = work()
        except UserError as error:
            result_and_error[1] = error
    # Share the outcome with all processes
    torch.distributed.broadcast_object_list(result_and_error, src=0)
    if result_and_error[1] is not None:
        raise result_and_error[1]
    result: Result = result_and_error[0]
    return result


def after_main(work: Callable[[], Result]) -> Result:
    """Run ``work`` on process 0, then on the others, which find its files; return each one's own result. Collective."""
    done: list[Result] = []
    on_main(lambda: done.append(work()))
    return done[0] if done else work()


def gathered(value: Result) -> list[Result]:
    """Gather a value of every process, in order of rank; tensors in it must be on the CPU. Collective."""
    if num_connected() == 1:
        return [value]
    import torch

    values: list[Any] = [None] * num_connected()
    torch.distributed.all_gather_object(values, value)
    return values


def sum_over_processes(values: Values) -> Values:
    """Sum over processes, integers exactly, else in float64; all get the same bits. Collective.

    Arrays are summed on the CPU, which waits for no GPU, unless another program made a process group without gloo.
    """
    if num_connected() == 1:
        return values
    import torch
    from accelerate import PartialState

    # Copy the values, tensors to the device of the process group, in a dtype that sums precisely
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    on_cpu = (
        not isinstance(values, torch.Tensor) and "cpu:" in torch.distributed.get_backend_config()
    )
    device = "cpu" if on_cpu else PartialState().device
    total = tensor.detach().to(device, dtype, copy=True).contiguous()
    torch.distributed.all_reduce(total)
    total = total.to(tensor.device)
    return total if isinstance(values, torch.Tensor) else total.numpy()


def sum_gradients(parameters: "Iterable[Tensor]") -> None:
    """Sum the gradients of parameters over the processes, counting a missing gradient as 0. Collective."""
    if num_connected() == 1:
        return
    import torch

    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = sum_over_processes(gradient).to(parameter.dtype)
