"""What plain transformers makes of model folders: a program of its own, which nothing of this package is imported into.

    python plain_logits.py REQUESTS.json ANSWERS.json

``verify_export.py`` runs it, and says what requests and answers hold. Every model runs in float32 on the CPU, without
the network and without code of the folder's. Its weights stay in their files, from which they are mapped, and are
float32 only while a layer uses them.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(requests: str, answers: str) -> None:
    """Answer every request; an error of one is its answer."""
    with open(requests, encoding="utf-8") as file:
        given = json.load(file)
    found = [_answered(request) for request in given]
    if any(name.partition(".")[0] in ("spkv_nas", "spkv_kernels") for name in sys.modules):
        sys.exit("this process has imported spkv_nas, so that it is no plain one")
    with open(answers, "w", encoding="utf-8") as file:
        json.dump(found, file)


def _answered(request: dict[str, Any]) -> dict[str, Any]:
    """What there is to say of a folder. Too little memory or disk says nothing of it, and ends the program."""
    output = request.pop("logits")
    try:
        logits, answer = _answer(**request)
    except MemoryError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if "allocate memory" in said:  # of PyTorch, a RuntimeError
            raise
        return {"error": f"{type(error).__name__}: {said}"}
    if logits is not None:
        save_file({"logits": logits}, output)
    return answer


def _answer(
    folder: str, tokens: list[int], keep: int, steps: int, text: str
) -> tuple[torch.Tensor | None, dict[str, Any]]:
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True, local_files_only=True, use_safetensors=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[kind]:
            name = sorted(map(str, loading[kind]))[0]
            return None, {"error": f"{type(model).__name__} has {kind.replace('_', ' ')}, such as {name}"}
    with float32(model.eval()):
        logits = _logits(model, torch.tensor([tokens]), keep, steps)
    ids = AutoTokenizer.from_pretrained(folder, local_files_only=True)(text)["input_ids"] if text else None
    return logits, {"error": None, "token_ids": ids}


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor, keep: int, steps: int) -> torch.Tensor:
    """Logits [keep, V] of the last tokens; ``steps`` of them go one by one, with the cache of one pass."""
    output = model(input_ids=tokens[:, :-steps], use_cache=True, logits_to_keep=keep - steps)
    parts = [output.logits[0]]
    for token in tokens[0, -steps:]:
        output = model(input_ids=token.view(1, 1), past_key_values=output.past_key_values, use_cache=True)
        parts.append(output.logits[0])
    return torch.cat(parts).contiguous()


@contextmanager
def float32(model: Any) -> Iterator[None]:
    """The model computes in float32 inside the ``with`` block, a part at a time; its weights stay what they are.

    Raises:
        RuntimeError: when the model runs, if a tensor is used while the part that holds it does not run.
    """
    kept: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def enter(part: nn.Module, *_: Any) -> None:
        own = [tensor for tensor in part.parameters() if tensor.dtype != torch.float32]
        kept[part] = [(tensor, tensor.data) for tensor in own]
        for tensor in own:
            tensor.data = tensor.data.float()

    def leave(part: nn.Module, *_: Any) -> None:
        for tensor, data in kept.pop(part, ()):
            tensor.data = data

    handles = []
    for part in parts(model):
        handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def parts(model: Any) -> list[nn.Module]:
    """Decoder layers, and outside of them the modules that have parameters of their own; together all of a model."""
    layers = set(model._no_split_modules or ())

    def parts_of(module: nn.Module) -> list[nn.Module]:
        if type(module).__name__ in layers or any(True for _ in module.parameters(recurse=False)):
            return [module]
        return [part for child in module.children() for part in parts_of(child)]

    return parts_of(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
