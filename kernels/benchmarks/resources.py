"""Compile the Triton kernels ahead of time, no GPU needed: registers, spills, shared memory, and unguarded loads.

    python kernels/benchmarks/resources.py                      # sm_90, bfloat16 and float32, D 64 to 256, all modes
    python kernels/benchmarks/resources.py --arch 80 --size 128 --kernel bwd_dkdv --mode soft
    python kernels/benchmarks/resources.py --config 64,128,8,3 --kernel fwd --size 128    # a candidate instead

Mode ``sinks`` is a window with sink tokens and learned sinks; ``--with sink_logits starts ends softcap`` adds learned
sinks, packed documents and a cap of the scores to other modes.

The report is that of the ``ptxas`` in the triton package: registers and bytes spilled per thread, bytes of shared
memory per block. A spill is a value that found no register and goes through memory instead. Unguarded are the
asynchronous loads without a condition, counted in the LLVM code: pipelining moves the first loads of a loop ahead of
it, where they must depend on whether the loop runs at all.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
import triton
from spkv_kernels.triton import backward, common, decode_kernels, forward, sinks
from spkv_kernels.triton.config import Config, default
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KERNELS = {
    "fwd": (forward.attention_fwd_kernel, "fwd"),
    "bwd_dq": (backward.attention_bwd_dq_kernel, "bwd_dq"),
    "bwd_dkdv": (backward.attention_bwd_dkdv_kernel, "bwd_dkdv"),
    "bwd_far_dkdv": (backward.attention_bwd_far_dkdv_kernel, "bwd_dkdv"),
    "bwd_sink_sum": (sinks.attention_bwd_sink_sum_kernel, "bwd_dq"),
    "decode": (decode_kernels.decode_fwd_kernel, "decode"),
    "decode_combine": (decode_kernels.decode_combine_kernel, "decode"),
    "append": (decode_kernels.cache_append_kernel, "decode"),
}
_MODES = {  # of kernels that do not have all
    "bwd_far_dkdv": ("hard",),
    "bwd_sink_sum": ("sinks",),
    "decode": ("none",),
    "decode_combine": ("none", "sinks"),
    "append": ("none",),
}
# Launched with Triton's default warps and stages
_UNCONFIGURED = {
    "bwd_sink_sum",
    "decode_combine",
    "append",
}
MODES = {
    "none": common.NONE.value,
    "soft": common.SOFT.value,
    "hard": common.HARD.value,
    "sinks": common.NONE.value,
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Bytes per block, CUDA C++ programming guide, "compute capabilities"
SHARED_LIMIT = {
    80: 163 * 1024,
    90: 227 * 1024,
}
_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
_FLOAT32 = {
    "gate",
    "lse",
    "delta",
    "dgate",
    "far_dk",
    "far_dv",
    "part",
    "part_dk",
    "part_dv",
    "sink_logits",
}
_OTHER_TYPES = {
    "windows": "*i32",
    "sinks": "*i32",
    "positions": "*i32",
    "rank": "*i32",
    "starts": "*i32",
    "ends": "*i32",
    "keep": "*u8",
    "ring_keep": "*u8",
    "table": "*i64",
    "lengths": "*i64",
    "seq_lens": "*i64",
}
_FAR_KEYS = {"far_k", "far_v", "positions", "rank", "keep"}
_SINKS = {"sinks", "part_dk", "part_dv"}
_OPTIONAL = {"sink_logits", "starts", "ends", "softcap"}
_ABSENT = {  # arguments that are None, by mode
    "none": _FAR_KEYS | _SINKS | {"gate", "far_dk", "far_dv"} | _OPTIONAL,
    "soft": _FAR_KEYS | _SINKS | {"far_dk", "far_dv"} | _OPTIONAL,
    "hard": _SINKS | {"gate"} | _OPTIONAL,
    "sinks": _FAR_KEYS | {"gate"} | _OPTIONAL - {"sink_logits"},
}


class Resources(NamedTuple):
    """Resources of a compiled kernel.

    Attributes:
        registers: registers per thread.
        spilled: bytes spilled per thread.
        shared: bytes of shared memory per block.
        unguarded: number of asynchronous loads without a condition.
    """

    registers: int
    spilled: int
    shared: int
    unguarded: int


def compile_kernel(
    kernel: str,
    mode: str,
    dtype: str,
    size: int,
    arch: int,
    config: Config | None = None,
    present: Collection[str] = (),
    group: int = 4,
) -> Resources:
    """Compile a kernel for ``sm_<arch>`` with the specialisation of a launch: pointers and strides divisible by 16.

    ``present`` names optional arguments that are not None.
    """
    # Choose the launch options and constants
    fn, configured = KERNELS[kernel]
    config = config or default(configured, size, DTYPES[dtype])
    options = (
        {}
        if kernel in _UNCONFIGURED
        else {"num_warps": config.num_warps, "num_stages": config.num_stages}
    )
    constants = {
        "GROUP": group,
        "MODE": MODES[mode],
        "PAGE": 16,
        "SIZE": size,
        "BLOCK_D": max(16, triton.next_power_of_2(size)),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "EVEN": True,
    }
    constants = {name: value for name, value in constants.items() if name in fn.arg_names}
    # Describe the arguments by their names
    absent = (_ABSENT[mode] if "MODE" in constants else {"sink_logits", "softcap"}).difference(
        present
    )
    signature, attributes = {}, {}
    for index, name in enumerate(fn.arg_names):
        role = name.removeprefix("p_")
        if name in constants:
            signature[name] = "constexpr"
        elif role in absent:
            signature[name], constants[name] = "constexpr", None
        elif name.startswith("p_"):
            signature[name] = (
                "*fp32" if role in _FLOAT32 else _OTHER_TYPES.get(role, _POINTERS[dtype])
            )
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
        if name.startswith(("p_", "stride_")) and signature[name] != "constexpr":
            attributes[(index,)] = [["tt.divisibility", 16]]
    # Compile, and parse the report of ptxas
    source = ASTSource(
        fn, signature, {(fn.arg_names.index(k),): v for k, v in constants.items()}, attributes
    )
    log = io.StringIO()
    with (
        triton.knobs.nvidia.scope(),
        triton.knobs.compilation.scope(),
        contextlib.redirect_stdout(log),
    ):
        # Printed only when it compiles, so bypass the cache
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    spills = re.search(r"(\d+) bytes spill stores", log.getvalue())
    assert registers is not None, log.getvalue()
    spilled = int(spills[1]) if spills else 0
    return Resources(
        int(registers[1]), spilled, compiled.metadata.shared, _unguarded(compiled.asm["llir"])
    )


def _unguarded(code: str) -> int:
    """Count the asynchronous loads that read a constant number of bytes, where a guarded one may read none."""
    loads = (
        line for line in code.splitlines() if "cp.async.c" in line and "asm sideeffect" in line
    )
    return sum(re.search(r"i32 \d+(, i1 [^)]*)?\) #", line) is not None for line in loads)


def cases(kernels: list[str], modes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the (kernel, mode) pairs that exist."""
    for kernel, mode in itertools.product(kernels, modes):
        if mode in _MODES.get(kernel, MODES):
            yield kernel, mode


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch", type=int, nargs="*", default=[90], help="compute capabilities, such as 80 90"
    )
    parser.add_argument("--size", type=int, nargs="*", default=[64, 128, 256], help="head sizes D")
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float32"], choices=DTYPES)
    parser.add_argument("--mode", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument(
        "--with",
        nargs="*",
        default=[],
        choices=_OPTIONAL,
        dest="present",
        help="optional arguments",
    )
    parser.add_argument("--kernel", nargs="*", default=list(KERNELS), choices=KERNELS)
    parser.add_argument(
        "--config",
        nargs="*",
        default=[],
        help="BLOCK_M,BLOCK_N,warps,stages to compile instead of the default",
    )
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line instead of a table"
    )
    options = parser.parse_args()
    # Print the head of the table
    candidates = [Config(*(int(x) for x in text.split(","))) for text in options.config]
    columns = (
        "arch",
        "dtype",
        "D",
        "kernel",
        "mode",
        "M x N, warps, stages",
        "registers",
        "spilled",
        "shared",
        "unguarded",
    )
    if not options.json:
        print("|", " | ".join(columns), "|\n|" + "---|" * len(columns))
    # Compile and print every case
    for arch, dtype, size in itertools.product(options.arch, options.dtype, options.size):
        for kernel, mode in cases(options.kernel, options.mode):
            for config in candidates or [default(KERNELS[kernel][1], size, DTYPES[dtype])]:
                used = compile_kernel(
                    kernel, mode, dtype, size, arch, config, options.present, options.group
                )
                tile = (
                    f"{config.block_m} x {config.block_n}, {config.num_warps}, {config.num_stages}"
                )
                tile = "-" if kernel in _UNCONFIGURED else tile
                row = dict(
                    zip(columns, (arch, dtype, size, kernel, mode, tile, *used), strict=True)
                )
                if options.json:
                    print(json.dumps({**row, "shared_limit": SHARED_LIMIT[arch]}), flush=True)
                else:
                    print("|", " | ".join(str(x) for x in row.values()), "|", flush=True)


if __name__ == "__main__":
    main()
