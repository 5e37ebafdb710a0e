"""Test the Python API: paths as text, options of loading, and public functions on models in memory."""

from __future__ import annotations

import inspect
import re
import textwrap
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DENSITY, all_logits, equal_up_to_rounding, gated, logits, make_table, tiny_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import spkv_nas
from spkv_nas import HeadScores, Layout, UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.config_section import checkpoint_layout, gate_config

LAYOUT = Layout(("GL", "LL", "LG", "GG"), window=5, strategy="mixed")


def test_paths_may_be_strings(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, tokens: Tensor
) -> None:
    spkv_nas.save(tiny_model(vocab_size=300), tiny_tokenizer, f"{tmp_path}/dense")
    LAYOUT.write(f"{tmp_path}/layout.yaml")
    assert Layout.read(f"{tmp_path}/layout.yaml").heads == LAYOUT.heads
    make_table(DENSITY).write(f"{tmp_path}/probe")
    assert np.allclose(HeadScores.read(f"{tmp_path}/probe").values, DENSITY)
    spkv_nas.export(LAYOUT, f"{tmp_path}/dense", f"{tmp_path}/hybrid")
    hybrid, _ = spkv_nas.load(f"{tmp_path}/hybrid")
    model, _ = spkv_nas.load(f"{tmp_path}/dense")
    spkv_nas.apply_layout(model, LAYOUT)
    assert equal_up_to_rounding(logits(hybrid, tokens), logits(model, tokens))


class TestLoad:
    @pytest.fixture
    def dense(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
        spkv_nas.save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "dense")
        return tmp_path / "dense"

    @pytest.fixture
    def hybrid(self, dense: Path) -> Path:
        spkv_nas.export(LAYOUT, dense, dense.with_name("hybrid"))
        return dense.with_name("hybrid")

    @pytest.mark.parametrize("kind", ["dense", "hybrid"])
    def test_options_of_transformers(
        self, kind: str, request: pytest.FixtureRequest, tokens: Tensor
    ) -> None:
        folder = request.getfixturevalue(kind)
        expected = logits(spkv_nas.load(folder)[0], tokens)
        for device_map in ("auto", {"": torch.device("cpu")}, "cpu"):
            model, _ = spkv_nas.load(folder, device_map=device_map)
            assert equal_up_to_rounding(logits(model, tokens), expected)
        dtype = "bfloat16" if kind == "dense" else torch.bfloat16
        assert spkv_nas.load(folder, dtype=dtype)[0].dtype is torch.bfloat16
        assert spkv_nas.load(folder, dtype="auto")[0].dtype is torch.float32

    def test_attention_of_a_dense_model(self, dense: Path, hybrid: Path, tokens: Tensor) -> None:
        for name in ("eager", "sdpa"):
            assert (
                spkv_nas.load(dense, attn_implementation=name)[0].config._attn_implementation
                == name
            )
        with pytest.raises(UserError, match="attn_implementation 'sdpa' would ignore"):
            spkv_nas.load(hybrid, attn_implementation="sdpa")

    def test_mistakes(self, dense: Path) -> None:
        with pytest.raises(UserError, match="dtype 'float99' is unknown"):
            spkv_nas.load(dense, dtype="float99")
        with pytest.raises(UserError, match="to take the revision 'v1'"):
            spkv_nas.load(dense, revision="v1")
        with pytest.raises(UserError, match="to take the revision 'v2'"):
            spkv_nas.load("org/name@v1", revision="v2")


