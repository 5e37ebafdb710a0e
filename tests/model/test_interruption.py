"""Test that calls which change a model leave it as it was when they are interrupted at any point."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from helpers import equal_up_to_rounding, gated, logits, make_layouts, tiny_model
from marks import slow
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

import spkv_nas
from spkv_nas.artifacts.layout import Layout
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import attach
from spkv_nas.model.attention import LayerState, layer_states
from spkv_nas.model.windows import apply_layout

LAYOUT = Layout(("GL", "LL", "LG", "GG"), 5, sinks=1)
OTHER = Layout(("LL", "GG", "LL", "LG"), 7)


def dense() -> PreTrainedModel:
    """Return a model with a mix of settings, all of which must stay."""
    model = tiny_model(vocab_size=300)
    model.model.layers[1].train()
    next(model.parameters()).requires_grad_(False)
    return model


def hybrid() -> PreTrainedModel:
    model = dense()
    apply_layout(model, OTHER)
    return model


class Interrupt:
    """Raise ``KeyboardInterrupt``, as Ctrl-C does, in the call of a function with this number; count calls."""

    def __init__(self, number: int | None = None) -> None:
        self.number, self.calls = number, 0

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> None:
        if any(
            part in frame.f_code.co_filename
            for part in ("/spkv_nas/", "/transformers/", "torch/nn/modules")
        ):
            self.calls += 1
            if self.calls == self.number:
                sys.settrace(None)
                raise KeyboardInterrupt


def shown(value: Any) -> Any:
    """Return a value that compares by content: of settings and states, or the identity of anything else."""
    if isinstance(value, LayerState):
        return {name: shown(x) for name, x in vars(value).items() if name != "_tensors"} | {
            "id": id(value)
        }
    if isinstance(value, PreTrainedConfig):
        return type(value), {name: shown(x) for name, x in vars(value).items()}
    if isinstance(value, dict):
        return {name: shown(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [shown(x) for x in value]
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    return (
        repr(value) if type(value).__module__.startswith("spkv_nas.") else (type(value), id(value))
    )


def state(model: PreTrainedModel) -> dict[str, Any]:
    """Return all that calls could change: attributes, hooks and settings of modules, and parameters."""
    found = {name: shown(vars(module)) for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = (
            id(parameter),
            parameter.requires_grad,
            parameter.grad,
            parameter.sum().item(),
        )
    return found


ACTIONS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[PreTrainedModel, TokenBlocks], object]]] = {
    "apply_layout": (dense, lambda model, _: spkv_nas.apply_layout(model, LAYOUT)),
    "attach_gates": (dense, lambda model, _: spkv_nas.attach_gates(model)),
    "apply_layout to a hybrid": (hybrid, lambda model, _: spkv_nas.apply_layout(model, LAYOUT)),
    "attach_gates to a hybrid": (hybrid, lambda model, _: spkv_nas.attach_gates(model)),
    "apply_layout to gates": (gated, lambda model, _: spkv_nas.apply_layout(model, LAYOUT)),
    "detach": (hybrid, lambda model, _: spkv_nas.detach(model)),
    "detach gates": (gated, lambda model, _: spkv_nas.detach(model)),
    "score": (dense, lambda model, blocks: spkv_nas.score(model, blocks, make_layouts("one", "two"))),
    "score a hybrid": (hybrid, lambda model, blocks: spkv_nas.score(model, blocks, make_layouts("one"))),
    "probe": (gated, lambda model, blocks: spkv_nas.probe(model, blocks)),
    "head_gates": (
        dense, lambda model, blocks: spkv_nas.head_gates(model, blocks, budget=2, window=6, steps=2, step_tokens=64),
    ),
    "verdict": (
        hybrid, lambda model, blocks: spkv_nas.verdict(model, make_layouts("one"), blocks, margin="nll=5%"),
    ),
    "evaluate": (gated, lambda model, blocks: spkv_nas.evaluate(model, blocks)),
}  # fmt: skip


def spread(
    act: Callable[[PreTrainedModel], object], make: Callable[[], PreTrainedModel], points: int
) -> list[int]:
    """Return numbers of ``points`` calls of functions, spread evenly from the first to the last one of an action."""
    act(make())  # imports, and computes what is kept
    model = make()
    with Interrupt() as count:
        act(model)
    return sorted({1 + (count.calls - 1) * point // (points - 1) for point in range(points)})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "action",
    [
        action if action in ("apply_layout to gates", "attach_gates to a hybrid") else slow(action)
        for action in ACTIONS
    ],
)
def test_at_any_point(action: str, blocks: TokenBlocks) -> None:
    """At seven calls of functions, from the first to the last one."""
    make, act = ACTIONS[action]
    for number in spread(lambda model: act(model, blocks), make, 7):
        model = make()
        before = state(model)
        with pytest.raises(KeyboardInterrupt), Interrupt(number):
            act(model, blocks)
        assert state(model) == before, number


@pytest.mark.parametrize("make", [dense, slow(hybrid), gated])
def test_of_a_temporary_layout(make: Callable[[], PreTrainedModel], tokens: Tensor) -> None:
    """While it is applied, in the block, and while it is removed."""

    def act(model: PreTrainedModel) -> None:
        with spkv_nas.layout_applied(model, LAYOUT):
            logits(model, tokens)

    for number in spread(act, make, 9):
        model = make()
        expected = logits(model, tokens)
        with pytest.raises(KeyboardInterrupt), Interrupt(number):
            act(model)
        assert equal_up_to_rounding(logits(model, tokens), expected), number


def test_a_layout_that_does_not_fit_leaves_the_one_before(tokens: Tensor) -> None:
    model = hybrid()
    expected = logits(model, tokens)
    with pytest.raises(spkv_nas.UserError, match="the layout"):
        apply_layout(model, Layout(("GL", "LL"), 5))
    assert equal_up_to_rounding(logits(model, tokens), expected)
    assert len(layer_states(model)) == 4


def test_documents_of_an_interrupted_call_are_forgotten(tokens: Tensor) -> None:
    """Packed documents are remembered during a call; PyTorch skips hooks after it where Ctrl-C ends it."""
    model = hybrid()
    expected = model.generate(tokens[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    positions = torch.arange(tokens.shape[1])[None] % 5

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=tokens[:1], position_ids=positions, use_cache=False)
    handle.remove()
    assert torch.equal(
        model.generate(tokens[:1], max_new_tokens=3, do_sample=False, pad_token_id=0), expected
    )


def test_restoring_is_completed_when_interrupted(tokens: Tensor) -> None:
    """By a second Ctrl-C."""
    model = dense()
    before = state(model)
    snapshot = attach.Snapshot(model)
    apply_layout(model, LAYOUT)
    with Interrupt() as count:
        snapshot.restore()
    for number in range(1, count.calls + 1, 25):
        apply_layout(model, LAYOUT)
        with pytest.raises(KeyboardInterrupt), Interrupt(number):
            snapshot.restore()
        if number > 1:  # later than the call itself
            assert state(model) == before
        snapshot.restore()
