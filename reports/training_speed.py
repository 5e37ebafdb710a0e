"""Time training steps against a plain loop over the same model, and count the host's work for the attention operator.

    OMP_NUM_THREADS=1 python reports/training_speed.py    # a small Llama, float32, on a CPU
    python reports/training_speed.py --device cuda --layers 12 --width 512 --block-size 2048 --batch-size 16 --compile
    python reports/training_speed.py --cases "full attention" "SP-KV, hard gates" --density 0.25    # some cases alone

The plain loop is the model of transformers with PyTorch's attention, its own loss, AdamW and nothing else. All steps
run in one process on the same random tokens, in both orders; medians, on a CPU of processor time, which other programs
disturb less (with ``OMP_NUM_THREADS=1``). ``--compile`` compiles the layers of all of them. Hard gates keep the share
``--density`` of the keys beyond the window: their biases are set to that quantile of the logits on the same tokens.
"""

import argparse
import cProfile
import os
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch

if not torch.cuda.is_available():  # a GPU compiles the kernels, which are what is timed there
    os.environ.setdefault("TRITON_INTERPRET", "1")  # for the count of calls, which launches nothing

# isort: split
from spkv_kernels import attention
from spkv_kernels.timing import device_name, synchronise
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.model import attach, gates, modes, windows
from spkv_nas.model.distillation import Distillation, copied_teacher
from spkv_nas.model.loss import loss_in_chunks

CASES = {  # gate mode or share of global heads, and whether a teacher's predictions are learned
    "plain loop": (None, False),
    "full attention": (1.0, False),
    "full attention, teacher": (1.0, True),
    "layout, a quarter global": (0.25, False),
    "layout, a quarter global, teacher": (0.25, True),
    "SP-KV, soft gates": ("soft", False),
    "SP-KV, hard gates": ("hard", False),
}
SHAPE = {
    "layers": 4,
    "width": 256,
    "head_size": 64,
    "vocabulary": 2048,
    "block_size": 1024,
    "batch_size": 1,
}


def new_model(options: argparse.Namespace) -> PreTrainedModel:
    """Create a Llama with random weights; by default, two query heads for each KV head."""
    torch.manual_seed(0)
    heads = options.width // options.head_size
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.ffn or 2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=options.kv_heads or max(1, heads // 2),
        head_dim=options.head_size,
        max_position_embeddings=options.block_size,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(options.device)


@torch.no_grad()
def keep_share(model: PreTrainedModel, tokens: torch.Tensor, density: float) -> None:
    """Shift the bias of every gated head so that its gate keeps the share ``density`` of the keys of ``tokens`` [B, T].

    The gates' threshold is that of ``GateConfig``, 0.5, whose logit is 0.
    """

    def shift(module: gates.UtilityPredictor, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        """Shift the bias of a layer's heads, and its logits [B, Hkv, T], which later layers depend on."""
        excess = logits.transpose(0, 1).flatten(1).quantile(1.0 - density, dim=1)
        module.down.bias.sub_(excess)
        return logits - excess[None, :, None]

    handles = [
        predictor.register_forward_hook(shift) for predictor in gates.predictors(model).values()
    ]
    modes.set_gate_mode(model, "hard")
    model(input_ids=tokens[:1], use_cache=False)
    for handle in handles:
        handle.remove()


def step_of(
    kind: Any, taught: bool, tokens: torch.Tensor, options: argparse.Namespace, contexts: ExitStack
) -> Callable[[], None]:
    """Return a training step of a case of ``CASES``, which is set up until ``contexts`` end."""
    model, distillation = new_model(options), None
    if isinstance(kind, str):
        attach.attach_gates(model, GateConfig(window=options.block_size // 16), seed=0)
        if kind == "hard":
            keep_share(model, tokens, options.density)
        modes.set_gate_mode(model, kind)
    elif kind is not None:
        num_heads, num_layers = model.config.num_key_value_heads, model.config.num_hidden_layers
        is_global = [
            index < kind * num_layers * num_heads for index in range(num_layers * num_heads)
        ]
        rows = [
            "".join("G" if x else "L" for x in is_global[layer::num_layers])
            for layer in range(num_layers)
        ]
        windows.apply_layout(model, Layout(tuple(rows), window=options.block_size // 16))
    if taught:
        distillation = Distillation(
            copied_teacher(new_model(options), model, bfloat16=options.device == "cuda"), 0.5
        )
    models = [model] if distillation is None else [model, distillation.teacher.model]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    begin_pass = None if distillation is None else distillation.begin_pass
    if kind is not None:
        contexts.enter_context(loss_in_chunks(model, begin_pass))
    autocast = torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda")
    if options.compile:
        contexts.enter_context(modes.compiled(*models))

    def step() -> None:
        with autocast:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _NoLaunch:
    """Stand-in for a kernel: it is launched with all arguments, and does nothing."""

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return lambda *_arguments, **_options: None


def host_calls(gate: str, device: str) -> int:
    """Count Python function calls of the Triton backend in a forward and backward pass, with launches left out."""
    from spkv_kernels.triton import compaction, op

    for module, names in (
        (op, ("_fwd", "_bwd_dq", "_bwd_dkdv", "_bwd_far_dkdv")),
        (compaction, ("compact_kernel",)),
    ):
        for name in names:
            setattr(module, name, _NoLaunch())
    q, k, v = (
        torch.randn(2, 256, n, 64, device=device).transpose(1, 2).requires_grad_()
        for n in (8, 4, 4)
    )
    utility = torch.zeros(2, 4, 256, device=device, requires_grad=True)
    gates: dict[str, Any] = {
        "none": {},
        "soft": {"log_utility": utility},
        "hard": {"keep": utility == 0},
    }[gate]

    def calls(work: Callable[[], torch.Tensor]) -> int:
        torch.autograd.backward(work())  # fills caches
        with cProfile.Profile() as profile:
            torch.autograd.backward(work())
        return sum(entry.callcount for entry in profile.getstats())

    both = calls(lambda: attention(q, k, v, window=128, backend="triton", **gates).sum())
    return both - calls(lambda: q.sum())


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--kv-heads", type=int, help="KV heads (default: half of the query heads)")
    parser.add_argument(
        "--ffn", type=int, help="width of the feed-forward layers (default: twice --width)"
    )
    parser.add_argument(
        "--density", type=float, default=0.25, help="share of the keys that hard gates keep"
    )
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=list(CASES), help="cases to time (all)"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    # Warm up, then time all cases in one order and the other
    print(
        f"{device_name(options.device)}, torch {torch.__version__}; one step, against the {options.cases[0]}"
    )
    tokens = torch.randint(
        options.vocabulary, (options.batch_size, options.block_size), device=options.device
    )
    contexts = ExitStack()
    steps = {name: step_of(*CASES[name], tokens, options, contexts) for name in options.cases}
    times: dict[str, list[float]] = {name: [] for name in steps}
    clock = process_time if options.device == "cpu" else perf_counter
    for number in range(-1, 2 * options.rounds):
        for name in times if number % 2 else reversed(times):
            synchronise(options.device)
            start = clock()
            steps[name]()
            synchronise(options.device)
            times[name] += [clock() - start] * (number >= 0)
    for name, measured in times.items():
        ratio = median(times[options.cases[0]]) / median(measured)
        print(
            f"| {name} | {tokens.numel() / median(measured):,.0f} tokens/s | {ratio:.2f} |",
            flush=True,
        )
    counts = (f"{gate} {host_calls(gate, options.device)} |" for gate in ("none", "soft", "hard"))
    print("| Python calls of the operator |", *counts)


if __name__ == "__main__":
    main()
