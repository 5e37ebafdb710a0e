"""Test that public functions take objects as people have them, or refuse them before anything is changed."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from helpers import DENSITY, equal_up_to_rounding, gated, logits, make_table, tiny_model
from marks import slow_after
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, GPT2DoubleHeadsModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto

import spkv_nas
from spkv_nas import GateConfig, HeadScores, Layout, SPKVCache, UserError
from spkv_nas.contrib.signals.attention_mass import ATTENTION_MASS
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.attention import attention_layers

LAYOUT = Layout(("GL", "LL", "LG", "GG"), window=5, strategy="mixed")
TEXTS = [
    f"number {n} of the quick brown foxes jumps over the lazy dog again and again" * 4
    for n in range(24)
]
LORA = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "peft": lambda model: peft.get_peft_model(model, LORA).eval(),
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "ddp": nn.parallel.DistributedDataParallel,
    "compiled peft": lambda model: torch.compile(
        peft.get_peft_model(model, LORA).eval(), backend="eager"
    ),
}


@torch.no_grad()
def outputs(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits of a wrapper, which is called itself."""
    result: Tensor = model(input_ids=tokens).logits
    return result


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")  # of PEFT and torch.compile
class TestWrappedModels:
    @pytest.mark.parametrize("stance", slow_after(1, ["force_eager", "default"]))
    @pytest.mark.parametrize("kind", WRAPPERS)
    def test_layouts_act_through_the_wrapper(
        self, kind: str, stance: str, tokens: Tensor, blocks: TokenBlocks
    ) -> None:
        """PEFT's passed functions half-way, which left a dense model with the config of a hybrid.

        Quick tests run what is compiled eagerly: ``test_a_hybrid_compiles_into_one_graph`` compiles a layout.
        """
        torch._dynamo.reset()
        with torch.compiler.set_stance(stance):
            self.check_layouts(kind, tokens, blocks)

    def check_layouts(self, kind: str, tokens: Tensor, blocks: TokenBlocks) -> None:
        model = tiny_model(vocab_size=300)
        wrapper = WRAPPERS[kind](model)
        dense = outputs(wrapper, tokens)
        unwrapped = copy.deepcopy(model)
        spkv_nas.apply_layout(unwrapped, LAYOUT)
        hybrid = outputs(unwrapped, tokens)
        assert not torch.allclose(hybrid, dense, atol=1e-3)
        with spkv_nas.layout_applied(wrapper, LAYOUT):
            assert torch.allclose(outputs(wrapper, tokens), hybrid, atol=1e-5)
        assert torch.allclose(outputs(wrapper, tokens), dense, atol=1e-5)
        spkv_nas.apply_layout(wrapper, LAYOUT)
        assert torch.allclose(outputs(wrapper, tokens), hybrid, atol=1e-5)
        assert isinstance(SPKVCache(wrapper), SPKVCache)
        nll = spkv_nas.evaluate(wrapper, blocks).nll.mean
        assert spkv_nas.score(wrapper, blocks, LAYOUT).set_index("strategy").loc[
            "mixed", "nll"
        ] == pytest.approx(nll)
        assert spkv_nas.probe(wrapper, blocks, signal="attention-mass", window=4).grid == (4, 2)
        spkv_nas.detach(wrapper)
        assert torch.allclose(outputs(wrapper, tokens), dense, atol=1e-5)
        assert not hasattr(model.config, "spkv")

    def test_saved_without_wrapper(
        self, tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model = tiny_model(vocab_size=300)
        spkv_nas.save(torch.compile(model), tiny_tokenizer, tmp_path / "compiled")
        assert equal_up_to_rounding(
            logits(spkv_nas.load(tmp_path / "compiled")[0], tokens), logits(model, tokens)
        )
        lora = WRAPPERS["peft"](model)
        for adapted in (lora, lora.get_base_model()):
            with pytest.raises(UserError, match=r"adapters of PEFT.* merge them first"):
                spkv_nas.save(adapted, tiny_tokenizer, tmp_path / "adapted")
        assert not (tmp_path / "adapted").exists()
        spkv_nas.apply_layout(lora, LAYOUT)
        spkv_nas.detach(lora)
        merged = lora.merge_and_unload()
        spkv_nas.save(merged, tiny_tokenizer, tmp_path / "merged")
        assert torch.allclose(
            logits(spkv_nas.load(tmp_path / "merged")[0], tokens), logits(merged, tokens)
        )

    def test_wrappers_that_compute_more_are_refused(self, blocks: TokenBlocks) -> None:
        model = tiny_model(vocab_size=300)
        prefix = peft.get_peft_model(
            model, peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        )
        for call in (spkv_nas.detach, lambda model: spkv_nas.evaluate(model, blocks)):
            with pytest.raises(UserError, match=r"virtual tokens.*get_base_model"):
                call(prefix)
        parallel = WRAPPERS["ddp"](tiny_model())
        with pytest.raises(UserError, match=r"add them to model\.module"):
            spkv_nas.attach_gates(parallel)
        with pytest.raises(UserError, match=r"add them to model\.module"):
            spkv_nas.learn_gates(parallel, blocks, GateConfig(window=4, target_density=0.5))
        assert not attention_layers(parallel)
        assert not attention_layers(prefix)


@pytest.mark.parametrize(
    ("family", "task"),
    [
        *(
            ("llama", task)
            for task in ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")
        ),
        *((family, task) for family in ("llama", "bert") for task in ("", "PRETRAINING")),
        *(("bert", task) for task in ("CAUSAL_LM", "MASKED_LM")),
        *((family, "SEQ_TO_SEQ_CAUSAL_LM") for family in ("t5", "bart")),
    ],
)
def test_classes_that_are_no_causal_language_models(
    family: str, task: str, blocks: TokenBlocks
) -> None:
    """A hybrid classifier was saved as a language model without its head."""
    if family == "llama" and task == "PRETRAINING":
        family, task = "gpt2", "double heads"
    options = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "d_model": 32,
    }
    config = AutoConfig.for_model(family, **options, num_attention_heads=4, num_labels=3)
    if task == "double heads":
        model_class = GPT2DoubleHeadsModel
    elif task:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")
        model_class = mapping[type(config)]
    else:
        model_class = type(AutoModel.from_config(config))
    model = model_class(config).eval()
    before = model.config.to_dict()
    calls = (
        lambda: spkv_nas.apply_layout(model, Layout(("GGGG", "LLLL"), 4)),
        lambda: spkv_nas.attach_gates(model),
        lambda: spkv_nas.evaluate(model, blocks),
        lambda: spkv_nas.head_gates(model, blocks),
    )
    for call in calls:
        with pytest.raises(UserError, match="is no causal language model"):
            call()
    assert model.config.to_dict() == before
    assert not attention_layers(model)


