"""Test packed and padded batches: each document has the logits and gradients that it has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import recompute_activations, sharpen_attention, tiny_model
from torch import Tensor
from transformers import DataCollatorWithFlattening, PreTrainedModel

from spkv_nas import GateConfig, attach_gates, detach, set_gate_mode
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.model.windows import apply_layout

LENGTHS = [17, 1, 9, 21]
WINDOW, SINKS = 4, 2
EAGER = {"gpt_oss": {"experts_implementation": "eager"}}  # experts in float64


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (length,), generator=generator) for length in LENGTHS]


def model_with(attention: str, family: str = "llama") -> PreTrainedModel:
    """Make a float64 model with a layout, or with gates in a mode."""
    model = sharpen_attention(tiny_model(family, **EAGER.get(family, {})), 4.0).double()
    if attention == "layout":
        rows = ("GL", "LG") * (model.config.num_hidden_layers // 2)
        apply_layout(model, Layout(rows, WINDOW, sinks=SINKS if family != "gpt_oss" else 0))
    else:
        attach_gates(model, GateConfig(window=WINDOW, sinks=SINKS, bias=0.0, init_scale=40.0))
        set_gate_mode(model, attention)
    return model


def packed(**options: Any) -> dict[str, Tensor]:
    """Make a batch as Trainer's collator for training without padding does."""
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(
        [{"input_ids": x.tolist()} for x in documents()]
    )
    batch.pop("labels")
    return dict(batch)


def padded(side: str) -> dict[str, Tensor]:
    """Make a batch with a document per row."""
    longest = max(LENGTHS)
    tokens, mask = (torch.zeros(len(LENGTHS), longest, dtype=torch.long) for _ in range(2))
    for row, document in enumerate(documents()):
        columns = slice(longest - len(document), None) if side == "left" else slice(len(document))
        tokens[row, columns], mask[row, columns] = document, 1
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if side == "left" else {}
    return {"input_ids": tokens, "attention_mask": mask, **positions}


BATCHES = {
    "position_ids": packed,
    "flash": lambda: packed(return_flash_attn_kwargs=True, return_seq_idx=True),
    "cu_seq_lens": lambda: {
        k: x for k, x in packed(return_flash_attn_kwargs=True).items() if k != "position_ids"
    },
    "left": lambda: padded("left"),
    "right": lambda: padded("right"),
}


def document_logits(model: PreTrainedModel, batch: dict[str, Tensor]) -> list[Tensor]:
    """Compute the logits of every document in a batch, without padding."""
    logits = model(**batch, use_cache=False).logits
    if (mask := batch.get("attention_mask")) is None:
        return list(logits[0].split(LENGTHS))
    return [row[is_token.bool()] for row, is_token in zip(logits, mask, strict=True)]


def gradients(model: PreTrainedModel, logits: list[Tensor]) -> dict[str, Tensor]:
    """Compute the gradients of the loss of all documents."""
    model.zero_grad()
    loss = torch.stack(
        [
            torch.nn.functional.cross_entropy(x[:-1], tokens[1:], reduction="sum")
            for x, tokens in zip(logits, documents(), strict=True)
        ]
    ).sum()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(model: PreTrainedModel, batch: dict[str, Tensor], runs: Any = None) -> None:
    """Compare logits and gradients with those of each document alone."""
    alone = [model(input_ids=x[None], use_cache=False).logits[0] for x in documents()]
    expected = gradients(model, alone)
    found = document_logits(model if runs is None else runs, batch)
    for x, y in zip(found, alone, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()
    actual = gradients(model, found)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 1e-4 * gradient.norm().clamp_min(1e-6), name


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("attention", ["layout", "soft", "hard"])
def test_documents_are_computed_alone(attention: str, batch: str) -> None:
    check(model_with(attention), BATCHES[batch]())


@pytest.mark.parametrize("batch", ["position_ids", "right"])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_native_windows_and_learned_sinks(family: str, batch: str) -> None:
    check(model_with("layout", family), BATCHES[batch]())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "batch"), [("llama", "position_ids"), ("llama", "left"), ("gemma3_text", "flash")]
)
def test_compiled_models(family: str, batch: str) -> None:
    model = model_with("layout", family)
    torch._dynamo.reset()
    check(model, BATCHES[batch](), torch.compile(model, backend="eager"))
    torch._dynamo.reset()


def test_gradient_checkpointing() -> None:
    model = model_with("soft").train()
    recompute_activations(model)
    check(model, packed())


def test_equal_to_plain_transformers() -> None:
    """Global heads alone: transformers' own mask of packed documents."""
    model = model_with("layout")
    apply_layout(model, Layout(("GG",) * 4, WINDOW))
    found = model(**packed(), use_cache=False).logits
    detach(model)
    assert torch.allclose(model(**packed(), use_cache=False).logits, found)


class TestRefusals:
    def test_padding_between_tokens(self) -> None:
        batch = padded("right")
        batch["attention_mask"][2, 3] = 0
        with pytest.raises(UserError, match="between the tokens of row 2"):
            model_with("layout")(**batch, use_cache=False)

    def test_a_mask_beside_packed_positions(self) -> None:
        """Transformers then lets documents attend to each other."""
        batch = packed()
        with pytest.raises(UserError, match="leave attention_mask out"):
            model_with("layout")(
                **batch, attention_mask=torch.ones_like(batch["input_ids"]), use_cache=False
            )

    @pytest.mark.parametrize("batch", ["position_ids", "flash", "cu_seq_lens"])
    def test_a_cache(self, batch: str) -> None:
        """It made documents see each other."""
        with torch.no_grad(), pytest.raises(UserError, match="a cache holds no packed documents"):
            model_with("layout").eval()(**BATCHES[batch](), use_cache=True)

    @pytest.mark.slow
    def test_compiled_masks_without_positions(self) -> None:
        """Transformers' gpt-oss does not pass positions to its masks."""
        model = model_with("layout", "gpt_oss")
        with pytest.raises(UserError, match="makes its masks without position_ids"):
            torch.compile(model, backend="eager")(**packed(), use_cache=False)
        torch._dynamo.reset()

    def test_a_mask_of_another_shape(self) -> None:
        tokens = documents()[0][None]
        mask = torch.ones(1, 1, LENGTHS[0], LENGTHS[0], dtype=torch.bool).tril()
        for attention in ("layout", "soft"):  # gates failed without a message
            with pytest.raises(UserError, match="mask of its own"):
                model_with(attention)(input_ids=tokens, attention_mask=mask, use_cache=False)

    def test_the_bidirectional_predictor(self) -> None:
        model = tiny_model()
        attach_gates(model, GateConfig(window=WINDOW, predictor="bidirectional", kernel_size=3))
        with pytest.raises(UserError, match="bidirectional predictor mixes"):
            model(**packed(), use_cache=False)
