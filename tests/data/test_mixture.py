"""Test RULER samples in the training text: their share, their tokens, and that all runs see the same ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers import train_branch
from hypothesis import given
from hypothesis import strategies as st
from interruptions import assert_same, cut
from ruler_bytes import embedded_tokenizer
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.limits import MAX_SEED
from spkv_nas.base.schema import merged
from spkv_nas.contrib.search.recipe_evaluator import RecipeEvaluator
from spkv_nas.data.batches import BlockOrder, Mixture, mixed_order
from spkv_nas.data.ruler.sample_blocks import RulerBlocks
from spkv_nas.data.ruler.tasks import NO_MATERIAL, available, generate
from spkv_nas.data.tokenizer import Boundaries
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.loss import NO_TARGET
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.probe import probe
from spkv_nas.training.branch_config import BranchConfig
from spkv_nas.training.branches import Branch
from spkv_nas.training.corpus import Corpus, load_corpus, training_data
from spkv_nas.training.dense import train_dense
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant

MIX = {"share": 0.5, "tasks": ["niah_single_1"]}


class TestMixture:
    @given(
        share=st.floats(0.001, 1.0),
        num_text=st.integers(1, 50),
        seed=st.integers(0, MAX_SEED),
        start=st.integers(0, 10_000),
        length=st.integers(1, 200),
    )
    def test_every_section_has_its_share(
        self, share: float, num_text: int, seed: int, start: int, length: int
    ) -> None:
        mixture = Mixture.drawn(share, num_text, seed)
        result = sum(mixture.at(position)[0] for position in range(start, start + length))
        assert abs(result - share * length) <= 1 + 1e-6

    @pytest.mark.parametrize("share", [0.017, 0.5, 1.0])
    def test_samples_are_used_once_and_text_repeats(self, share: float) -> None:
        mixture = Mixture.drawn(share, num_text=10, seed=3)
        order = BlockOrder(mixed_order, 10, 3, 10)
        places = [mixture.at(position) for position in range(1000)]
        synthetic = [number for is_synthetic, number in places if is_synthetic]
        text = [order.at(number) for is_synthetic, number in places if not is_synthetic]
        assert synthetic == list(range(len(synthetic)))
        counts = Counter(text)
        assert not counts or max(counts.values()) - min(counts.values()) <= 1
        assert len(counts) in (0, 10)
        assert text[:10] != text[10:20] or not text

    def test_another_seed_has_another_order(self) -> None:
        mixtures = [
            [Mixture.drawn(0.3, 100, seed).at(position) for position in range(50)]
            for seed in (0, 0, 1)
        ]
        orders = [
            [BlockOrder(mixed_order, 100, seed, 100).at(position) for position in range(50)]
            for seed in (0, 0, 1)
        ]
        assert mixtures[0] == mixtures[1] != mixtures[2]
        assert orders[0] == orders[1] != orders[2]


def ruler_blocks(tokenizer: PreTrainedTokenizerBase, **options: Any) -> RulerBlocks:
    result: dict[str, Any] = {
        "block_size": 512,
        "tasks": ("niah_single_1",),
        "lengths": (512,),
        "learns_all": True,
        "seed": 0,
        "material": NO_MATERIAL,
        "boundaries": Boundaries((), (tokenizer.eos_token_id,)),
    }
    return RulerBlocks(tokenizer, **{**result, **options})


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return embedded_tokenizer()


class TestBlocks:
    def test_a_sample_fills_a_block_and_ends_as_a_text_does(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        for number in range(10):
            tokens, learned = ruler_blocks(tokenizer).block(number)
            end = int(learned.sum())
            assert learned[:end].all()
            assert 0.97 * 512 <= end <= 512
            assert (tokens[end - 1 :] == tokenizer.eos_token_id).all()

    def test_loss_on_answers_only(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokens, learned = ruler_blocks(tokenizer, learns_all=False).block(0)
        answer = tokenizer.decode(tokens[learned]).removesuffix(tokenizer.eos_token).strip()
        prompts = tokenizer.decode(tokens[~learned])
        assert len(answer) == 7
        assert f" is {answer}." in prompts
        assert np.array_equal(tokens, ruler_blocks(tokenizer).block(0)[0])

    def test_several_short_samples_fill_a_block(self, tokenizer: PreTrainedTokenizerBase) -> None:
        blocks = ruler_blocks(tokenizer, lengths=(160, 256), learns_all=False)
        numbers = [
            int((np.diff(blocks.block(number)[1].astype(int)) == 1).sum()) for number in range(20)
        ]
        assert set(numbers) == {2, 3}

    def test_all_tasks_come(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tasks = tuple(available(NO_MATERIAL))
        blocks = ruler_blocks(tokenizer, block_size=1024, lengths=(1024,), tasks=tasks)
        blocks.check()
        begins = {tokenizer.decode(blocks.block(number)[0][:12]) for number in range(40)}
        assert len(begins) >= 5

    def test_no_sample_is_an_evaluations(self, tokenizer: PreTrainedTokenizerBase) -> None:
        text = tokenizer.decode(ruler_blocks(tokenizer).block(0)[0])
        for seed in (0, MAX_SEED):
            assert (
                generate("niah_single_1", seed, 0, 512, tokenizer, is_answered=True).answers[0]
                not in text
            )

    def test_held_out_samples_are_not_trained_on(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """A probe measures them as a separate domain."""
        held_out = ruler_blocks(tokenizer).held_out(3)
        assert held_out.domains == ("ruler",)
        assert [document.name for document in held_out.documents] == [
            "sample 0",
            "sample 1",
            "sample 2",
        ]
        assert np.array_equal(held_out.document[:, 0], [0, 1, 2])
        learned = np.stack(
            [ruler_blocks(tokenizer, seed=seed).block(0)[0] for seed in (0, 1, MAX_SEED + 1)]
        )
        assert not (held_out.tokens[:, None] == learned).all(2).any()
        both = held_out.and_(held_out)
        assert (both.num_blocks, len(both.documents), list(both.document[:, -1])) == (
            6,
            6,
            [0, 1, 2, 3, 4, 5],
        )

    def test_samples_that_do_not_fit_are_named(self, tokenizer: PreTrainedTokenizerBase) -> None:
        with pytest.raises(UserError, match="RULER's cwe needs at least"):
            ruler_blocks(tokenizer, tasks=("niah_single_1", "cwe"), lengths=(300,)).check()
        with pytest.raises(UserError, match="RULER's niah_single_1 needs at least"):
            ruler_blocks(tokenizer, lengths=(512, 20)).check()


class TestTraining:
    @pytest.fixture
    def mixed(self, recipe: Recipe) -> Recipe:
        config = {**(recipe.model.config or {}), "max_position_embeddings": 512}
        return Recipe(
            **merged(
                recipe.model_dump(),
                {
                    "data": {
                        "block_size": 400,
                        "heldout": 0.5,
                        "max_heldout_tokens": 4000,
                        "mix": {"ruler": MIX},
                    },
                    "model": {"config": config},
                },
            )
        )

    @pytest.fixture
    def mixed_corpus(self, mixed: Recipe, recipe_file: Path, tmp_path: Path) -> Corpus:
        return load_corpus(mixed, recipe_file.parent, tmp_path / "runs")

    def test_another_version_of_samples_is_another_run(
        self, mixed: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A run is neither resumed nor reused after its samples changed."""
        plain = Recipe(**merged(mixed.model_dump(), {"data": {"mix": None}}))
        before = [
            recipe.content_hash(*some)
            for recipe in (mixed, plain)
            for some in ((), ("data",), ("dense",))
        ]
        monkeypatch.setattr("spkv_nas.training.recipe.VERSION", 3)
        after = [
            recipe.content_hash(*some)
            for recipe in (mixed, plain)
            for some in ((), ("data",), ("dense",))
        ]
        assert [one != other for one, other in zip(before, after, strict=True)] == [
            True,
            True,
            False,
        ] + [False] * 3

    def test_half_of_the_blocks_are_samples(self, mixed: Recipe, mixed_corpus: Corpus) -> None:
        phase = BranchConfig(steps=5, batch_size=4)
        for loss in ("all", "answers"):
            recipe = Recipe(
                **merged(mixed.model_dump(), {"data": {"mix": {"ruler": {**MIX, "loss": loss}}}})
            )
            items = list(training_data(recipe, mixed_corpus, phase, 0))
            texts = [mixed_corpus.tokenizer.decode(item["input_ids"]) for item in items]
            samples = [text.startswith("Remember the magic") for text in texts]
            assert (len(items), sum(samples)) == (20, 10)
            learned = [int((item["labels"] != NO_TARGET).sum()) for item in items]
            assert all(
                number == 400
                for number, is_sample in zip(learned, samples, strict=True)
                if not is_sample
            )
            least, most = (370, 400) if loss == "all" else (2, 9)
            assert all(
                least <= number <= most for number, one in zip(learned, samples, strict=True) if one
            )

    def test_held_out_text_is_unchanged(
        self, mixed: Recipe, mixed_corpus: Corpus, recipe_file: Path, tmp_path: Path
    ) -> None:
        plain = Recipe(**merged(mixed.model_dump(), {"data": {"mix": None}}))
        assert load_corpus(plain, recipe_file.parent, tmp_path / "runs").text == mixed_corpus.text

    def test_other_essays_are_another_text(
        self, mixed: Recipe, recipe_file: Path, tmp_path: Path
    ) -> None:
        """A run on one text is not resumed on another."""
        essays = recipe_file.parent / "essays.txt"
        recipe = Recipe(
            **merged(mixed.model_dump(), {"data": {"mix": {"ruler": {"haystack": ["essays.txt"]}}}})
        )
        result = set()
        for word in ("first", "second"):
            essays.write_text(f"This is the {word}. " * 30)
            result.add(load_corpus(recipe, recipe_file.parent, tmp_path / "runs").text)
        assert len(result) == 2
        essays.write_text("One.")
        with pytest.raises(UserError, match=r"data.mix.ruler.haystack .*essays.txt: 1 sentences"):
            load_corpus(recipe, recipe_file.parent, tmp_path / "runs")

    @pytest.mark.slow
    def test_an_interrupted_branch_resumes_bit_for_bit(
        self, mixed: Recipe, mixed_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dense = train_dense(mixed, mixed_corpus, tmp_path / "dense", device="cpu")

        def train(name: str) -> Branch:
            return train_branch(
                mixed, mixed_corpus, dense, tmp_path / name, Variant.sp_kv(), device="cpu"
            )

        whole = train("whole")
        cut(train, "torn", monkeypatch)
        assert_same(whole, train("torn"))

    @pytest.mark.slow
    def test_a_probe_has_a_domain_of_samples(
        self, mixed: Recipe, recipe_file: Path, tmp_path: Path
    ) -> None:
        """Half of the training blocks and half of the probed blocks are samples."""
        recipe_file.write_text(yaml.safe_dump(mixed.model_dump(mode="json")))
        table = probe(
            ProbeOptions(
                recipe=recipe_file, workspace=tmp_path / "w", device="cpu", ablation_tokens=0
            )
        )
        tokens = table.rows.groupby("domain")["num_tokens"].first()
        assert set(tokens.index) == {"code", "prose", "ruler"}
        assert tokens["ruler"] == pytest.approx(tokens.sum() / 2, rel=0.1)
        assert table.rows["standard_error"].notna().all()

    def test_a_search_scores_on_samples_too(
        self, mixed: Recipe, mixed_corpus: Corpus, recipe_file: Path, tmp_path: Path
    ) -> None:
        """Half of the scored blocks are samples; the text beside them is text that the search may select on."""
        judge = RecipeEvaluator(mixed, recipe_file.parent, tmp_path / "runs", max_tokens=4_000)
        num_blocks = judge.num_selection_tokens // 400
        scored = judge._scored_on
        infos = [tuple(scored.documents)[index] for index in scored.document[:, 200]]
        assert len(infos) == num_blocks
        assert sum(info.domain == "ruler" for info in infos) == round(num_blocks / 2)
        texts = {info.id for info in infos if info.domain != "ruler"}
        heldout = [info.id for info in mixed_corpus.heldout.documents]
        assert texts <= {heldout[index] for index in np.flatnonzero(judge._selection_documents)}
        # The scores are those of these blocks
        layout = Layout(("GL", "LL"), window=4)
        (score,) = judge.score([layout])
        full, local = zero_shot(judge._model, [None, layout], scored)
        assert score.percent == pytest.approx(paired_difference(local, full).percent)

    def test_a_recipe_without_the_key_trains_as_before(self, recipe: Recipe, mixed: Recipe) -> None:
        plain = Recipe(**merged(mixed.model_dump(), {"data": {**recipe.data.model_dump()}}))
        assert (
            plain.content_hash("data") == recipe.content_hash("data") != mixed.content_hash("data")
        )

    @pytest.mark.parametrize(
        ("mix", "message"),
        [
            ({"share": 0.0}, "data.mix.ruler.share"),
            ({"share": 0.1, "tasks": ["qa_1"]}, "'qa_1' is none of niah_single_1, "),
            ({"share": 0.1, "lengths": [401]}, "lengths must be 1 to 400 tokens"),
        ],
        ids=str,
    )
    def test_invalid_values(self, mix: dict[str, Any], message: str, mixed: Recipe) -> None:
        data = merged(mixed.model_dump(mode="json"), {"data": {"mix": {"ruler": {**MIX, **mix}}}})
        with pytest.raises(UserError, match=message):
            Recipe.parse(data, Path(), "recipe")

    def test_blocks_too_short_for_a_task(
        self, mixed: Recipe, mixed_corpus: Corpus, tmp_path: Path
    ) -> None:
        recipe = Recipe(
            **merged(mixed.model_dump(), {"data": {"mix": {"ruler": {**MIX, "tasks": ["cwe"]}}}})
        )
        with pytest.raises(UserError, match="RULER's cwe needs at least"):
            train_dense(recipe, mixed_corpus, tmp_path / "dense", device="cpu")
