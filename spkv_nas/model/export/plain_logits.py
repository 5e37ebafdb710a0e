"""Run model folders in plain transformers: a program that ``verify_export.py`` starts, without importing this package.

    python plain_logits.py REQUESTS.json ANSWERS.json

``verify_export.py`` defines requests and answers. Models run in float32 on the CPU, offline, and without remote code
but that of this package, ``modeling_spkv.py``. Their weights stay memory-mapped in their files, and are converted to
float32 only while a layer uses them.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel


def main(requests: str, answers: str) -> None:
    """Answer every request; if one fails, its error is its answer."""
    with open(requests, encoding="utf-8") as file:
        request_list = json.load(file)
    answer_list = [_answered(request) for request in request_list]
    if any(name.partition(".")[0] in ("spkv_nas", "spkv_kernels") for name in sys.modules):
        sys.exit("this process has imported spkv_nas, so that it is no plain one")
    with open(answers, "w", encoding="utf-8") as file:
        json.dump(answer_list, file)


def _answered(request: dict[str, Any]) -> dict[str, object]:
    """Answer the request for one folder, with its error if it cannot be run.

    Too little memory or disk space is no property of the folder, and ends the program.
    """
    output = request.pop("logits")
    # Return an error as the answer, unless memory is short
    try:
        logits = _loaded_logits(**request)
    except MemoryError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        if "allocate memory" in message:  # a RuntimeError of PyTorch
            raise
        return {"error": f"{type(error).__name__}: {message}"}
    if isinstance(logits, str):
        return {"error": logits}
    save_file({"logits": logits}, output)
    return {"error": None}


def _loaded_logits(folder: str, tokens: list[int], keep: int, steps: int) -> torch.Tensor | str:
    """Load a folder with plain transformers, and return its logits [keep, V], or why its tensors do not fit."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype="auto",
        output_loading_info=True,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=os.path.isfile(os.path.join(folder, "modeling_spkv.py")),
    )
    # Check that the files have the model's tensors
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[kind]:
            name = sorted(map(str, loading[kind]))[0]
            return f"{type(model).__name__} has {kind.replace('_', ' ')}, such as {name}"
    with float32(model.eval()):
        return _logits(model, torch.tensor([tokens]), keep, steps)


@torch.no_grad()
def _logits(model: PreTrainedModel, tokens: torch.Tensor, keep: int, steps: int) -> torch.Tensor:
    """Compute logits [keep, V] of the last tokens, the last ``steps`` of them one by one with a key-value cache."""
    output = model(input_ids=tokens[:, :-steps], use_cache=True, logits_to_keep=keep - steps)
    parts = [output.logits[0]]
    for token in tokens[0, -steps:]:
        output = model(
            input_ids=token.view(1, 1), past_key_values=output.past_key_values, use_cache=True
        )
        parts.append(output.logits[0])
    return torch.cat(parts).contiguous()


@contextmanager
def float32(model: PreTrainedModel) -> Iterator[None]:
    """Compute in float32 inside the ``with`` block, converting one part of the model at a time.

    Raises:
        RuntimeError: a tensor is used while the part that holds it does not run.
    """
    # Replace tensors of a part before it runs, restore them after
    originals: dict[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def enter(part: torch.nn.Module, *_: object) -> None:
        originals[part] = []
        for tensor in part.parameters():
            if tensor.dtype != torch.float32:
                originals[part].append((tensor, tensor.data))
                tensor.data = tensor.data.float()

    def leave(part: torch.nn.Module, *_: object) -> None:
        for tensor, data in originals.pop(part, ()):
            tensor.data = data

    # Hook every part
    handles = []
    for part in parts(model):
        handles += [
            part.register_forward_pre_hook(enter),
            part.register_forward_hook(leave, always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def parts(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the decoder layers, and the modules outside of them with direct parameters, which cover the model."""
    return list(_parts_of(model, set(model._no_split_modules or ())))


def _parts_of(module: torch.nn.Module, layers: set[str]) -> Iterator[torch.nn.Module]:
    """Yield a module of one of the classes ``layers``, or with direct parameters, or else such modules inside it."""
    has_parameters = any(True for _ in module.parameters(recurse=False))
    if has_parameters or type(module).__name__ in layers:
        yield module
        return
    for child in module.children():
        yield from _parts_of(child, layers)


if __name__ == "__main__":
    main(*sys.argv[1:])