class TestRestoring:
    def change(self, model: Any, how: str) -> None:
        if how == "detach":
            spkv_nas.detach(model)
        elif how == "gates":
            spkv_nas.attach_gates(model, GateConfig(window=3))
        else:
            spkv_nas.apply_layout(model, Layout(("LL",) * 4, 2))

    @pytest.mark.parametrize("how", ["detach", "gates", "layout"])
    @pytest.mark.parametrize("kind", ["dense", "hybrid", "same layout", "gated"])
    def test_whatever_the_block_does(
        self, kind: str, how: str, tokens: Tensor, blocks: TokenBlocks
    ) -> None:
        """A block on the layout that the model had already was not restored."""
        model = gated() if kind == "gated" else tiny_model(vocab_size=300)
        if kind in ("hybrid", "same layout"):
            spkv_nas.apply_layout(
                model, LAYOUT if kind == "same layout" else Layout(("LG",) * 4, 3)
            )
        expected = logits(model, tokens)
        config = model.config.to_dict()
        names = list(model.state_dict())
        with suppress(ZeroDivisionError), spkv_nas.layout_applied(model, LAYOUT, sinks=0):
            self.change(model, how)
            _ = 1 / 0
        assert equal_up_to_rounding(logits(model, tokens), expected)
        assert model.config.to_dict() == config
        assert list(model.state_dict()) == names
        spkv_nas.detach(model)
        assert not attention_layers(model)


