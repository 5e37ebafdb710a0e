"""Test that blocks begin as the model's tokenizer begins a text, in every way of making them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruler_bytes import embedded_tokenizer
from text_cases import bytes_tokenizer, prose, sixty_documents, write_files
from tokenizers import processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spkv_nas.base.errors import UserError
from spkv_nas.base.special_tokens import prompt_tokens
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.data.config import Bos, DataConfig
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample_blocks import RulerBlocks
from spkv_nas.data.splits import cache_split, load_heldout, load_text, read_split
from spkv_nas.data.tokenizer import boundaries
from spkv_nas.training.recipe import Recipe

BOS, SEPARATOR = "<|bos|>", "<|sep|>"


def tokenizer_with(template: str, bos: bool = True) -> PreTrainedTokenizerBase:
    """Return the embedded tokenizer with two more tokens, which begins and ends texts by a template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=embedded_tokenizer().backend_tokenizer)
    tokenizer.add_special_tokens(
        {"eos_token": "<|endoftext|>", "additional_special_tokens": [BOS, SEPARATOR]}
    )
    if bos:
        tokenizer.add_special_tokens({"bos_token": BOS})
    specials = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, SEPARATOR)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template or "$A", special_tokens=specials
    )
    return tokenizer


def opening_tokens(
    tokenizer: PreTrainedTokenizerBase, bos: Bos, block_size: int
) -> tuple[int, ...]:
    return boundaries(tokenizer, "eos", bos, block_size).opening


def ids(tokenizer: PreTrainedTokenizerBase, *tokens: str) -> tuple[int, ...]:
    return tuple(tokenizer.convert_tokens_to_ids(list(tokens)))


class TestOpeningTokens:
    @pytest.mark.parametrize(
        ("template", "bos", "tokens"),
        [
            ("", "auto", ()),
            ("", True, (BOS,)),
            ("", False, ()),
            (f"{BOS} $A", "auto", (BOS,)),
            (f"{BOS} $A", False, ()),
            (f"{BOS} $A {SEPARATOR}", "auto", (BOS,)),
            (f"{SEPARATOR} {BOS} $A", "auto", (SEPARATOR, BOS)),
            (f"{SEPARATOR} {BOS} $A", True, (SEPARATOR, BOS)),
            (f"$A {SEPARATOR}", "auto", ()),
        ],
    )
    def test_follow_the_tokenizer_or_the_recipe(
        self, template: str, bos: Bos, tokens: tuple[str, ...]
    ) -> None:
        tokenizer = tokenizer_with(template)
        assert opening_tokens(tokenizer, bos, 64) == ids(tokenizer, *tokens)

    def test_are_bos_for_the_embedded_tokenizer(self) -> None:
        tokenizer = embedded_tokenizer()
        assert opening_tokens(tokenizer, "auto", 64) == (tokenizer.bos_token_id,)

    @pytest.mark.parametrize(
        "template", [f"{BOS} $A", f"{BOS} $A {SEPARATOR}", f"$A {SEPARATOR}", ""]
    )
    def test_begin_a_prompt_once_and_nothing_ends_it(self, template: str) -> None:
        tokenizer = tokenizer_with(template)
        text = list(tokenizer("a fox", add_special_tokens=False)["input_ids"])
        opening = list(opening_tokens(tokenizer, "auto", 64))
        assert prompt_tokens(tokenizer, "a fox") == [*opening, *text]
        assert prompt_tokens(tokenizer, f"{BOS}a fox") == [*ids(tokenizer, BOS), *text]

    def test_need_a_bos_token_and_room_for_text(self) -> None:
        with pytest.raises(UserError, match="no BOS token"):
            opening_tokens(tokenizer_with("", bos=False), True, 64)
        with pytest.raises(UserError, match="blocks of 2 tokens have no room"):
            opening_tokens(tokenizer_with(f"{SEPARATOR} {BOS} $A"), "auto", 2)


def check(blocks: TokenBlocks, opening: tuple[int, ...]) -> None:
    """Check that blocks begin with the opening tokens, which belong to the document after them and occur once."""
    count = len(opening)
    assert blocks.opening == opening
    assert blocks.num_blocks > 1
    assert (blocks.tokens[:, :count] == opening).all()
    assert not np.isin(blocks.tokens[:, count:], opening).any()
    assert (blocks.document[:, :count] == blocks.document[:, count : count + 1]).all()


def text_of(blocks: TokenBlocks) -> tuple[Any, Any]:
    count = len(blocks.opening)
    return blocks.tokens[:, count:].ravel(), blocks.document[:, count:].ravel()


def by_document(blocks: TokenBlocks, separator: int) -> dict[int, list[int]]:
    """Return the tokens of each document, without opening tokens and separators."""
    tokens, owner = text_of(blocks)
    return {
        int(index): [t for t in tokens[owner == index].tolist() if t != separator]
        for index in np.unique(owner)
    }


