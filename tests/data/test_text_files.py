"""Test what ``--data`` reads: compressed files, named columns, chats, saved data sets, linked folders; and refusals."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from spkv_nas.base.errors import UserError
from spkv_nas.data import readers, sources, text_files
from spkv_nas.data.blocks import build_blocks
from spkv_nas.data.config import SourceConfig
from spkv_nas.data.splits import load_text
from spkv_nas.data.tokenizer import END_OF_TEXT, Tokenizer, train_bpe

TEXTS = [
    f"{number} the cat sat on the mat and ran over {number * number} hills" for number in range(24)
]
CHATS = [
    [
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"It is {END_OF_TEXT}{number}."},
    ]
    for number in range(24)
]
TEMPLATE = "{% for m in messages %}<|endoftext|>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def zstd(content: bytes) -> bytes:
    """Return a content as two zstd frames, as several programs write them."""
    half = len(content) // 2
    frames = []
    for part in (content[:half], content[half:]):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(part)
        frames.append(sink.getvalue().to_pybytes())
    return b"".join(frames)


PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def lines(key: str, values: list[Any]) -> bytes:
    return "".join(
        json.dumps({"id": number, key: value}) + "\n" for number, value in enumerate(values)
    ).encode()


def read(*paths: Path | str) -> list[str]:
    return [document.text for document in sources.documents([str(path) for path in paths], Path())]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = train_bpe([*TEXTS, "user: assistant: What is it? It is"], 300, bos=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("pack", PACK)
def test_compressed_files_hold_the_same_text(tmp_path: Path, pack: str) -> None:
    table, text = tmp_path / f"rows.JSONL{pack}", tmp_path / f"story.txt{pack.upper()}"
    table.write_bytes(PACK[pack](lines("text", TEXTS)))
    text.write_bytes(PACK[pack]("\ufeff".encode() + "été\r\nand autumn".encode()))
    assert read(table) == TEXTS
    assert read(text) == ["été\nand autumn"]
    assert {*read(tmp_path)} == {"été\nand autumn", *TEXTS}
    assert not readers.check_source(str(tmp_path), Path())
    texts = readers.open_source(str(table), Path()).texts(8192)
    assert sum(text.size for text in texts) == table.stat().st_size, (
        "sizes add up to the file's, for progress"
    )


@pytest.mark.parametrize("pack", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "changed", "plain"])
def test_damaged_compressed_files_are_refused_before_work(
    tmp_path: Path, pack: str, damage: str
) -> None:
    packed = PACK[pack](lines("text", TEXTS))
    content = {
        "cut": packed[:40],
        "changed": packed[:20] + bytes(20) + packed[40:],
        "plain": lines("text", TEXTS),
    }
    file = tmp_path / f"rows.jsonl{pack}"
    file.write_bytes(content[damage])
    with pytest.raises(
        UserError, match=r"cannot read .*rows.jsonl.*: cannot unpack it|not valid JSON"
    ):
        readers.check_source(str(file), Path())


@pytest.mark.parametrize("pack", [".gz", ".zst"])
def test_what_unpacks_to_far_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: str
) -> None:
    monkeypatch.setattr(text_files, "_MAX_UNPACKED", 1 << 16)
    file = tmp_path / f"bomb.jsonl{pack}"
    file.write_bytes(PACK[pack](b'{"text": "' + b"a" * (1 << 22) + b'"}\n'))
    with pytest.raises(
        UserError, match=r"bomb.jsonl.* unpack to more than .*: unpack it to read it"
    ):
        read(file)
    monkeypatch.setattr(readers, "_MAX_LINE", 1 << 10)
    (tmp_path / "long.jsonl").write_bytes(b'{"text": "' + b"a" * (1 << 12) + b'"}\n')
    with pytest.raises(UserError, match=r"long.jsonl, line 1: a line of more than"):
        read(tmp_path / "long.jsonl")


def test_a_column_is_named_after_the_path(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines("story", TEXTS))
    table = pyarrow.table({"story": TEXTS, "other": [1] * len(TEXTS)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    for file in ("rows.jsonl", "rows.parquet"):
        assert read(f"{tmp_path / file}:column=story") == TEXTS
        with pytest.raises(
            UserError,
            match=r"its fields: .*story.*\n.*--data PATH:column=FIELD\n.*text_field: FIELD.*\Z",
        ):
            readers.check_source(str(tmp_path / file), Path())
    assert read(f"{tmp_path}:column=story") == TEXTS, "of all tables of a folder"
    with pytest.raises(UserError, match="no field 'title'"):
        readers.check_source(f"{tmp_path}:column=title", Path())
    with pytest.raises(UserError, match=r"text source not found: .*gone.jsonl$"):
        readers.check_source(f"{tmp_path / 'gone.jsonl'}:column=story", Path())


@pytest.mark.parametrize("named", [False, True])
def test_chats_are_encoded_by_the_models_template(
    tmp_path: Path, tokenizer: Tokenizer, named: bool
) -> None:
    """Special tokens of the template are special, those that a message spells are text, and no chat is divided."""
    file = tmp_path / "chats.jsonl"
    file.write_bytes(lines("turns" if named else "messages", CHATS))
    source = f"{file}:column=turns" if named else str(file)
    assert readers.check_source(source, Path())
    for documents in ("joined", "separate"):
        blocks = load_text(
            [source], tokenizer, tmp_path / "cache", Path(), block_size=64, documents=documents
        )
        assert len(blocks.documents) == len(CHATS)
        assert np.array_equal(
            blocks.tokens, build_blocks(CHATS, tokenizer, 64, documents=documents).tokens
        )
    [only] = sources.encode_documents(
        [*sources.as_documents([{"messages": CHATS[7]}], 64)], tokenizer
    )
    expected = f"{END_OF_TEXT}user: What is 7?\n{END_OF_TEXT}assistant: It is {END_OF_TEXT}7.\n"
    assert tokenizer.decode(only) == expected
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    assert (only == end).sum() == 2, "the template's, but not that in the message"


def test_a_template_that_writes_what_begins_a_text_does_so_once(tokenizer: Tokenizer) -> None:
    tokenizer = train_bpe(TEXTS, 300, bos=True)
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    blocks = build_blocks(CHATS, tokenizer, 64, documents="separate")
    (opening,) = blocks.opening
    assert (blocks.tokens[:, 0] == opening).all()
    assert (blocks.tokens[:, 1] != opening).all()


def test_chats_without_a_template_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = train_bpe(TEXTS, 300)
    with pytest.raises(
        UserError, match="text 1 holds chats, and the model's tokenizer has no chat template"
    ):
        build_blocks(CHATS, plain, 64)
    tokenizer.chat_template, template = (
        "{{ raise_exception('roles must alternate') }}",
        tokenizer.chat_template,
    )
    try:
        with pytest.raises(
            UserError, match=r"text 1: the model's chat template refuses it: .*roles must alternate"
        ):
            build_blocks(CHATS, tokenizer, 64)
    finally:
        tokenizer.chat_template = template
    with pytest.raises(UserError, match="text 1 is a chat: training a tokenizer needs texts"):
        list(sources.only_texts(sources.as_documents(CHATS, 64), "training a tokenizer"))


def test_saved_data_sets_are_read(tmp_path: Path) -> None:
    """As ``Dataset.save_to_disk`` and ``DatasetDict.save_to_disk`` write them, in several files."""
    import datasets

    half = len(TEXTS) // 2
    parts = [
        datasets.Dataset.from_list([{"text": text, "n": 1} for text in part])
        for part in (TEXTS[:half], TEXTS[half:])
    ]
    datasets.disable_progress_bars()
    parts[0].save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict(train=parts[0], test=parts[1]).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "one") == TEXTS[:half]
    assert {*read(tmp_path / "two")} == {*TEXTS}
    assert read(tmp_path / "two/test") == TEXTS[half:]
    # Arrow's file format, as other programs write it
    table = pyarrow.table({"body": TEXTS})
    with (
        pyarrow.OSFile(str(tmp_path / "file.arrow"), "wb") as sink,
        pyarrow.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table, 5)
    assert read(f"{tmp_path / 'file.arrow'}:column=body") == TEXTS
    (tmp_path / "bad.arrow").write_bytes(b"no arrow file")
    with pytest.raises(UserError, match=r"cannot read .*bad.arrow"):
        readers.check_source(str(tmp_path / "bad.arrow"), Path())


def test_folders_say_what_is_not_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text(" ".join(TEXTS))
    (tmp_path / "b.csv").write_text("x" * 3000)
    (tmp_path / "c.csv.gz").write_text("y" * 10)
    (tmp_path / ".hidden").write_text("z")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing.jsonl")
    with pytest.warns(UserWarning, match="not read: ") as warned:
        load_text([str(tmp_path)], tokenizer, tmp_path / "cache", Path(), block_size=32)
    [message] = {str(warning.message) for warning in warned}
    assert "1 .csv (2.93 KiB), 1 .csv.gz (10 B)" in message
    assert "1 links to nothing or folders that cannot be opened, such as gone.jsonl" in message
    assert ".hidden" not in message


def test_a_folder_with_a_readme_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# My data set\n" + "It has many words. " * 99)
    with pytest.raises(UserError, match=r"the only text is README.md: name it to measure on it"):
        readers.check_source(str(tmp_path), Path())
    (tmp_path / "train.json").write_text("[]")
    with pytest.raises(UserError, match=r"not read: 1 .json \(2 B\)"):
        readers.check_source(str(tmp_path), Path())
    assert len(read(tmp_path / "README.md")) == 1


@pytest.mark.parametrize("pack", PACK)
def test_the_readme_of_a_folder_of_data_is_left_out_with_a_word(tmp_path: Path, pack: str) -> None:
    (tmp_path / "README.md").write_text("# My data set\n" + "It has many words. " * 99)
    (tmp_path / "data").mkdir()
    (tmp_path / f"data/rows.jsonl{pack}").write_bytes(PACK[pack](lines("text", TEXTS)))
    opened = readers.open_source(str(tmp_path), Path())
    assert isinstance(opened, readers.Files)
    assert read(tmp_path) == TEXTS
    assert f"not read: README.md, which describes 1 .jsonl{pack} (" in str(opened.note)
    (tmp_path / "guide.md").write_text("Among pages, a README is one of them.")
    assert len(read(tmp_path)) == len(TEXTS) + 2


@pytest.mark.parametrize(
    "name", ["a.json", "a.csv", "a.parquet.gz", "a.tar.gz", "a.zip", "a.pdf", "a.safetensors"]
)
def test_files_of_other_formats_are_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'[{"text": "a"}]')
    with pytest.raises(
        UserError, match=rf"cannot read .*{name}.*(unpack|convert|write|give)"
    ) as caught:
        readers.check_source(str(tmp_path / name), Path())
    assert str(caught.value).count("\n") == 0
    with pytest.raises(UserError, match=r"no .txt .* files in .*: not read: 1 "):
        readers.check_source(str(tmp_path), Path())


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    (data / "sub").mkdir(parents=True)
    elsewhere.mkdir()
    (data / "a.txt").write_text(TEXTS[0])
    (elsewhere / "b.txt").write_text(TEXTS[1])
    (data / "linked").symlink_to(elsewhere)
    (data / "linked again").symlink_to(elsewhere)
    (data / "sub/loop").symlink_to(data)
    (elsewhere / "back").symlink_to(data)
    (data / "c.txt").symlink_to(elsewhere / "b.txt")
    assert sorted(read(data)) == TEXTS[:2]
    assert len(text_files.find(data).readable) == 3


def test_folders_without_permission_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0])

    def walk(folder: Path, onerror: Callable[[OSError], None], *, followlinks: bool) -> Any:
        onerror(PermissionError(13, "Permission denied", str(folder / "secret")))
        yield str(folder), [], ["a.txt"]

    monkeypatch.setattr(os, "walk", walk)
    note = text_files.find(tmp_path).note
    assert note is not None
    assert note.endswith("such as secret")


def test_the_state_of_linked_files_is_part_of_the_identity(tmp_path: Path) -> None:
    """A text that changed behind a link is read again."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/a.txt").write_text(TEXTS[0])
    before = readers.open_source(str(tmp_path / "data"), Path()).identity
    (tmp_path / "elsewhere/a.txt").write_text(TEXTS[0] + TEXTS[1])
    assert readers.open_source(SourceConfig(path=str(tmp_path / "data")), Path()).identity != before