class TestGradients:
    @pytest.mark.parametrize(
        "signal", ["head-gates", "duo", "regression", "add-one-head", "attention-mass"]
    )
    def test_signals_without_gradients(self, signal: str, blocks: TokenBlocks) -> None:
        """Turn gradients on inside signals that learn, which raised a RuntimeError."""
        options = {
            "head-gates": {"steps": 1},
            "duo": {"steps": 1},
            "regression": {"num_layouts": 12},
        }.get(signal, {})
        model, blocks = tiny_model(vocab_size=300), blocks.take(3)
        expected = spkv_nas.probe(model, blocks, signal=signal, window=6, **options).values
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                table = spkv_nas.probe(model, blocks, signal=signal, window=6, **options)
            assert table.values == pytest.approx(expected, abs=1e-5)

    def test_gates_and_models_of_inference_mode_learn_later(
        self,
        blocks: TokenBlocks,
        tokens: Tensor,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        spkv_nas.save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path)
        with torch.inference_mode():
            model, _ = spkv_nas.load(tmp_path)
            spkv_nas.learn_gates(model, blocks, GateConfig(window=4, target_density=0.5), steps=1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_a_cache_with_gradients(self, tokens: Tensor) -> None:
        """The error named a DynamicCache that nobody passed; with an SPKVCache gradients were lost without a word."""
        model = tiny_model()
        spkv_nas.apply_layout(model, LAYOUT)
        for options in ({"use_cache": True}, {"past_key_values": SPKVCache(model)}):
            with pytest.raises(UserError, match=r"no gradients pass through SPKVCache: .*no_grad"):
                model(input_ids=tokens, **options)
        model.requires_grad_(False)
        expected = model(input_ids=tokens).logits[:, -1]
        first = model(input_ids=tokens[:, :-1], use_cache=True)
        last = model(input_ids=tokens[:, -1:], past_key_values=first.past_key_values).logits[:, -1]
        assert torch.allclose(last, expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of PEFT and torch.compile
@pytest.mark.parametrize(
    ("heads", "sinks"), slow_after(1, [(("GL",), 3), (("GL", "LL"), 3), (("GL", "LL"), 0)])
)
def test_a_hybrid_compiles_into_one_graph(
    heads: tuple[str, ...], sinks: int, tokens: Tensor
) -> None:
    """The values of a window per head were read from a tensor."""
    model = tiny_model(num_hidden_layers=len(heads))
    spkv_nas.apply_layout(model, Layout(heads, window=5), sinks=sinks)
    expected = logits(model, tokens)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.allclose(compiled(input_ids=tokens).logits, expected, atol=1e-5)


class TestMessages:
    def test_functions_log_what_they_do(
        self,
        caplog: pytest.LogCaptureFixture,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        spkv_nas.save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path)
        with caplog.at_level(logging.INFO, "spkv_nas"):
            model, tokenizer = spkv_nas.load(tmp_path)
            blocks = spkv_nas.build_blocks(TEXTS, tokenizer, block_size=32)
            spkv_nas.head_gates(model, blocks, window=6, steps=1)
        text = caplog.text
        for name in ("load", "build_blocks", "head_gates"):
            assert f"{name}: done in" in text
        assert f"head_gates: LlamaForCausalLM, {blocks}, window=6, steps=1" in text
        with caplog.at_level(logging.WARNING, "spkv_nas"):
            caplog.clear()
            spkv_nas.evaluate(model, blocks)
        assert not caplog.records

    @pytest.mark.parametrize("name", ["evaluate", "score", "head_gates", "probe", "learn_gates"])
    def test_progress(
        self,
        name: str,
        blocks: TokenBlocks,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("spkv_nas.base.progress.EVERY", 0.0)
        options: dict[str, Any] = {
            "score": {"layouts": [LAYOUT]},
            "evaluate": {"batch_size": 2},
            "head_gates": {"window": 4, "steps": 3},
            "probe": {"window": 4, "signal": "add-one-head"},
            "learn_gates": {"config": GateConfig(window=4, target_density=0.5), "steps": 3},
        }[name]
        seen: list[tuple[int, int]] = []
        measure = getattr(spkv_nas, name)
        measure(
            tiny_model(vocab_size=300),
            blocks,
            progress=lambda done, total, note="": seen.append((done, total)),
            **options,
        )
        assert seen[-1][0] == seen[-1][1]
        with caplog.at_level(logging.INFO, "spkv_nas"):
            measure(tiny_model(vocab_size=300), blocks, **options)
        assert f"{name}: {seen[-1][1]} of {seen[-1][1]}" in caplog.text


class TestObjects:
    def test_a_signal(self, blocks: TokenBlocks) -> None:
        model = tiny_model(vocab_size=300)
        by_name = spkv_nas.probe(model, blocks, signal="attention-mass", window=6)
        by_object = spkv_nas.probe(model, blocks, signal=copy.copy(ATTENTION_MASS), window=6)
        assert by_object.name == "attention-mass"
        assert by_name.values == pytest.approx(by_object.values, abs=1e-6)

    def test_head_scores_of_arrays(self, tmp_path: Path) -> None:
        values = np.array([[1.0, -2.0], [3.0, 0.5]])
        scores = HeadScores.from_array(
            values, name="norms", unit="norm", window=np.int64(16), sinks=4
        )
        assert (
            repr(scores)
            == "HeadScores('norms', 2 layers x 2 KV heads, signal custom, kind score, unit norm)"
        )
        assert np.array_equal(scores.values, values)
        frame = scores.to_frame()
        assert np.array_equal(frame.pivot(index="layer", columns="kv_head", values="score"), values)
        scores.write(tmp_path)
        assert HeadScores.read(tmp_path).to_frame().equals(frame)
        layout = spkv_nas.propose(scores, 2)["densest"]
        assert (layout.heads, layout.window, layout.sinks) == (("GL", "GL"), 16, 4)
        for wrong, kind in (
            (values, "share"),
            (values[0], "score"),
            (values, "x"),
            (values * np.nan, "gain"),
        ):
            with pytest.raises(UserError, match="scores"):
                HeadScores.from_array(wrong, kind=kind)

    def test_a_proposal_takes_the_learned_budget(self, blocks: TokenBlocks) -> None:
        scores = spkv_nas.head_gates(
            tiny_model(vocab_size=300), blocks, window=6, budget=3, steps=1
        )
        assert {
            layout.num_global
            for name, layout in spkv_nas.propose(scores).items()
            if name == "densest"
        } == {3}
        assert spkv_nas.propose(make_table(DENSITY))["densest"].num_global == 2

    def test_blocks(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        """Repeated texts were counted each, which made errors too small."""
        blocks = spkv_nas.build_blocks(TEXTS, tiny_tokenizer, block_size=32)
        assert len(blocks) == blocks.num_blocks
        assert str(blocks) == repr(blocks) == f"{len(blocks)} blocks of 32 tokens from 24 documents"
        again = spkv_nas.build_blocks(
            [*TEXTS, TEXTS[3], "", TEXTS[0]], tiny_tokenizer, block_size=32
        )
        assert np.array_equal(again.tokens, blocks.tokens)
        assert again.documents == blocks.documents

    def test_functions_are_pickled_by_their_public_name(self) -> None:
        assert pickle.loads(pickle.dumps(spkv_nas.propose)) is spkv_nas.propose