@pytest.mark.parametrize("template", [f"{BOS} $A", f"{SEPARATOR} {BOS} $A {SEPARATOR}"])
class TestBlocks:
    def test_hold_the_same_text_as_without(self, template: str) -> None:
        tokenizer, texts = tokenizer_with(template), [prose(4, i) for i in range(30)]
        blocks, plain = (
            build_blocks(texts, tokenizer, 32, bos=bos, separator="eos") for bos in ("auto", False)
        )
        opening = opening_tokens(tokenizer, "auto", 32)
        check(blocks, opening)
        assert not plain.opening
        one, other = (by_document(part, tokenizer.eos_token_id) for part in (blocks, plain))
        assert len(one) > 25
        assert all(
            tokens[: len(other[index])] == other[index][: len(tokens)]
            for index, tokens in one.items()
        )
        for part in (
            blocks.take(3),
            blocks.spread(4),
            blocks.part(slice(1, None, 2)),
            *blocks.nested([2, 5]),
        ):
            check(part, opening)

    @pytest.mark.parametrize("size", [16, 48, 64])
    def test_keep_their_text_at_another_length(self, template: str, size: int) -> None:
        texts = [prose(4, i) for i in range(30)]
        blocks = build_blocks(texts, tokenizer_with(template), 32, separator="eos")
        cut = blocks.cut(size)
        check(cut, blocks.opening)
        assert cut.block_size == size
        for one, other in zip(text_of(cut), text_of(blocks), strict=True):
            assert np.array_equal(one, other[: len(one)])

    def test_are_the_same_from_files(self, template: str, tmp_path: Path) -> None:
        write_files(tmp_path / "text", 40)
        tokenizer = tokenizer_with(template)
        opening = opening_tokens(tokenizer, "auto", 32)
        whole = load_text(
            ["text"], tokenizer, tmp_path / "cache", tmp_path, block_size=32, separator="eos"
        )
        check(whole, opening)
        texts = [file.read_text() for file in sorted((tmp_path / "text").iterdir())]
        assert np.array_equal(
            whole.tokens, build_blocks(texts, tokenizer, 32, separator="eos").tokens
        )
        check(
            load_text(
                ["text"],
                tokenizer,
                tmp_path / "cache",
                tmp_path,
                block_size=32,
                separator="eos",
                max_tokens=640,
            ),
            opening,
        )
        # The setting is part of the cache's key
        plain = load_text(
            ["text"],
            tokenizer,
            tmp_path / "cache",
            tmp_path,
            block_size=32,
            separator="eos",
            bos=False,
        )
        assert not np.isin(plain.tokens, opening).any()
        check(
            load_text(
                ["text"], tokenizer, tmp_path / "cache", tmp_path, block_size=32, separator="eos"
            ),
            opening,
        )

    def test_are_those_of_training_and_held_out_text(self, template: str, tmp_path: Path) -> None:
        config = sixty_documents(tmp_path).model_copy(update={"separator": "eos"})
        tokenizer = tokenizer_with(template)
        opening = opening_tokens(tokenizer, "auto", config.block_size)
        folder = cache_split(config, tokenizer, tmp_path / "cache", tmp_path)
        train, heldout = read_split(folder, config)
        check(train, opening)
        check(heldout, opening)
        alone = load_heldout(config, tokenizer, tmp_path / "alone", tmp_path)
        check(alone, opening)
        assert np.array_equal(alone.tokens, heldout.tokens)

    def test_may_be_ruler_samples(self, template: str) -> None:
        tokenizer = tokenizer_with(template)
        opening = opening_tokens(tokenizer, "auto", 512)
        lengths = (200, 512 - len(opening))
        limits = boundaries(tokenizer, "eos", "auto", 512)
        samples = RulerBlocks(
            tokenizer, 512, ("niah_single_1",), lengths, True, 0, Material(), limits
        )
        check(samples.held_out(4), opening)
        learned = np.stack([samples.block(number)[1] for number in range(4)])
        assert learned[:, len(opening)].all()


class TestRestart:
    def test_resumes_within_a_block(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("spkv_nas.data.sources.TOKENIZE_BATCH", 1)
        write_files(tmp_path / "text", 40)

        def tokenizer(patience: int = 10**9) -> Any:
            result = bytes_tokenizer(patience)
            result.bos_token_id = 300
            return result

        def load(folder: str, patience: int = 10**9) -> TokenBlocks:
            return load_text(
                ["text"], tokenizer(patience), tmp_path / folder, tmp_path, block_size=48, bos=True
            )

        with pytest.raises(KeyboardInterrupt):
            load("cache", 20)
        resumed, undisturbed = load("cache"), load("undisturbed")
        check(resumed, (300,))
        assert np.array_equal(resumed.tokens, undisturbed.tokens)
        assert np.array_equal(resumed.document, undisturbed.document)


class TestRecipe:
    def test_hashes_the_key_only_where_it_is_set(self, recipe: Recipe) -> None:
        data = recipe.model_dump(mode="json")
        assert "bos" not in data["data"]
        for bos, same in (("auto", True), (False, False), (True, False)):
            changed = Recipe.parse({**data, "data": {**data["data"], "bos": bos}}, Path(), "recipe")
            assert (changed.content_hash() == recipe.content_hash()) == same
            assert changed.data.bos == bos

    def test_refuses_another_value(self) -> None:
        with pytest.raises(ValueError, match="bos"):
            DataConfig(sources=["stdlib"], bos="yes")  # type: ignore[arg-type]
