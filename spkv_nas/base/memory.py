"""Memory that is there, and a check before it is asked for: the operating system ends a program that takes too much.

What is there is what the machine has available, or what is left to the control group (a container's limit) if that is
less.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from spkv_nas.base.distributed import num_local_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.units import format_bytes

Result = TypeVar("Result")
CHUNK_BYTES = 1 << 28  # of a chunk's logits in float32, which are made at once
_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_FILES = {  # limit and use, by the controllers' field in /proc/self/cgroup: version 2 has none, version 1 names them
    "": ("memory.max", "memory.current"),
    "memory": ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
}


def chunk_tokens(vocabulary: int) -> int:
    """Tokens of a chunk, at least one, of a vocabulary of so many."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def available_bytes(device: str = "cpu") -> int:
    """Bytes that a program may still take: of the GPU's memory for "cuda", of the machine's elsewhere."""
    if device.startswith("cuda"):
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by PyTorch, for itself
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return min(int(psutil.virtual_memory().available), *_left_to_groups())


def own_bytes(device: str = "cpu") -> int:
    """``available_bytes``, but of the machine's only this process's share, where torchrun has started several on it."""
    return available_bytes(device) // (1 if device.startswith("cuda") else num_local_processes())


def require(num_bytes: float, what: str, remedy: str, *, device: str = "cpu") -> None:
    """Check that ``num_bytes`` are there before they are asked for.

    Args:
        what: takes them, and begins the error ("logits of 8 blocks of 512 tokens").
        remedy: what to do, on a line of its own.

    Raises:
        UserError: they are not.
    """
    there = available_bytes(device)
    if num_bytes > there:
        raise UserError(
            f"{what}: that takes at least {format_bytes(round(num_bytes))} of memory, and {format_bytes(there)} are "
            f"there\n{remedy}"
        )


class AdaptiveBatchSize:
    """How many blocks pass at once: half as many from the moment on at which a GPU has no memory for them.

    What was foreseen (``cost.memory``) may be wrong, and others may take memory meanwhile. accelerate's
    ``find_executable_batch_size`` begins whole functions again, where here one pass is to be; it has the same idea of
    which errors say that memory is short.

    Attributes:
        number: of blocks, at least one.
    """

    def __init__(self, number: int) -> None:
        self.number = max(1, number)

    def run(self, work: Callable[[int], Result], there: int) -> Result:
        """``work(n)`` with as many blocks as pass at once, of those that are ``there``.

        It is begun again with fewer, so it must leave nothing behind where it fails. Raises what it raises where there
        is no memory for one block.

        Warns:
            UserWarning: fewer pass from here on.
        """
        while True:
            tried = min(self.number, there)
            try:
                return work(tried)
            except Exception as error:
                if tried == 1 or not is_short_of_memory(error):
                    raise
            empty_cache()  # only now, as the error held what the pass had made
            self.number = math.ceil(tried / 2)
            warnings.warn(f"no memory for {tried} blocks at once: {self.number} from here on", stacklevel=2)


def is_short_of_memory(error: Exception) -> bool:
    """Whether an error says that a device, or PyTorch's own allocator for the CPU, has no more memory."""
    from accelerate.utils.memory import should_reduce_batch_size

    return bool(should_reduce_batch_size(error))


def empty_cache() -> None:
    """Give back what PyTorch keeps of a GPU's memory for itself; a slow call."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def _left_to_groups(groups: Path = _GROUPS, mount: Path = _MOUNT) -> list[int]:
    """Limit minus use of the process's control group and of those above it; at least one number."""
    left = [1 << 62]
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return left
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = next((names for key, names in _FILES.items() if key in controllers.split(",")), None)
        if names is None:
            continue
        limit_file, use_file = (mount / name for name in names)
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):  # a container may see its own group as the root
            limit, use = (_number(file.parent / group / file.name) for file in (limit_file, use_file))
            if limit is not None and use is not None:
                left.append(max(0, limit - use + _given_back(limit_file.parent / group / "memory.stat")))
    return left


def _number(file: Path) -> int | None:
    """What the file says; None where it is not there or says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _given_back(file: Path) -> int:
    """Bytes that count as used, but hold files, which the system drops when memory is asked for."""
    try:
        numbers = dict(line.split() for line in file.read_text().splitlines())
        kinds = ("inactive_file", "active_file")  # read once, and more often
        return sum(int(numbers.get(f"total_{kind}", numbers.get(kind, 0))) for kind in kinds)
    except (OSError, ValueError):
        return 0
