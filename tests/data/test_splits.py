"""Test text: sources, a split by content that leaks nothing, tokenizers and token blocks."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from spkv_nas.base.errors import UserError
from spkv_nas.data import stdlib
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.data.config import SourceConfig
from spkv_nas.data.sources import Document, documents, heldout
from spkv_nas.data.splits import RULE, cache_split, load_heldout, read_split, train_tokenizer
from spkv_nas.data.tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, train_bpe
from spkv_nas.training.recipe import Recipe


def read(*sources: object, base: Path) -> list[Document]:
    return list(documents(sources, base))


class TestSources:
    def test_a_folder_gives_its_files_with_the_folder_as_domain(self, tmp_path: Path) -> None:
        for name in ("prose/b.txt", "prose/a.md", "code/c.py", "code/skip.bin"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"text of {name}")
        result = read(str(tmp_path), base=tmp_path)
        assert [(d.name, d.domain) for d in result] == [
            ("code/c.py", "code"),
            ("prose/a.md", "prose"),
            ("prose/b.txt", "prose"),
        ]

    def test_duplicates_and_empty_documents_are_left_out(self, tmp_path: Path) -> None:
        for name, text in (
            ("a.txt", "same"),
            ("b.txt", "same"),
            ("c.txt", " \n"),
            ("d.txt", "other"),
        ):
            (tmp_path / name).write_text(text)
        assert [d.text for d in read(".", base=tmp_path)] == ["same", "other"]

    def test_json_lines_and_parquet(self, tmp_path: Path) -> None:
        rows = [{"text": "one", "domain": "web"}, {"text": "two", "domain": None}]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pd.DataFrame({"body": ["three"], "kind": ["books"]}).to_parquet(tmp_path / "b.parquet")
        parquet = SourceConfig(path="b.parquet", text_field="body", domain_field="kind")
        result = read("a.jsonl", parquet, base=tmp_path)
        assert [(d.text, d.domain) for d in result] == [
            ("one", "web"),
            ("two", tmp_path.name),
            ("three", "books"),
        ]

    def test_the_recipe_can_say_the_domain_and_a_limit(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
        result = read(SourceConfig(path="a.jsonl", domain="mine", max_documents=2), base=tmp_path)
        assert [(d.text, d.domain) for d in result] == [("one", "mine"), ("two", "mine")]

    def test_errors_show_the_value(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"body": "one", "id": 3}\n')
        with pytest.raises(UserError, match="no field 'text'; its fields: body, id"):
            read("a.jsonl", base=tmp_path)
        with pytest.raises(UserError, match="not found"):
            read("missing", base=tmp_path)
        with pytest.raises(UserError, match="cannot load data set 'no/such-set'"):
            read(SourceConfig(dataset="no/such-set"), base=tmp_path)
        (tmp_path / "broken.parquet").write_bytes(b"not parquet")
        with pytest.raises(UserError, match="cannot read"):
            read("broken.parquet", base=tmp_path)

    def test_unreadable_files_are_counted_in_one_warning(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
        (tmp_path / "b.txt").write_text("fine")
        with pytest.warns(
            UserWarning, match=r"skipped 1 files .* a\.txt: it is UTF-16, UTF-32 or binary"
        ):
            assert len(read(str(tmp_path), base=tmp_path)) == 1

    @pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "b.parquet"])
    def test_a_byte_order_mark_is_no_text(self, name: str, tmp_path: Path) -> None:
        """The mark that editors on Windows write became part of a text's first word."""
        (tmp_path / "a.txt").write_text("one", encoding="utf-8-sig")
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": "\ufeffone"}), encoding="utf-8-sig")
        pd.DataFrame({"text": ["\ufeffone"]}).to_parquet(tmp_path / "b.parquet")
        assert [document.text for document in read(name, base=tmp_path)] == ["one"]

    @pytest.mark.parametrize(
        "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]
    )
    def test_text_in_another_encoding_is_refused(self, encoding: str, tmp_path: Path) -> None:
        for name in ("a.txt", "a.jsonl"):
            (tmp_path / name).write_text('{"text": "one"}', encoding=encoding)
            with pytest.raises(
                UserError, match=rf"{name}.*it is UTF-16, UTF-32 or binary: save it as UTF-8"
            ):
                read(name, base=tmp_path)

    def test_a_domain_that_is_a_number(self, tmp_path: Path) -> None:
        """Domain 0 was taken for no domain."""
        (tmp_path / "a.jsonl").write_text(
            '{"text": "one", "domain": 0}\n{"text": "two", "domain": 1}\n'
        )
        assert [document.domain for document in read("a.jsonl", base=tmp_path)] == ["0", "1"]

    def test_texts_at_hand_take_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``path: stdlib`` with options named a folder that does not exist."""
        first = list(islice(stdlib.files(), 20))
        monkeypatch.setattr(stdlib, "files", lambda: first)
        result = read(
            SourceConfig(path="stdlib", domain="mine", max_documents=2), base=Path("/nowhere")
        )
        assert {document.domain for document in result} == {"mine"}
        assert len({document.name for document in result}) == 2

    def test_options_of_data_sets_are_refused_for_files(self) -> None:
        with pytest.raises(ValueError, match="'name' and 'split' belong to a 'dataset'"):
            SourceConfig(path="a.txt", split="test")

    @pytest.mark.slow
    def test_the_standard_library_has_its_domains(self) -> None:
        result = [(domain, name) for _, domain, name in stdlib.texts()]
        assert {"code", "docs"} <= {domain for domain, _ in result}
        assert ("code", "argparse.py") in result
        assert not [name for _, name in result if "site-packages" in name]

    @pytest.mark.parametrize(
        ("path", "domain"),
        [
            ("json/decoder.py", "code"),
            ("test/test_os.py", "tests"),
            ("encodings/cp1252.py", "tables"),
        ],
    )
    def test_domains_by_path(self, path: str, domain: str) -> None:
        assert stdlib.domain(Path(path)) == domain


class TestSplit:
    def test_a_document_never_moves(self) -> None:
        texts = [f"document {i}" for i in range(2000)]
        small = {t for t in texts if heldout(Document(t, "a", "x"), 0.1)}
        assert small == {t for t in reversed(texts) if heldout(Document(t, "other", "y"), 0.1)}
        assert small < {t for t in texts if heldout(Document(t, "a", "x"), 0.2)}
        assert 0.07 < len(small) / 2000 < 0.13

    def test_held_out_documents_do_not_leak(
        self, recipe: Recipe, recipe_file: Path, tmp_path: Path
    ) -> None:
        tokenizer = train_tokenizer(recipe.data, 280, recipe_file.parent)
        folder = cache_split(recipe.data, tokenizer, tmp_path / "cache", recipe_file.parent)
        train, kept_out = read_split(folder, recipe.data)
        assert not {d.id for d in train.documents} & {d.id for d in kept_out.documents}
        assert train.domains == kept_out.domains == ("code", "prose")
        again = load_heldout(recipe.data, tokenizer, tmp_path / "cache", recipe_file.parent)
        assert np.array_equal(again.tokens, kept_out.tokens)

    def test_a_damaged_cache_is_named(
        self, recipe: Recipe, recipe_file: Path, tmp_path: Path
    ) -> None:
        """A truncated cache file is a user error that names it."""
        tokenizer = train_tokenizer(recipe.data, 280, recipe_file.parent)
        folder = cache_split(recipe.data, tokenizer, tmp_path / "cache", recipe_file.parent)
        file = folder / f"heldout-{RULE}-1600-{recipe.data.block_size}.npz"
        file.write_bytes(file.read_bytes()[:-50])
        with pytest.raises(
            UserError, match=r"1600-32\.npz is damaged: .*\nremove it: the text is then"
        ):
            read_split(folder, recipe.data)

    def test_the_tokenizer_never_sees_held_out_text(
        self, recipe: Recipe, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[str] = []
        monkeypatch.setattr("spkv_nas.data.splits.train_bpe", lambda texts, *_: seen.extend(texts))
        train_tokenizer(recipe.data, 280, recipe_file.parent)
        kept_out = [
            d
            for d in documents(recipe.data.sources, recipe_file.parent)
            if heldout(d, recipe.data.heldout)
        ]
        assert kept_out
        assert not {d.text for d in kept_out} & set(seen)


class TestTokenizer:
    def test_the_same_texts_give_the_same_tokenizer(self) -> None:
        texts = ["the quick brown fox", "jumps over the lazy dog"] * 3
        one, two = train_bpe(texts, 270), train_bpe(texts, 270)
        assert one.get_vocab() == two.get_vocab()

    def test_any_text_survives(self) -> None:
        tokenizer = train_bpe(["plain words"], 270)
        text = "tabs\tünïcode 漢字 \x00 end"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert tokenizer.eos_token == END_OF_TEXT

    def test_a_bos_token_begins_every_text(self, tmp_path: Path) -> None:
        """The saved tokenizer and blocks begin with BOS, once, and the text behind it is encoded as without it."""
        texts = ["plain words"] * 3
        plain, opened = train_bpe(texts, 280), train_bpe(texts, 281, bos=True)
        opened.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizer.bos_token == BEGIN_OF_TEXT
        text = f"words{END_OF_TEXT}plain"
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in ids[1:]
        assert tokenizer.decode(ids[1:]) == plain.decode(plain(text)["input_ids"])
        assert len(ids[1:]) == len(plain(text)["input_ids"])
        blocks = build_blocks(text * 9, tokenizer, 8)
        assert set(blocks.tokens[:, 0].tolist()) == {tokenizer.bos_token_id}
        assert tokenizer.bos_token_id not in blocks.tokens[:, 1:]


class TestBlocks:
    def documents(self, *texts: str) -> list[Document]:
        return [Document(text, f"d{i % 2}", f"n{i}") for i, text in enumerate(texts)]

    def test_every_token_has_its_document(self, tiny_tokenizer: object) -> None:
        blocks = build_blocks(self.documents("abc", "de", "fgh"), tiny_tokenizer, 4)  # type: ignore[arg-type]
        # With separators; "de" fills no block
        assert blocks.document.tolist() == [
            [0, 0, 0, 0],
            [2, 2, 2, 2],
        ]
        assert blocks.domains == ("d0", "d1")
        short = build_blocks(self.documents("ab", "cd", "abcdef", "ef"), tiny_tokenizer, 4)  # type: ignore[arg-type]
        assert short.document.tolist() == [[0, 0, 0, 1], [2, 2, 2, 2], [1, 1, 2, 2]]

    def test_strings_are_documents(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        blocks = build_blocks(("abc", "de"), tiny_tokenizer, 4)
        assert blocks.document.tolist() == [[0, 0, 0, 0]]
        assert [(d.name, d.domain) for d in blocks.documents] == [
            ("text 1", "text"),
            ("text 2", "text"),
        ]
        assert build_blocks("abc", tiny_tokenizer, 4).tokens.tolist() == blocks.tokens.tolist()

    def test_what_no_tokenizer_encodes(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        """Lone surrogates, bytes and missing values failed inside the tokenizer."""
        blocks = build_blocks(["ab\ud800", "de"], tiny_tokenizer, 4)
        assert (
            blocks.tokens.tolist()
            == build_blocks(["ab\ufffd\ufffd\ufffd", "de"], tiny_tokenizer, 4).tokens.tolist()
        )
        for texts in (
            ["abc", None],
            ["abc", b"de"],
            ["abc", Document(3, "d", "n")],
            ["abc", ["de"]],
        ):  # type: ignore[arg-type]
            with pytest.raises(UserError, match=r"text 2 is of type \w+: expected a string"):
                build_blocks(texts, tiny_tokenizer, 4)  # type: ignore[arg-type]
        for text in (b"abcd", {"train": "abcd"}):
            with pytest.raises(UserError, match=r"text 1 is of type (bytes|dict)"):
                build_blocks(text, tiny_tokenizer, 4)  # type: ignore[arg-type]

    def test_a_long_string_is_cut(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        blocks = build_blocks(["the quick brown fox\n" * 2000], tiny_tokenizer, 64)
        assert len(blocks.documents) == 5
        assert {d.name for d in blocks.documents} >= {"text 1, piece 1", "text 1, piece 5"}

    def test_cut_to_another_size(self, blocks: TokenBlocks) -> None:
        other = blocks.cut(100)
        assert other.tokens.shape == other.document.shape == (2, 100)
        assert other.tokens.ravel().tolist() == blocks.tokens.ravel()[:200].tolist()
        assert other.document.ravel().tolist() == blocks.document.ravel()[:200].tolist()
        assert other.cut(25).num_blocks == 8

    def test_too_little_text(self, tiny_tokenizer: object) -> None:
        with pytest.raises(UserError, match="empty"):
            build_blocks([], tiny_tokenizer, 4)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="4 tokens, fewer than one block of 64"):
            build_blocks(self.documents("abc"), tiny_tokenizer, 64)  # type: ignore[arg-type]
