"""Test losses with a teacher against whole logits in float64."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import equal_up_to_rounding, gated, tiny_model
from marks import pairwise
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas import Layout, apply_layout
from spkv_nas.base import memory
from spkv_nas.base.errors import UserError
from spkv_nas.model.attention import attention_layers
from spkv_nas.model.checkpoint import save
from spkv_nas.model.density_tracker import DensityTracker
from spkv_nas.model.distillation import Distillation, copied_teacher, shared_teacher
from spkv_nas.model.loss import NO_TARGET, loss_in_chunks
from spkv_nas.model.modes import evaluation_mode, recomputed
from spkv_nas.model.windows import full_attention
from spkv_nas.training.branch_setup import adapter_switch, add_adapters, start_model
from spkv_nas.training.recipe import LoraConfig, Recipe
from spkv_nas.training.variants import Variant

LAYOUT = Layout(("GL", "LL", "LG", "GL"), window=4, sinks=1)
VOCABULARY, CHUNK = 97, 10


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK_BYTES", CHUNK * 4 * VOCABULARY)


def student_of(dense: PreTrainedModel) -> PreTrainedModel:
    """Return a hybrid of the model, a little retrained."""
    student = copy.deepcopy(dense).train()
    apply_layout(student, LAYOUT)
    with torch.no_grad():
        for number, parameter in enumerate(student.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return student


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    result = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare gradients to within 1e-5 of the largest of a tensor."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any()
        assert float((actual[name] - gradient).abs().max()) < 1e-5 * float(gradient.abs().max()), (
            name
        )


def expected_loss(
    logits: Tensor, reference: Tensor, labels: Tensor, weight: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute loss, NLL and divergence from whole logits in float64."""
    logits, reference, targets = logits[:, :-1].double(), reference[:, :-1].double(), labels[:, 1:]
    real = targets != NO_TARGET
    nll = F.cross_entropy(logits[real], targets[real])
    p, q = (x[real].div(temperature).log_softmax(-1) for x in (logits, reference))
    divergence = F.kl_div(p, q, reduction="batchmean", log_target=True)
    return (1 - weight) * nll + weight * temperature**2 * divergence, nll, divergence


