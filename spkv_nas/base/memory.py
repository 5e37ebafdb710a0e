"""Available memory, within a control group's limit; checked first, as the system kills what exceeds it."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from spkv_nas.base import distributed, errors, units
from spkv_nas.base.progress import Progress

Result = TypeVar("Result")
CHUNK_BYTES = 1 << 28  # of the logits of a chunk of tokens, in float32
# A chunk with gradients on a CPU is this part: a whole one takes up to a sixth longer
_CPU_PART = 8
_GPU_PART = 64  # a chunk with gradients takes at most this part of a GPU's memory


def chunk_bytes(device: str, gpu_memory: float | None = None) -> int:
    """Return the bytes, in float32, of the logits of a chunk with gradients, in training and in forecasts.

    On a GPU they are the largest power of two within 1/64 of all its memory, or of ``gpu_memory`` for a GPU that is not
    here: 1 GiB on an H100, as each chunk costs the host some time. Free memory would depend on other programs, so that
    a repeated or resumed run would round otherwise; a pass that it does not suffice for is halved.
    """
    if device == "cpu":
        return CHUNK_BYTES // _CPU_PART
    if not device.startswith("cuda"):
        return CHUNK_BYTES
    if gpu_memory is None:
        import torch

        gpu_memory = torch.cuda.get_device_properties(device).total_memory
    part = int(gpu_memory // _GPU_PART)
    power_of_two = 1 << (part.bit_length() - 1)
    return max(CHUNK_BYTES, power_of_two)


def chunk_tokens(vocabulary: int, num_bytes: int | None = None) -> int:
    """Return the tokens, at least one, of a chunk of ``num_bytes`` of logits; by default one without gradients."""
    if num_bytes is None:
        num_bytes = CHUNK_BYTES
    return max(1, num_bytes // (4 * vocabulary))


def available_bytes(device: str = "cpu") -> int:
    """Return the bytes that a program can still allocate: GPU memory for "cuda", else machine memory."""
    if device.startswith("cuda"):
        import torch

        # PyTorch's own cache can be used again
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + cached
    return min(int(psutil.virtual_memory().available), *_left_to_groups())


def available_bytes_per_process(device: str = "cpu") -> int:
    """Return ``available_bytes``, divided by the number of local torchrun processes for machine memory."""
    available = available_bytes(device)
    if device.startswith("cuda"):
        return available
    return available // distributed.num_local_processes()


def require(num_bytes: float, what: str, remedy: str, *, device: str = "cpu") -> None:
    """Check that a device has ``num_bytes``; ``UserError`` says ``what`` needs them, and the remedy."""
    free = available_bytes(device)
    if num_bytes > free:
        needed = units.format_bytes(round(num_bytes))
        available = units.format_bytes(free)
        raise errors.UserError(
            f"{what}: needs at least {needed} of memory, "
            f"but only {available} is available\n{remedy}"
        )


class AdaptiveBatchSize:
    """Micro-batch size, in blocks, that halves after a CUDA out-of-memory error; ``number`` is at least one.

    The forecast of ``cost.formulas`` may be wrong, and other programs may allocate memory meanwhile. accelerate's
    ``find_executable_batch_size`` restarts whole functions, whereas this retries a single pass; both use the same test
    for out-of-memory errors.
    """

    def __init__(self, number: int) -> None:
        """Start with ``number`` blocks, at least one."""
        self.number = max(1, number)

    def run(self, work: Callable[[int], Result], remaining: int) -> Result:
        """Call ``work(n)`` with n blocks, at most ``remaining``; halve n, with a warning, if memory runs out.

        ``work`` must have no side effects if it fails. Its error is raised if memory does not even suffice for one
        block.
        """
        while True:
            batch_size = min(self.number, remaining)
            try:
                return work(batch_size)
            except Exception as error:
                if batch_size == 1 or not is_short_of_memory(error):
                    raise
            empty_cache()  # after the except block, whose error keeps tensors alive
            self.number = math.ceil(batch_size / 2)
            warnings.warn(
                f"out of memory for {batch_size} blocks per pass: continuing with {self.number}",
                stacklevel=2,
            )

    def run_all(
        self, work: Callable[[range], list[Result]], items: range, progress: Progress | None = None
    ) -> list[Result]:
        """Call ``work`` with consecutive parts of ``items`` that fit in memory, and return all results in order.

        ``work`` must have no side effects if it fails; ``progress`` is called with (items done, in all) after each
        part.
        """
        results = list[Result]()
        done = 0
        while done < len(items):

            def attempt(size: int, left: range = items[done:]) -> tuple[int, list[Result]]:
                return size, work(left[:size])

            # Run as many of the remaining items as fit
            size, part = self.run(attempt, len(items) - done)
            results += part
            done += size
            if progress is not None:
                progress(done, len(items))
        return results


def is_short_of_memory(error: Exception) -> bool:
    """Return whether an error means that a device, or PyTorch's CPU allocator, ran out of memory."""
    from accelerate.utils.memory import should_reduce_batch_size

    return bool(should_reduce_batch_size(error))


def empty_cache() -> None:
    """Release the GPU memory that PyTorch caches; slow."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def _left_to_groups(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """Return limit minus usage of the process's control group (v2) and of each ancestor; at least one number."""
    available = [1 << 62]
    if not groups.is_file():  # not Linux
        return available
    own_group = Path()  # a container may see its own group as the root
    for line in groups.read_text().splitlines():
        if line.startswith("0::/"):
            own_group = Path(line.removeprefix("0::/"))
            break
    for group in (own_group, *own_group.parents):
        folder = mount / group
        limit = _number(folder / "memory.max")
        used = _number(folder / "memory.current")
        if limit is not None and used is not None:
            left = limit - used + _reclaimable_bytes(folder / "memory.stat")
            available.append(max(0, left))
    return available


def _number(file: Path) -> int | None:
    """Read an integer from a file; None if the file does not exist or contains "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable_bytes(file: Path) -> int:
    """Return the bytes of page cache in a ``memory.stat`` file: counted as used, but freed when memory is needed."""
    try:
        numbers = dict(line.split() for line in file.read_text().splitlines())
        return sum(int(numbers.get(kind, 0)) for kind in ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return 0