class TestLayoutApplied:
    def test_a_dense_model(self, tokens: Tensor, tmp_path: Path) -> None:
        model, hybrid = tiny_model(), tiny_model()
        expected, config = logits(model, tokens), model.config.to_dict()
        spkv_nas.apply_layout(hybrid, LAYOUT)
        with spkv_nas.layout_applied(model, LAYOUT) as applied:
            assert applied is model
            assert equal_up_to_rounding(logits(model, tokens), logits(hybrid, tokens))
        assert equal_up_to_rounding(logits(model, tokens), expected)
        assert model.config.to_dict() == config

    def test_a_hybrid_and_gates_come_back(
        self, tokens: Tensor, blocks: TokenBlocks, tmp_path: Path
    ) -> None:
        hybrid, other = tiny_model(vocab_size=300), gated()
        spkv_nas.apply_layout(hybrid, LAYOUT)
        spkv_nas.set_gate_mode(other, "hard", 0.3)
        for model in (hybrid, other):
            before, names = logits(model, tokens), list(model.state_dict())
            alone = tiny_model(vocab_size=300)
            spkv_nas.apply_layout(alone, Layout(("LG",) * 4, 7))
            with (
                suppress(ZeroDivisionError),
                spkv_nas.layout_applied(model, Layout(("LG",) * 4, 3), window=7),
            ):
                assert equal_up_to_rounding(logits(model, tokens), logits(alone, tokens))
                assert checkpoint_layout(model) == Layout(("LG",) * 4, 7)
                _ = 1 / 0
            assert equal_up_to_rounding(logits(model, tokens), before)
            assert list(model.state_dict()) == names
            model.save_pretrained(tmp_path / str(len(names)))
            assert hasattr(model.config, "spkv")
        assert checkpoint_layout(hybrid) == Layout(LAYOUT.heads, LAYOUT.window)
        gates = gate_config(other)
        assert gates is not None
        assert gates.tau == 0.3
        assert all_logits(other, blocks, 0.3).shape[1] == 4

    def test_a_layout_that_does_not_fit(self, tokens: Tensor) -> None:
        model = gated()
        before = logits(model, tokens)
        with (
            pytest.raises(UserError, match="the layout is for"),
            spkv_nas.layout_applied(model, Layout(("G",), 3)),
        ):
            pass
        assert equal_up_to_rounding(logits(model, tokens), before)


