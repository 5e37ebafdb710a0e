"""Test branches whose blocks grow during training: their data, their positions, and runs that agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import logits, tiny_model, train_branch
from hypothesis import given
from hypothesis import strategies as st
from interruptions import Train, assert_same, cut
from marks import slow_after
from ruler_bytes import embedded_tokenizer
from safetensors.torch import load_file

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.limits import MAX_SEED
from spkv_nas.base.schema import merged
from spkv_nas.data.batches import BlockOrder, Mixture, library_order, mixed_order
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.tokenizer import Boundaries
from spkv_nas.model.checkpoint import load
from spkv_nas.model.export.export import export
from spkv_nas.training.arguments import training_arguments
from spkv_nas.training.branches import Branch
from spkv_nas.training.callbacks import extend_positions
from spkv_nas.training.corpus import Corpus, training_data
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant

THETA = {"rope_theta": 40000.0}
WEIGHTS = "model.safetensors"
LONGER = {"at": 0.5, "block_size": 64, "rope": THETA}


def extended(recipe: Recipe, extend: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    data = merged(recipe.model_dump(mode="json"), {"branch": {"extend": extend or LONGER}})
    return Recipe.parse(merged(data, sections), Path(), "recipe")


class TestOrder:
    @given(
        num_blocks=st.integers(4, 60),
        seed=st.integers(0, MAX_SEED),
        ratio=st.integers(1, 4),
        start=st.integers(0, 80),
    )
    def test_no_text_repeats_in_an_epoch(
        self, num_blocks: int, seed: int, ratio: int, start: int
    ) -> None:
        short = BlockOrder(mixed_order, num_blocks, seed, num_blocks)
        longer, read = short.longer(ratio, start), start % num_blocks
        before = {short.at(position) for position in range(start - read, start)}
        parts = np.arange(num_blocks // ratio * ratio).reshape(-1, ratio)
        unread = [number for number, part in enumerate(parts) if not before & set(part.tolist())]
        assert sorted(longer.at(number) for number in range(len(unread))) == unread
        epoch = [longer.at(len(unread) + number) for number in range(len(parts))]
        assert sorted(epoch) == list(range(len(parts)))

    @given(
        seed=st.integers(0, MAX_SEED),
        start=st.integers(0, 80),
        share=st.sampled_from([0.0, 0.017, 0.3, 1.0]),
    )
    def test_unchanged_blocks_continue(self, seed: int, start: int, share: float) -> None:
        order, mixture = BlockOrder(mixed_order, 23, seed, 20), Mixture.drawn(share, 23, seed)
        later, mixed = order.longer(1, start), mixture.longer(1, start)
        for position in range(60):
            assert later.at(position) == order.at(start + position)
            is_sample, number = mixed.at(position)
            read = 0 if is_sample else start - mixture.synthetic(start)
            assert (is_sample, number + read) == mixture.at(start + position)

    @given(share=st.floats(0.001, 1.0), seed=st.integers(0, MAX_SEED), ratio=st.integers(1, 8))
    def test_longer_blocks_have_their_share_of_samples_and_others(
        self, share: float, seed: int, ratio: int
    ) -> None:
        mixture = Mixture.drawn(share, 50, seed)
        longer = mixture.longer(ratio, 40 * ratio)
        numbers = [number for is_sample, number in map(longer.at, range(200)) if is_sample]
        assert abs(len(numbers) - 200 * share) <= 1 + 1e-6
        assert not numbers or numbers[0] * ratio >= mixture.synthetic(40 * ratio)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True

    def test_order_equals_that_of_accelerate(self) -> None:
        from accelerate.data_loader import SeedableRandomSampler

        sampler = SeedableRandomSampler(range(11), data_seed=5)
        assert [list(sampler), list(sampler)] == [
            library_order(11, 5, epoch).tolist() for epoch in (0, 1)
        ]


class TestData:
    def test_batches_have_as_many_tokens_of_the_same_text(
        self, recipe: Recipe, corpus: Corpus
    ) -> None:
        recipe = extended(recipe)
        data = training_data(recipe, corpus, recipe.branch, 1)
        assert len(data) == 32
        batches = [data.__getitems__(range(start, start + 4)) for start in range(0, 32, 4)]
        assert [[tuple(item["input_ids"].shape) for item in batch] for batch in batches] == [
            *[[(32,)] * 4] * 4,
            *[[(64,)] * 2] * 4,
        ]
        text = corpus.train.cut(64).tokens
        for batch in batches[4:]:
            assert all((text == item["input_ids"].numpy()).all(1).any() for item in batch)
        for start, batch in zip(range(0, 32, 4), batches, strict=True):
            pieces = torch.cat(
                [data[position]["input_ids"] for position in range(start, start + 4)]
            )
            assert torch.equal(pieces, torch.cat([item["input_ids"] for item in batch]))

    def test_samples_grow_too(self, corpus: Corpus, recipe: Recipe) -> None:
        """At .5 every second block is a sample, of 256 tokens and then of 512, none of them twice."""
        tokenizer = embedded_tokenizer()
        text = TokenBlocks(
            np.zeros((40, 256), np.int32), np.zeros((40, 256), np.int32), corpus.train.documents
        )
        mix = {"ruler": {"share": 0.5, "tasks": ["niah_single_1"]}}
        recipe = extended(recipe, {"block_size": 512}, data={"block_size": 256, "mix": mix})
        of_ruler = Corpus(tokenizer, text, text)
        data = training_data(recipe, of_ruler, recipe.branch, 1)
        items = [
            item for start in range(0, 32, 4) for item in data.__getitems__(range(start, start + 4))
        ]
        samples = [item["input_ids"] for item in items if item["input_ids"].any()]
        assert [len(tokens) for tokens in samples] == [256] * 8 + [512] * 4
        texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in samples]
        assert all(text.startswith("Remember the magic") for text in texts)
        assert all((tokens != tokenizer.eos_token_id).float().mean() > 0.95 for tokens in samples)
        assert len(set(texts)) == 12


class TestTraining:
    @pytest.fixture
    def train(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> Callable[..., Branch]:
        def run(name: str, recipe: Recipe = recipe, variant: Variant | None = None) -> Branch:
            return train_branch(
                recipe, corpus, dense, tmp_path / name, variant or Variant.sp_kv(), device="cpu"
            )

        return run

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "rope", [{}, {"rope_theta": 10000.0}, {"rope_type": "linear", "factor": 1.0}], ids=str
    )
    @pytest.mark.parametrize(
        "mix", [None, {"ruler": {"share": 0.5, "tasks": ["niah_single_1"], "lengths": [32]}}]
    )
    def test_the_same_length_and_rope_is_no_extension(
        self,
        rope: dict[str, Any],
        mix: Any,
        train: Callable[..., Branch],
        recipe: Recipe,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if mix:
            monkeypatch.setattr("spkv_nas.training.corpus.RulerBlocks", ShortSamples)
        recipe = Recipe(**merged(recipe.model_dump(), {"data": {"mix": mix}}))
        same = extended(recipe, {"at": 0.4, "block_size": 32, "rope": rope})
        one, other = train("none", recipe), train("same", same)
        assert_same(one, other)

    @pytest.mark.slow
    @pytest.mark.parametrize("step", slow_after(1, [5, 2, 4, 7]))
    def test_killed_in_either_segment_it_resumes_bit_for_bit(
        self,
        step: int,
        train: Callable[..., Branch],
        recipe: Recipe,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Checkpoints come every third step; the blocks grow after the fourth."""
        longer: Train = lambda name: train(name, extended(recipe))  # noqa: E731
        whole = longer("whole")
        cut(longer, "torn", monkeypatch, step)
        assert_same(whole, longer("torn"))

    @pytest.mark.slow
    def test_the_first_segment_is_the_unextended_runs(
        self,
        train: Callable[..., Branch],
        recipe: Recipe,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        cut(train, "plain", monkeypatch, 5)
        cut(lambda name: train(name, extended(recipe)), "longer", monkeypatch, 5)
        plain, longer = (
            load_file(tmp_path / name / "checkpoint-3" / WEIGHTS) for name in ("plain", "longer")
        )
        assert all(torch.equal(plain[name], longer[name]) for name in plain)
        cut(train, "plain", monkeypatch, 7)
        cut(lambda name: train(name, extended(recipe)), "longer", monkeypatch, 7)
        plain, longer = (
            load_file(tmp_path / name / "checkpoint-6" / WEIGHTS) for name in ("plain", "longer")
        )
        assert not all(torch.equal(plain[name], longer[name]) for name in plain)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "variant", [Variant.full_attention(), Variant.hybrid(Layout(("GL", "LG"), 8, "a"))], ids=str
    )
    def test_the_checkpoint_and_its_export_have_the_positions(
        self, variant: Variant, train: Callable[..., Branch], recipe: Recipe, tmp_path: Path
    ) -> None:
        branch = train("longer", extended(recipe), variant)
        model, _ = load(branch.checkpoint)
        assert model.config.rope_parameters == {"rope_theta": 40000.0, "rope_type": "default"}
        assert model.config.max_position_embeddings == 64
        assert branch.steps == 8
        if variant.layout is not None:
            out = tmp_path / "out"
            export(None, branch.checkpoint, out)
            exported, _ = load(out)
            assert exported.config.rope_parameters == model.config.rope_parameters
            tokens = torch.randint(280, (1, 64), generator=torch.Generator().manual_seed(0))
            torch.testing.assert_close(logits(exported, tokens), logits(model, tokens))

    @pytest.mark.filterwarnings("ignore:sequences of")  # the positions are not extended
    def test_from_scratch_the_branch_grows(
        self, train: Callable[..., Branch], recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The dense phase and the branch are one run, of 6 and 8 steps."""
        seen: list[tuple[int, int]] = []
        monkeypatch.setattr(
            "spkv_nas.training.callbacks.extend_positions",
            lambda model, length, rope: seen.append((model.step, length)),
        )

        def note(self: object, args: object, state: Any, *_: object, **kwargs: Any) -> None:
            kwargs["model"].step = state.global_step + 1

        monkeypatch.setattr("spkv_nas.training.callbacks.TokenProgressCallback.on_step_end", note)
        train(
            "scratch",
            extended(recipe, gates={"training": "from-scratch"}, branch={"weight_decay": 0.1}),
        )
        assert seen == [(11, 64)]


class ShortSamples:
    """Stands in for RULER's samples, which do not fit in 32 tokens."""

    boundaries = Boundaries()

    def __init__(self, _tokenizer: object, size: int, *_: object) -> None:
        self.size = size

    def check(self) -> None:
        pass

    def block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.random.default_rng(number).integers(0, 200, self.size)
        return tokens, np.ones(self.size, bool)


class TestPositions:
    @pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "smollm3", "granite"])
    @pytest.mark.parametrize(
        "rope", [THETA, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": 4.0}], ids=str
    )
    def test_positions_equal_those_of_transformers(
        self, family: str, rope: dict[str, Any], tmp_path: Path
    ) -> None:
        """The model changed in place equals the one that transformers loads with such a config."""
        model = tiny_model(family)
        tokens = torch.randint(3, 97, (2, 200), generator=torch.Generator().manual_seed(0))
        before = logits(model, tokens)
        extend_positions(model, 256, rope)
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        after = logits(model, tokens)
        assert torch.equal(after, logits(again, tokens))
        assert not torch.allclose(before, after, atol=1e-4)
        assert again.config.max_position_embeddings == 256
        parameters = again.config.rope_parameters
        parameters = parameters.get("full_attention", parameters)
        factor = rope.get("factor", 2.0) if "rope_type" in rope else None
        assert parameters.get("factor") == factor
        assert parameters.get("original_max_position_embeddings") == (
            128 if rope.get("rope_type") == "yarn" else None
        )

    def test_local_layers_of_their_own_rope_keep_it(self) -> None:
        model = tiny_model("gemma3_text")
        local = dict(model.config.rope_parameters["sliding_attention"])
        extend_positions(model, 256, THETA)
        assert model.config.rope_parameters["sliding_attention"] == local
        assert model.config.rope_parameters["full_attention"]["rope_theta"] == 40000.0

    def test_a_kind_that_a_family_does_not_have_is_refused(self) -> None:
        with pytest.raises(
            UserError, match=r"branch.extend.rope: 'phi3' does not support it: .*got yarn"
        ):
            extend_positions(tiny_model("phi3"), 256, {"rope_type": "yarn"})

    def test_a_model_without_is_refused_before_it_trains(
        self, recipe: Recipe, corpus: Corpus, tmp_path: Path
    ) -> None:
        model = tiny_model("gpt2", vocab_size=280, n_positions=128, n_embd=32, n_layer=2, n_head=2)
        model.save_pretrained(tmp_path / "gpt2")
        corpus.tokenizer.save_pretrained(tmp_path / "gpt2")
        with pytest.raises(
            UserError, match="models of type 'gpt2' have no rotary position embeddings"
        ):
            train_branch(
                extended(recipe),
                corpus,
                tmp_path / "gpt2",
                tmp_path / "run",
                Variant.full_attention(),
                device="cpu",
            )


class TestMistakes:
    @pytest.mark.parametrize(
        ("extend", "sections", "message"),
        [
            ({"block_size": 48}, {}, r"block_size 48 is no multiple of data.block_size 32"),
            (
                {"block_size": 192},
                {},
                r"branch.batch_size 4: 128 tokens make no blocks of 192.*multiple of 6",
            ),
            (
                {"block_size": 64},
                {"micro_batch_size": 1},
                r"micro_batch_size 1: 32 tokens make no blocks of 64",
            ),
            ({"at": 1.0, "block_size": 64}, {}, "branch.extend.at"),
            ({"block_size": 64, "rope": {"rope_thetta": 1e4}}, {}, "did you mean 'rope_theta'"),
            (
                {"block_size": 64, "rope": {"rope_type": "llama3"}},
                {},
                "rope_type.*'default', 'linear' or 'yarn'",
            ),
            (
                {"block_size": 64, "rope": {"beta_fast": 8.0}},
                {},
                "'beta_fast' requires rope_type: yarn",
            ),
            ({"block_size": 64, "rope": {"factor": 8.0}}, {}, "'factor' requires rope_type"),
        ],
        ids=str,
    )
    def test_invalid_values(
        self, extend: dict[str, Any], sections: dict[str, Any], message: str, recipe: Recipe
    ) -> None:
        with pytest.raises(UserError, match=message):
            extended(recipe, extend, **sections)

    def test_processes_share_longer_blocks(
        self, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("spkv_nas.base.distributed.num_processes", lambda: 2)
        longer = extended(recipe, {"block_size": 128})
        with pytest.raises(
            UserError,
            match=r"4 blocks cannot be divided evenly among 2 processes, 4 together(.|\n)*of 8$",
        ):
            training_arguments(longer, longer.branch, tmp_path, device="cpu")
        arguments = training_arguments(
            extended(recipe), extended(recipe).branch, tmp_path, device="cpu"
        )
        assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (
            2,
            1,
        )

    def test_micro_batches_hold_at_least_one_longer_block(
        self, recipe: Recipe, tmp_path: Path
    ) -> None:
        """Four blocks of 32 tokens in micro-batches of at most two become two micro-batches of a block of 64."""
        longer = extended(recipe, micro_batch_size=2)
        arguments = training_arguments(longer, longer.branch, tmp_path, device="cpu")
        assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (
            2,
            2,
        )

    def test_too_little_text(
        self, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path
    ) -> None:
        few = Corpus(corpus.tokenizer, corpus.train.take(5), corpus.heldout)
        longer = extended(recipe, {"block_size": 256}, branch={"batch_size": 8})
        with pytest.raises(UserError, match=r"the training text gives 0 blocks of 256 tokens"):
            train_branch(longer, few, dense, tmp_path / "run", Variant.sp_kv(), device="cpu")

    def test_a_recipe_without_the_key_trains_as_before(self, recipe: Recipe) -> None:
        assert extended(recipe).content_hash("branch") != recipe.content_hash("branch")
        assert "extend" not in json.dumps(
            {key: value for key, value in recipe.branch.model_dump().items() if value is not None}
        )
