"""Test chunked losses against the full logits, for every kind of head and without materialising the logits."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from helpers import FAMILIES, equal_up_to_rounding, make_layouts, tiny_model, weights, write_project
from marks import slow, slow_after
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM, PreTrainedModel

from spkv_nas import GateConfig
from spkv_nas.base import memory
from spkv_nas.cost.formulas import logit_bytes
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model import loss
from spkv_nas.model.loss import (
    NO_TARGET,
    loss_in_chunks,
    mean_divergence,
    mean_nll,
    token_losses,
    token_nll,
)
from spkv_nas.probing.priced import learn_gates
from spkv_nas.training.corpus import load_corpus
from spkv_nas.training.dense import train_dense
from spkv_nas.training.recipe import Recipe

VOCABULARY, CHUNK = 97, 10
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "tied": ("llama", {"tie_word_embeddings": True}),
    "soft cap": ("gemma3_text", {"final_logit_softcapping": 2.0}),
    "divided": ("granite", {"logits_scaling": 7.0}),
    "multiplied": ("cohere2", {"logit_scale": 5.0}),
    "bias": ("phi", {}),
    "loss of experts": ("mixtral", EXPERTS),
    "exaone4": ("exaone4", {}),
    "olmo3": ("olmo3", {}),
    "ministral": ("ministral", {"head_dim": 8}),
}

# The other families have the head of Llama
QUICK = (
    "llama",
    "tied",
    "soft cap",
    "divided",
    "multiplied",
    "bias",
    "loss of experts",
)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(1))


@contextmanager
def in_chunks(model: PreTrainedModel, size: int = CHUNK) -> Iterator[None]:
    """Limit chunks to ``size`` tokens inside the ``with`` block, and fail if the head receives more at once."""

    def check(_head: object, args: tuple[Tensor]) -> None:
        assert args[0].shape[:-1].numel() <= size

    hook = model.get_output_embeddings().register_forward_pre_hook(check)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "CHUNK_BYTES", size * 4 * model.config.get_text_config().vocab_size)
        yield
    hook.remove()


def reference(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(
        len(tokens), -1
    )


def gradients(model: PreTrainedModel, value: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every parameter that has one, and clear those of the model."""
    value.backward()  # type: ignore[no-untyped-call]
    result = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            mine[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("head", [head if head in QUICK else slow(head) for head in HEADS])
class TestHeads:
    def model(self, head: str) -> PreTrainedModel:
        family, options = HEADS[head]
        model = tiny_model(family, **options)
        if head == "bias":
            torch.nn.init.normal_(model.lm_head.bias)
        return model

    def test_nll(self, head: str, tokens: Tensor) -> None:
        model = self.model(head)
        expected = reference(model, tokens)
        with in_chunks(model), torch.inference_mode():
            torch.testing.assert_close(token_nll(model, tokens), expected)
        theirs = gradients(model, expected.mean())
        with in_chunks(model):
            assert_equal(gradients(model, mean_nll(model, tokens)), theirs)

    def test_divergence(self, head: str, tokens: Tensor) -> None:
        """The divergence is from the predictions of a model with another second layer."""
        model = self.model(head)
        attention = model.get_decoder().layers[1].self_attn
        attention.register_forward_hook(lambda _m, _i, output: (output[0] * scale, *output[1:]))

        @contextmanager
        def changed() -> Iterator[None]:
            nonlocal scale
            scale = -20.0
            yield
            scale = 1.0

        scale = 1.0
        with changed(), torch.no_grad():
            reference = model(input_ids=tokens).logits[:, :-1].double().softmax(-1)
        logits = model(input_ids=tokens).logits[:, :-1].double().log_softmax(-1)
        expected = (reference * (reference.log() - logits)).sum(-1).mean()
        assert float(expected.detach()) > 1e-5
        theirs = gradients(model, expected)
        for size in (20, 1 << 20):
            with in_chunks(model, size):
                actual = mean_divergence(model, tokens, changed)
                assert float(actual.detach()) == pytest.approx(float(expected.detach()), rel=1e-3)
                assert_equal(gradients(model, actual), theirs)

    def test_training(self, head: str, tokens: Tensor) -> None:
        """The loss is the mean of the batch, or of a larger one of which it is a part."""
        model = self.model(head)
        labels = tokens.clone()
        labels[1, :12] = -100
        for options in ({}, {"num_items_in_batch": 70}):
            expected = model(input_ids=tokens, labels=labels, **options).loss
            theirs = gradients(model, expected)
            with in_chunks(model), loss_in_chunks(model):
                actual = model(input_ids=tokens, labels=labels, **options).loss
                torch.testing.assert_close(actual, expected)
                assert_equal(gradients(model, actual), theirs)
            assert "_loss_function" not in vars(model)
            assert not model._forward_pre_hooks
            assert not model.get_decoder()._forward_hooks


def test_passes_of_one_chunk(tokens: Tensor) -> None:
    """Keep the model's own values without gradients; a loss with labels always comes from hidden states."""
    model = tiny_model()
    expected = reference(model, tokens)
    assert equal_up_to_rounding(token_nll(model, tokens), expected)
    whole = model(input_ids=tokens, labels=tokens)
    theirs = gradients(model, whole.loss)
    with loss_in_chunks(model):
        actual = model(input_ids=tokens, labels=tokens)
        assert equal_up_to_rounding(model(input_ids=tokens).logits, whole.logits)
    torch.testing.assert_close(actual.loss, whole.loss, rtol=1e-6, atol=0.0)
    assert_equal(gradients(model, actual.loss), theirs)


def test_bfloat16_weights_have_float32_gradient_sums(tokens: Tensor) -> None:
    """Sixteen chunks each add to the gradient of the head."""
    model = tiny_model()
    exact = gradients(model, model(input_ids=tokens, labels=tokens).loss)["lm_head.weight"]
    errors = []
    for size in (3, 1 << 20):
        with torch.autocast("cpu", torch.bfloat16), in_chunks(model, size), loss_in_chunks(model):
            value = model(input_ids=tokens, labels=tokens).loss
        errors.append(
            float((gradients(model, value)["lm_head.weight"] - exact).norm() / exact.norm())
        )
    assert 0.0 < errors[0] < 1.1 * errors[1] < 0.05


class OfTokens(LlamaForCausalLM):
    """Model whose logits depend on more than the last hidden states."""

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        output = super().forward(
            input_ids=input_ids, logits_to_keep=logits_to_keep, **{**kwargs, "labels": None}
        )
        output.logits = output.logits + input_ids[
            :, -logits_to_keep:, None
        ] / VOCABULARY * torch.arange(VOCABULARY)
        if (labels := kwargs.get("labels")) is not None:
            output.loss = self.loss_function(output.logits, labels, VOCABULARY)
        return output


class OfAllTokens(LlamaForCausalLM):
    """Model that cannot compute logits for selected positions only."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = False
    ) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, use_cache=use_cache)


@pytest.mark.parametrize("kind", [OfTokens, OfAllTokens])
def test_other_models_compute_all_logits_with_a_warning(
    kind: type, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind(tiny_model().config).eval()
    expected, trained = reference(model, tokens), model(input_ids=tokens, labels=tokens).loss
    monkeypatch.setattr(memory, "CHUNK_BYTES", CHUNK * 4 * VOCABULARY)
    with pytest.warns(
        UserWarning, match=f"{kind.__name__} computes logits in an unsupported way: .* at once"
    ):
        assert equal_up_to_rounding(token_nll(model, tokens), expected)
    theirs = gradients(model, trained)
    with loss_in_chunks(model):
        with pytest.warns(UserWarning, match="at once"):
            first = model(input_ids=tokens, labels=tokens).loss
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            second = model(input_ids=tokens, labels=tokens).loss
    for actual in (first, second):
        assert equal_up_to_rounding(actual, trained)
        assert_equal(gradients(model, actual), theirs)


class TestWhoComputesLosses:
    def test_scores_that_resume_in_the_middle(self, blocks: TokenBlocks) -> None:
        layouts = [None, *make_layouts("a", "b", "c").values()]
        model = tiny_model(vocab_size=300)
        whole = zero_shot(model, layouts, blocks)
        with in_chunks(model, 20):
            parts = zero_shot(model, layouts, blocks)
        for one, other in zip(whole, parts, strict=True):
            assert one.total == pytest.approx(other.total, rel=1e-5)

    def test_gates_that_learn(self, blocks: TokenBlocks) -> None:
        result = []
        for size in (1 << 20, 20):
            model = tiny_model(vocab_size=300)
            with in_chunks(model, size):
                learn_gates(
                    model, blocks, GateConfig(window=4, target_density=0.3), steps=3, step_tokens=96
                )
            result.append(
                {name: p for name, p in model.named_parameters() if "utility_predictor" in name}
            )
        assert all(torch.allclose(result[1][name], p, atol=1e-5) for name, p in result[0].items())

    @pytest.mark.slow
    def test_training(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every process computes its loss in chunks, as in test_distributed."""
        recipe = Recipe.read(write_project(tmp_path / "project"))
        corpus = load_corpus(recipe, tmp_path / "project", tmp_path)
        finals = [train_dense(recipe, corpus, tmp_path / "whole")]
        monkeypatch.setattr(memory, "CHUNK_BYTES", 20 * 4 * len(corpus.tokenizer))
        finals.append(train_dense(recipe, corpus, tmp_path / "chunks"))
        logged = [pd.read_csv(folder / "train-log.csv")["loss"].to_numpy() for folder in finals]
        assert logged[1] == pytest.approx(logged[0], rel=1e-5)
        whole, parts = (weights(folder)["lm_head.weight"] for folder in finals)
        assert not torch.equal(whole, parts)
        assert torch.allclose(whole, parts, atol=1e-4)


class Live(TorchDispatchMode):
    """Counts the bytes of new tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor._is_view():
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address and address not in self._known:
            self._known.add(address)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


@pytest.mark.parametrize(
    ("dtype", "learns"),
    slow_after(
        2,
        [
            (torch.float32, False),
            (torch.bfloat16, True),
            (torch.float32, True),
            (torch.bfloat16, False),
        ],
    ),
)
def test_memory_is_that_of_one_chunk(
    dtype: torch.dtype, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's weights are frozen; the allowance of 15 % is for the rest of the tiny model."""
    model = tiny_model(
        vocab_size=32000, max_position_embeddings=500, hidden_size=8, num_hidden_layers=1
    ).to(dtype)
    model.get_input_embeddings().requires_grad_(False)
    model.get_output_embeddings().requires_grad_(False)
    tokens = torch.zeros(1, 500, dtype=torch.long)
    most = []
    monkeypatch.setattr(memory, "_CPU_PART", 1)
    for size in (50, 500):
        monkeypatch.setattr(memory, "CHUNK_BYTES", size * 4 * 32000)
        with Live() as live, torch.set_grad_enabled(learns):
            value = mean_nll(model, tokens) if learns else token_nll(model, tokens)
            if learns:
                value.backward()  # type: ignore[no-untyped-call]
        assert live.most == pytest.approx(logit_bytes(32000, 500, item=dtype.itemsize), rel=0.15)
        most.append(live.most)
    assert most[1] > 8 * most[0]


def test_sizes_of_chunks(tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose chunks with gradients by the device, and give every chunk a token."""
    for gib, num_bytes in ((8, 1 << 28), (80, 1 << 30), (139, 1 << 31)):
        properties = SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _, properties=properties: properties
        )
        assert memory.chunk_bytes("cuda:0") == memory.chunk_bytes("cuda", gib << 30) == num_bytes
    assert memory.chunk_bytes("cpu") == 1 << 25 < memory.CHUNK_BYTES
    assert memory.chunk_tokens(1 << 10, 1 << 25) == 1 << 13
    model = tiny_model()
    monkeypatch.setattr(memory, "CHUNK_BYTES", 1)
    torch.testing.assert_close(token_nll(model, tokens), reference(model, tokens))


class Passes(TorchDispatchMode):
    """Lists the operators that read or write every element of the logits of ``CHUNK`` tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        sizes = {
            tensor.numel() for tensor in tree_leaves((args, result)) if isinstance(tensor, Tensor)
        }
        if (
            CHUNK * VOCABULARY in sizes
            and not function.is_view
            and name not in ("_unsafe_view", "gather", "scatter_")
        ):
            self.names.append(name)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_passes_without_a_compiler(
    dtype: torch.dtype, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products write logits once and read their gradient twice. The loss takes three passes, nine with a teacher.

    In bfloat16 logits and gradients are converted besides. Compiled (``test_compiled_losses``), three passes do.
    """
    model = tiny_model(tie_word_embeddings=False).to(dtype)
    convert = ["_to_copy"] * (dtype is torch.bfloat16)
    log_softmax, gradient = [*convert, "_log_softmax"], ["mul_", *convert, "mm", "mm"]
    taught = [*log_softmax, *log_softmax, "exp", "sub_", "mul_", "sum", "exp_", "sub_", *gradient]
    for measure, expected in (
        (mean_nll, ["mm", *log_softmax, "exp_", *gradient]),
        (partial(mean_divergence, reference=nullcontext), ["mm", "mm", *taught]),
    ):
        with monkeypatch.context() as patch, in_chunks(model), Passes() as passes:
            patch.setattr(memory, "_CPU_PART", 1)
            measure(model, tokens[:, :11]).backward()
        assert passes.names == 3 * expected


def random_chunk(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, a teacher's logits [6, V] and targets [6], of which one is filling."""
    generator = torch.Generator().manual_seed(2)
    logits, taught = 3.0 * torch.randn(2, 6, VOCABULARY, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (6,), generator=generator).index_fill(
        0, torch.tensor(2), NO_TARGET
    )
    return logits.to(dtype).requires_grad_(), taught.to(dtype), targets


WEIGHTS = [(0.0, 1.0), (0.3, 1.0), (1.0, 1.0), (0.6, 2.5)]  # of the divergence, and temperature


def test_losses_in_float64() -> None:
    for weight, temperature in WEIGHTS:
        logits, taught, targets = random_chunk(torch.float64)
        expected_nll = F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="none")
        p, q = (x.div(temperature).log_softmax(-1) for x in (logits, taught))
        expected_divergence = F.kl_div(p, q, log_target=True, reduction="none").sum(-1) * (
            targets != NO_TARGET
        )
        mixture = (1 - weight) * expected_nll + weight * temperature**2 * expected_divergence
        (expected,) = torch.autograd.grad(mixture.sum(), logits)
        nll, divergence, gradient = token_losses(
            logits, taught if weight else None, targets, weight, temperature
        )
        torch.testing.assert_close(nll, expected_nll.detach())
        torch.testing.assert_close(
            divergence, expected_divergence.detach() if weight else torch.zeros_like(nll)
        )
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(("weight", "temperature"), WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_compiled_losses(dtype: torch.dtype, weight: float, temperature: float) -> None:
    """The gradient is all that is stored of the logits' shape, in their dtype; at a temperature, more is.

    Three loops read the logits: for their maximum, for the sum of exponentials, and for the gradient. Two more read a
    teacher's, which the last one reads again.
    """
    logits, taught, targets = random_chunk(dtype)
    arguments = (logits, taught if weight else None, targets, weight, temperature)
    expected = token_losses(*arguments)
    torch.compiler.reset()
    with loss.compiled_losses():
        actual, code = run_and_get_code(loss.token_losses, *arguments)
        same = loss.token_losses(logits, logits, targets, 1.0, temperature)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
    stored = re.findall(rf"empty_strided_cpu\(\(\w+, {VOCABULARY}\), .*, (torch.\w+)\)", code[0])
    assert temperature != 1.0 or stored == [str(dtype)]
    assert temperature != 1.0 or code[0].count("for(int64_t x1=") == (5 if weight else 3)
    assert not same[1].any()
    assert not same[2].any()