@pytest.mark.parametrize(
    ("factors", "family", "recomputes"),
    pairwise(
        [(1.0, 1.0), (0.3, 1.0), (0.6, 2.5)], ["llama", "gemma3_text"], [False, True]
    ),  # weight, temperature
)
def test_values_and_gradients_are_those_of_whole_logits(
    factors: tuple[float, float], family: str, recomputes: bool, tokens: Tensor, chunks: None
) -> None:
    weight, temperature = factors
    dense = tiny_model(family)
    student = student_of(dense)
    labels = tokens.clone()
    labels[1, :9] = NO_TARGET
    reference = dense(input_ids=tokens).logits.detach()
    loss, nll, divergence = expected_loss(
        student(input_ids=tokens).logits, reference, labels, weight, temperature
    )
    assert float(divergence.detach()) > 1e-3
    loss.backward()  # type: ignore[no-untyped-call]
    expected = gradients(student)

    seen: list[int] = []
    for model in (dense, student):
        model.get_output_embeddings().register_forward_pre_hook(
            lambda _, args: seen.append(args[0].shape[:-1].numel())
        )
    distillation = Distillation(copied_teacher(dense, student, bfloat16=False), weight, temperature)
    with (
        loss_in_chunks(student, distillation.begin_pass),
        recomputed(student) if recomputes else nullcontext(),
    ):
        actual = student(input_ids=tokens, labels=labels).loss
        actual.backward()
    assert max(seen) <= CHUNK
    assert float(actual.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    actual_gradients = gradients(student)
    assert_close(actual_gradients, expected)
    means = distillation.take_means()
    assert means == pytest.approx(
        {"nll": float(nll.detach()), "kl": float(divergence.detach())}, rel=1e-5
    )
    assert not any(p.grad is not None for p in dense.parameters())
    assert "forward" not in vars(student.get_decoder())


@pytest.mark.parametrize(
    ("tied", "hooked", "bfloat16"), pairwise([False, True], [False, True], [False, True])
)
def test_a_student_equal_to_its_teacher_has_gradients_of_exactly_zero(
    tied: bool, hooked: bool, bfloat16: bool, tokens: Tensor, chunks: None
) -> None:
    """The teacher stores in bfloat16 what autocast would cast, and nothing else."""
    dense = tiny_model("llama", tie_word_embeddings=tied)
    student = copy.deepcopy(dense).train()
    if hooked:
        apply_layout(student, Layout(("GG",) * 4, window=4))
    distillation = Distillation(copied_teacher(dense, student, bfloat16=bfloat16), 1.0, 2.0)
    dtypes = {p.dtype for name, p in dense.named_parameters() if name.endswith("proj.weight")}
    assert dtypes == {torch.bfloat16 if bfloat16 else torch.float32}
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=bfloat16),
        loss_in_chunks(student, distillation.begin_pass),
    ):
        loss = student(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert float(loss.detach()) == 0.0
    actual_gradients = gradients(student)
    assert len(actual_gradients) == len(list(student.parameters()))
    assert not any(gradient.any() for gradient in actual_gradients.values())


def test_a_branch_learns_without_dropout(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, tokens: Tensor
) -> None:
    """With dropout a student would have to learn what it is itself; its attention could not be trained at all."""
    save(tiny_model("gpt2", vocab_size=VOCABULARY, n_embd=32, n_head=4), tiny_tokenizer, tmp_path)
    recipe = Recipe.parse(
        {"name": "a", "model": {"path": str(tmp_path)}, "data": {"sources": ["stdlib"]}},
        tmp_path,
        "it",
    )
    student = start_model(
        recipe.model_copy(update={"precision": "float32"}), tmp_path, Variant.full_attention()
    )
    assert student.config.attn_pdrop == 0.1
    apply_layout(student.train(), Layout(("GGGG",) * 4, window=4))
    teacher = copied_teacher(copy.deepcopy(student), student, bfloat16=False)
    with loss_in_chunks(student, Distillation(teacher, 1.0).begin_pass):
        assert float(student(input_ids=tokens, labels=tokens).loss.detach()) < 1e-6


def test_adapters_are_off_in_the_teacher(tokens: Tensor, chunks: None) -> None:
    """Gates and windows are open in it, and a tracker of densities does not see its pass."""
    dense = tiny_model()
    student = copy.deepcopy(dense)
    apply_layout(student, LAYOUT)
    add_adapters(student, LoraConfig(rank=2, targets=["q_proj", "down_proj", "lm_head"]), seed=0)
    for name, parameter in student.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    reference = dense(input_ids=tokens).logits.detach()
    loss, *_ = expected_loss(student(input_ids=tokens).logits, reference, tokens, 0.5, 1.0)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = gradients(student)
    distillation = Distillation(shared_teacher(student, adapter_switch(student)), 0.5, 1.0)
    with loss_in_chunks(student, distillation.begin_pass):
        student(input_ids=tokens, labels=tokens).loss.backward()
    actual_gradients = gradients(student)
    assert_close(actual_gradients, expected)


def test_gates_are_open_in_the_teacher(tokens: Tensor, chunks: None) -> None:
    student = gated()
    dense = copy.deepcopy(student)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "utility_predictor" in name and name.endswith("bias"):
                parameter -= 4.0
    student.requires_grad_(False)
    for layer in attention_layers(student).values():
        layer.utility_predictor.requires_grad_(True)  # type: ignore[union-attr]
    with torch.no_grad(), full_attention(dense):
        reference = dense(input_ids=tokens).logits
    student.train()
    loss, _, divergence = expected_loss(
        student(input_ids=tokens).logits, reference, tokens, 1.0, 1.0
    )
    assert float(divergence.detach()) > 1e-5
    loss.backward()  # type: ignore[no-untyped-call]
    expected = gradients(student)
    tracker = DensityTracker(student, only_learning=True)
    tracker.start()
    distillation = Distillation(shared_teacher(student), 1.0, 1.0)
    with loss_in_chunks(student, distillation.begin_pass):
        student(input_ids=tokens, labels=tokens).loss.backward()
    assert set(tracker._counts[2, :, 0].tolist()) == {tokens.numel()}  # type: ignore[index]
    actual_gradients = gradients(student)
    assert_close(actual_gradients, expected)
    assert student.training


class OfTokens(LlamaForCausalLM):
    """Model whose logits depend on more than the last hidden states."""

    def forward(
        self,
        input_ids: Tensor,
        logits_to_keep: int = 0,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> object:
        output = super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
        output.logits = output.logits + input_ids[
            :, -logits_to_keep:, None
        ] / VOCABULARY * torch.arange(VOCABULARY)
        output.loss = (
            None if labels is None else self.loss_function(output.logits, labels, VOCABULARY)
        )
        return output


@pytest.mark.filterwarnings("ignore:OfTokens computes logits in an unsupported way")
def test_logits_that_need_more_than_hidden_states_are_refused(tokens: Tensor) -> None:
    student = OfTokens(tiny_model().config)
    distillation = Distillation(shared_teacher(student))
    with (
        loss_in_chunks(student, distillation.begin_pass),
        pytest.raises(
            UserError,
            match=r"(?s)OfTokens computes logits in an unsupported way.*leave branch.distill out",
        ),
    ):
        student(input_ids=tokens, labels=tokens)


def test_evaluation_is_of_the_student_alone(tokens: Tensor) -> None:
    """Passes without labels are unchanged."""
    student = student_of(tiny_model())
    expected = student(input_ids=tokens).logits
    distillation = Distillation(shared_teacher(student))
    with loss_in_chunks(student, distillation.begin_pass), evaluation_mode(student):
        assert equal_up_to_rounding(student(input_ids=tokens).logits, expected)
    assert not distillation.sums.any()
