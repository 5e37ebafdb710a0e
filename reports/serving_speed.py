"""Measure tokens per second in vLLM beside spkv-nas's own ``generate``, with full attention and with layouts.

    python reports/serving_speed.py --python /path/to/vllm/bin/python
    python reports/serving_speed.py --python ... --context 2048 --batch 1 --steps 8 --rounds 1 --layers 4   # minutes
    python reports/serving_speed.py --python ... --model path/to/model --device cuda --dtype bfloat16 --compile

Configurations: in vLLM full attention, whole layers, and heads, as pairs and in units; in ``generate`` full attention,
with the cache of transformers, and both layouts, with the per-head cache. The layouts have the same number of global
heads; those of "heads" are drawn at random. Unless both pass ``serve-check`` in float32, nothing is timed.

Each configuration runs in a process of its own, all of them in order and then in reverse order. A sample is a batch of
random prompts: the time until every request has a token (prefill), then that of ``--steps`` more tokens of every
request (decode). Numbers are medians; a ratio is the rate over that of full attention in vLLM, so that above 1 is
faster. Prefix caching is off. A cell with more tokens than ``--max-tokens`` is left out. One whose requests vLLM does
not run at once, or not within ``--seconds``, shows as "-". The last line of the output is JSON.

Each sample is printed when it is taken. ``--samples FILE`` keeps them, so that an interrupted run resumes; a file whose
samples were taken with other options, versions or hardware is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from serving_samples import Sample, Samples, report

# Heads of a unit; 0: one part for the global and one for the local heads of a layer
PAIRS = 0
ONE_HEAD = 1
WARM_UP = (64, 1)  # context and batch of a first, untimed sample
MARK = "sample: "  # begins the lines of a process that are samples


@dataclass(frozen=True)
class Configuration:
    """Way to run a model.

    Attributes:
        name: name in the table.
        folder: "dense", "layers" or "heads", subfolder of the models.
        in_vllm: whether vLLM runs it, not this package.
        unit: heads of a unit in vLLM; None: as the plug-in chooses, or dense.
    """

    name: str
    folder: str
    in_vllm: bool = True
    unit: int | None = None


CONFIGURATIONS = (
    Configuration("vLLM, full attention", "dense"),
    Configuration("vLLM, whole layers", "layers"),
    Configuration("vLLM, heads as pairs", "heads", unit=PAIRS),
    Configuration("vLLM, heads in units", "heads", unit=ONE_HEAD),
    Configuration("generate, full attention", "dense", in_vllm=False),
    Configuration("generate, whole layers", "layers", in_vllm=False),
    Configuration("generate, heads", "heads", in_vllm=False),
)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", required=True, help="Python of an environment with vLLM and spkv-nas"
    )
    parser.add_argument(
        "--model", help="dense checkpoint (default: a random Llama of the sizes below)"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--heads", type=int, nargs=3, metavar=("HQ", "HKV", "D"), default=[8, 4, 64]
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.25,
        help="share of the layers, and of the heads, that is global",
    )
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--max-tokens", type=int, default=1 << 18, help="largest batch x context to run"
    )
    parser.add_argument("--steps", type=int, default=32, help="tokens to generate per request")
    parser.add_argument("--rounds", type=int, default=3, help="samples per process")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="longest time of a sample in vLLM"
    )
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step in vLLM")
    parser.add_argument("--memory", type=int, default=8, help="GiB of vLLM's cache on a CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--compile", action="store_true", help="let vLLM compile and capture graphs"
    )
    parser.add_argument(
        "--samples",
        type=Path,
        help="file that keeps the samples, to go on with after an interruption",
    )
    return parser.parse_args()


def main() -> None:
    """Make and check the models, time all configurations in both orders, and print a table and a line of JSON."""
    if sys.argv[1:2] == ["--process"]:
        process(json.loads(sys.argv[2]))
        return
    options = parse()
    samples = Samples(options)
    with tempfile.TemporaryDirectory() as scratch:
        make_models(Path(scratch), options)
        check(Path(scratch), options.python)
        for turn, configuration in enumerate((*CONFIGURATIONS, *reversed(CONFIGURATIONS))):
            time_configuration(turn, configuration, Path(scratch), options, samples)
    report(
        samples.by_configuration([configuration.name for configuration in CONFIGURATIONS]), options
    )


def make_models(folder: Path, options: argparse.Namespace) -> None:
    """Write the dense model and exports with both layouts."""
    import numpy as np
    from transformers import AutoConfig, AutoModelForCausalLM

    import spkv_nas
    from spkv_nas.model.export.export import export

    # Model
    if options.model is None:
        num_queries, num_kv_heads, head_dim = options.heads
        tokenizer = spkv_nas.load("embedded:dense")[1]
        config = AutoConfig.for_model(
            "llama", vocab_size=len(tokenizer), hidden_size=num_queries * head_dim,
            intermediate_size=4 * num_queries * head_dim, num_hidden_layers=options.layers,
            num_attention_heads=num_queries, num_key_value_heads=num_kv_heads, head_dim=head_dim,
            max_position_embeddings=2 * max(options.context), initializer_range=0.1,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
    else:
        model, tokenizer = spkv_nas.load(options.model)
    spkv_nas.save(model, tokenizer, folder / "dense")
    # Layouts with the same number of global heads: evenly spaced layers, and random heads
    config = model.config.get_text_config()
    num_layers, num_kv_heads = config.num_hidden_layers, config.num_key_value_heads
    num_global = max(1, round(options.share * num_layers))
    layers = {round((index + 0.5) * num_layers / num_global - 0.5) for index in range(num_global)}
    rows = tuple(("G" if layer in layers else "L") * num_kv_heads for layer in range(num_layers))
    letters = np.array(list("".join(rows)))
    shuffled = "".join(np.random.default_rng(0).permutation(letters))
    heads = tuple(
        shuffled[start : start + num_kv_heads] for start in range(0, len(shuffled), num_kv_heads)
    )
    for name, grid in (("layers", rows), ("heads", heads)):
        export(
            spkv_nas.Layout(grid, window=options.window), folder / "dense", folder / name, to="spkv"
        )
        print(f"{name}: {' '.join(grid)}", file=sys.stderr, flush=True)


def check(folder: Path, python: str) -> None:
    """Check that vLLM computes both hybrids. Exits if it does not."""
    from spkv_nas.serving.engine_check import compare_with_engine

    for name in ("layers", "heads"):
        result = compare_with_engine(folder / name, "vllm", python=python)
        if not result.passed:
            raise SystemExit(f"{name}: {result}")


def time_configuration(
    turn: int,
    configuration: Configuration,
    folder: Path,
    options: argparse.Namespace,
    samples: Samples,
) -> None:
    """Take the missing samples of a configuration in a new process. Exits if it fails."""
    # Find what is missing
    cells = [
        pair
        for pair in product(options.context, options.batch)
        if pair[0] * pair[1] <= options.max_tokens
    ]
    missing = {
        cell_name(*cell): options.rounds - samples.count(turn, cell_name(*cell)) for cell in cells
    }
    if not any(missing.values()):
        return
    request = {
        "folder": str(folder / configuration.folder), "in_vllm": configuration.in_vllm, "unit": configuration.unit,
        "cells": cells, "missing": missing, "steps": options.steps, "seconds": options.seconds,
        "chunk": options.chunk, "dtype": options.dtype, "device": options.device, "eager": not options.compile,
    }  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(options.memory), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    # Run the process, and read its samples as they come; vLLM may print lines of its own
    python = options.python if configuration.in_vllm else sys.executable
    command = [python, __file__, "--process", json.dumps(request)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout or ():
            if line.startswith(MARK):
                samples.add(Sample(turn, configuration.name, **json.loads(line.removeprefix(MARK))))
    if child.returncode:
        raise SystemExit(f"{configuration.name}: the process ended with {child.returncode}")


def cell_name(context: int, batch: int) -> str:
    """Return the name of a cell."""
    return f"{context} x {batch}"


def process(request: dict[str, Any]) -> None:
    """Take samples of one configuration, and print each as a line of JSON."""
    import torch

    torch.manual_seed(0)
    sample, num_tokens = vllm_sampler(request) if request["in_vllm"] else generate_sampler(request)

    def prompts(context: int, batch: int) -> list[list[int]]:
        """Draw random prompts."""
        return torch.randint(num_tokens, (batch, context)).tolist()

    sample(prompts(*WARM_UP))
    for number in range(max(request["missing"].values())):
        for context, batch in request["cells"]:
            name = cell_name(context, batch)
            if number < request["missing"][name]:
                rates = sample(prompts(context, batch))
                print(f"{MARK}{json.dumps({'cell': name, 'rates': rates})}", flush=True)


# Tokens per second of prefill and decoding
Sampler = Callable[[list[list[int]]], "tuple[float, float] | None"]


def vllm_sampler(request: dict[str, Any]) -> tuple[Sampler, int]:
    """Return what times a batch in vLLM, and the size of the vocabulary."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    longest = max(context for context, _ in request["cells"])
    most_tokens = max(context * batch for context, batch in request["cells"])
    most_batch = max(batch for _, batch in request["cells"])
    waiting = most_tokens // request["chunk"] + most_batch  # steps until the last request has begun
    settings = {
        "dtype": request["dtype"], "enforce_eager": request["eager"], "enable_prefix_caching": False,
        "max_model_len": longest + waiting + request["steps"] + 2, "max_num_seqs": most_batch,
        "max_num_batched_tokens": max(request["chunk"], most_batch), "skip_tokenizer_init": True, "seed": 0,
    }  # fmt: skip
    unit = request["unit"]
    forced = patch("spkv_nas.serving.vllm.attention.choose_unit", lambda rows, cache: unit)
    with nullcontext() if unit is None else forced:
        model = LLM(request["folder"], **settings)
    engine = model.llm_engine
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=waiting + request["steps"] + 1,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )

    def sample(prompts: list[list[int]]) -> tuple[float, float] | None:
        """Time a batch; None if its requests do not run at once, or not in time."""
        # Prefill, until every request has a token
        begin = time.perf_counter()
        deadline = begin + request["seconds"]
        names = [str(number) for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        started: set[str] = set()
        while len(started) < len(names) and time.perf_counter() < deadline:
            started |= {output.request_id for output in engine.step()}
        first = time.perf_counter()
        # Decode, until every request has as many tokens as asked for; none may finish before
        counts = dict.fromkeys(names, 0)
        is_full = len(started) == len(names)
        while is_full and min(counts.values()) < request["steps"]:
            for output in engine.step():
                counts[output.request_id] += len(output.outputs[0].token_ids)
                is_full = is_full and not output.finished
            is_full = is_full and time.perf_counter() < deadline
        last = time.perf_counter()
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        return (
            (sum(map(len, prompts)) / (first - begin), sum(counts.values()) / (last - first))
            if is_full
            else None
        )

    return sample, engine.model_config.get_vocab_size()


def generate_sampler(request: dict[str, Any]) -> tuple[Sampler, int]:
    """Return what times a batch in ``generate``, and the size of the vocabulary."""
    import torch
    from torch import Tensor
    from transformers import StoppingCriteriaList

    import spkv_nas

    model, _ = spkv_nas.load(
        request["folder"], dtype=request["dtype"], device_map=request["device"]
    )
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0

    def sample(prompts: list[list[int]]) -> tuple[float, float]:
        """Time a batch."""
        ticks: list[float] = []

        def tick(tokens: Tensor, scores: Tensor, **_: Any) -> Tensor:
            """Record the time of a token, and stop nothing."""
            ticks.append(time.perf_counter())
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        ids = torch.tensor(prompts, device=model.device)
        begin = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["steps"] + 1,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([tick]),
        )
        return ids.numel() / (ticks[0] - begin), len(prompts) * request["steps"] / (
            ticks[-1] - ticks[0]
        )

    return sample, int(model.config.get_text_config().vocab_size)


if __name__ == "__main__":
    main()