class TestMeasures:
    def test_score_and_evaluate_agree(self, blocks: TokenBlocks) -> None:
        model = tiny_model()
        layouts = {"mixed": LAYOUT, "local": Layout(("LL",) * 4, 4)}
        rows = spkv_nas.score(model, blocks, layouts).set_index("strategy")
        dense = spkv_nas.evaluate(model, blocks)
        assert rows.loc["full-attention", "nll"] == pytest.approx(dense.nll.mean, abs=1e-6)
        for name, layout in layouts.items():
            with spkv_nas.layout_applied(model, layout):
                change = spkv_nas.paired_difference(spkv_nas.evaluate(model, blocks).nll, dense.nll)
            assert rows.loc[name, "delta_nll_percent"] == pytest.approx(change.percent, abs=1e-4)
            assert rows.loc[name, "delta_nll_standard_error"] == pytest.approx(
                change.standard_error, abs=1e-4
            )
        assert list(spkv_nas.score(model, blocks, LAYOUT)["strategy"]) == [
            "full-attention",
            "mixed",
        ]
        assert set(spkv_nas.score(model, blocks, [LAYOUT])["strategy"]) == {
            "full-attention",
            "mixed",
        }
        for wrong in ([], [LAYOUT, LAYOUT]):
            with pytest.raises(UserError, match="each under a distinct name"):
                spkv_nas.score(model, blocks, wrong)

    @pytest.mark.parametrize("measure", ["evaluate", "score", "head_gates", "probe", "learn_gates"])
    def test_blocks_that_the_model_cannot_read(self, measure: str, blocks: TokenBlocks) -> None:
        """They ended in an IndexError, or were measured beyond the model's context without a word."""
        options: dict[str, Any] = {
            "score": {"layouts": LAYOUT},
            "head_gates": {"window": 4, "steps": 1},
            "probe": {"window": 4, "signal": "attention-mass"},
            "learn_gates": {
                "config": spkv_nas.GateConfig(window=4, target_density=0.5),
                "steps": 1,
            },
        }.get(measure, {})
        run = partial(getattr(spkv_nas, measure), blocks=blocks, **options)
        with pytest.raises(UserError, match="longer than the model's table of 16 positions"):
            run(tiny_model("gpt2", max_position_embeddings=16))
        with pytest.raises(UserError, match="but the model knows 50"):
            run(tiny_model(vocab_size=50))
        with pytest.raises(UserError, match="there is no text"):
            run(tiny_model(), blocks=blocks.take(0))
        with pytest.warns(
            UserWarning, match="sequences of 32 tokens are longer than the model's max_position_emb"
        ):
            run(tiny_model(max_position_embeddings=16))

    @pytest.mark.filterwarnings("ignore:the model predicts .* of the needle tokens")  # being random
    @pytest.mark.parametrize("signal", spkv_nas.SIGNALS.names)
    def test_every_signal_by_its_name(self, signal: str, blocks: TokenBlocks) -> None:
        options = {
            "head-gates": {"steps": 2},
            "duo": {"steps": 2},
            "regression": {"num_layouts": 12},
        }
        model = gated() if signal == "density" else tiny_model(vocab_size=300)
        window = {} if signal == "density" else {"window": 6}
        table = spkv_nas.probe(model, blocks, signal=signal, **window, **options.get(signal, {}))
        assert table.grid == (4, 2)
        assert table.name == ("probe" if signal == "density" else signal)

    def test_signals_of_text_and_mistakes(
        self, tiny_tokenizer: PreTrainedTokenizerBase, blocks: TokenBlocks
    ) -> None:
        texts = ["the quick brown fox jumps over the lazy dog " * 20] * 3
        table = spkv_nas.probe(
            tiny_model(vocab_size=300),
            texts,
            signal="attention-mass",
            window=6,
            tokenizer=tiny_tokenizer,
        )
        assert table.grid == (4, 2)
        with pytest.raises(UserError, match="unknown signal 'x'"):
            spkv_nas.probe(tiny_model(), blocks, signal="x")
        with pytest.raises(UserError, match="leave window out"):
            spkv_nas.probe(gated(), blocks, window=5)
        with pytest.raises(UserError, match="tau does not apply to signal add-one-head"):
            spkv_nas.probe(tiny_model(), blocks, 0.4, signal="add-one-head")


EXAMPLE = re.compile(r"::\n\n((?: +.*\n|\n)+)")
EXAMPLES = {  # lines of code in the docstrings of public names
    name: textwrap.dedent(found[1])
    for name in dir(spkv_nas)
    if (found := EXAMPLE.search(inspect.getdoc(getattr(spkv_nas, name)) or ""))
}


def test_what_has_an_example() -> None:
    assert {"HeadScores", "Layout", "propose", "apply_layout", "SPKVCache"} <= EXAMPLES.keys()
    assert {"train_hybrids", "verdict", "critical_budget", "measure_separator"} <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(
    name: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Head gates of ``auto`` take 50 steps
    monkeypatch.setattr("spkv_nas.artifacts.defaults.LEARNING_TOKENS", 128)
    texts = [
        " ".join(f"fox {(document * word) % 31} jumps" for word in range(8))
        for document in range(1, 93)
    ]
    build = partial(spkv_nas.build_blocks, tokenizer=tiny_tokenizer, block_size=32)
    model, scores = tiny_model(vocab_size=300), make_table(DENSITY)
    shared = {
        "spkv_nas": spkv_nas,
        "model": model,
        "tokenizer": tiny_tokenizer,
        "texts": texts,
        "scores": scores,
    }
    shared |= {
        "blocks": build(texts[:12]),
        "heldout": build(texts[12:]),
        "layouts": spkv_nas.propose(scores, 3),
    }
    example = EXAMPLES[name].replace("propose(scores", "propose(scores, num_random=0")
    code = re.sub(r"((?:head_gates|probe|train_hybrids)\([^)]*)\)", r"\1, steps=1)", example)
    short = '"nll=99%", risk="40%"' + (', memory="60%"' if name == "auto" else "")
    exec(compile(code.replace('"nll=1%"', short), name, "exec"), shared)
