"""Test the model card of an export: its metadata, what it says of layout, memory and use, and that it may be edited."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_cases import change_config
from helpers import tiny_model
from huggingface_hub.repocard import metadata_load
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT
from spkv_nas.model.checkpoint import load
from spkv_nas.model.export import verify_export
from spkv_nas.model.export.export import export
from spkv_nas.stages.commands import Result
from spkv_nas.stages.export import run
from spkv_nas.stages.options.export import ExportOptions

MIXED = Layout(("GL", "LM", "LL", "GG"), windows={"L": 6, "M": 20}, sinks=2)
BASE = "---\nlicense: other\nlicense_name: mine\nbase_model: org/base\nlanguage: en\n---\n# Their card\n"


@pytest.fixture
def dense(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write a checkpoint as transformers does, without a manifest."""
    for part in (tiny_model(vocab_size=300), tiny_tokenizer):
        part.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_the_card_of_a_custom_model_type(dense: Path, tmp_path: Path) -> None:
    (dense / "README.md").write_text(BASE)
    export(MIXED, dense, tmp_path / "out", evidence=["NLL: +1 %."])
    text = (tmp_path / "out/README.md").read_text()
    assert metadata_load(tmp_path / "out/README.md") == {
        "base_model": "org/base",
        "library_name": "transformers",
        "license": "other",
        "license_name": "mine",
        "pipeline_tag": "text-generation",
        "tags": ["hybrid-attention", "sliding-window-attention", "spkv-nas"],
    }
    assert (
        "`dense` (base model [org/base](https://huggingface.co/org/base)) with hybrid attention: 3 of 8 KV"
        in text
    )
    assert f"{MIXED.description}\n   0  GL  1\n   1  LM  0\n   2  LL  0\n   3  GG  2\n" in text
    assert (
        "- `M`: local head, sees the last 20 tokens, its own included, and the first 2 tokens"
        in text
    )
    assert "## Evaluation\n\n- NLL: +1 %.\n\n" in text
    assert "import spkv_nas" in text
    assert "vllm serve" not in text  # it refuses several sink tokens
    assert "Their card" not in text


@pytest.mark.parametrize(
    ("stated", "base"),
    [
        ("<script>alert(1)</script>", None),
        ("'org/base)\\n# x'", None),
        ("[org/base, org/other]", "org/base"),
    ],
)
def test_names_by_other_people_are_text(
    dense: Path, tmp_path: Path, stated: str, base: str | None
) -> None:
    """A card's HTML, or a second heading, came from names of models, folders and measurements."""
    model = dense.rename(tmp_path / "`<b>\n# x")
    (model / "README.md").write_text(f"---\nbase_model: {stated}\n---\n")
    export(MIXED, model, tmp_path / "out<script>\n# x", evidence=["NLL on <b>: +1 %."])
    card = next(tmp_path.glob("out*")) / "README.md"
    assert metadata_load(card).get("base_model") == base
    text = card.read_text()
    assert "<script>" not in text
    assert "<b>" not in text
    assert "\n# x" not in text


def test_memory_is_that_of_the_cache(dense: Path, tmp_path: Path) -> None:
    """Compute the sizes: of 8 heads, 2 keep all keys and 6 keep 6."""
    export(Layout(("GL", "LL", "LL", "GL"), 6), dense, tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    most = tiny_model().config.max_position_embeddings
    assert [float(share) for share in re.findall(r"([\d.]+) % \|$", text, re.MULTILINE)] == [
        round(100 * (2 * tokens + 6 * 6) / (8 * tokens), 1)
        for tokens in (most, 8_192, 32_768, 131_072)
    ]
    assert f"\\* more than the {most:,} tokens that the model was made for" in text
    assert "`vllm serve DIR`, with spkv-nas installed beside vLLM." in text
    assert "- Not measured for this card." in text


def test_the_card_of_a_native_architecture_may_be_edited(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # model/export/test_families.py is about it
    monkeypatch.setattr(verify_export, "check", lambda *_: 1e-7)
    change_config(dense, lambda config: config.update(_name_or_path="org/saved"))
    layout = Layout(("GG", "LL", "LL", "GG"), 6)
    export(layout, dense, tmp_path / "out")
    card = tmp_path / "out/README.md"
    text = card.read_text()
    assert "base_model: org/saved\n" in text
    assert 'from_pretrained("DIR")' in text
    assert "import spkv_nas" not in text
    assert "- When it was exported, over 70 tokens in a process of its own" in text
    card.write_text(f"{text}\nMore.\n")
    load(tmp_path / "out")
    assert Layout.read(tmp_path / "out/layout.yaml").content == layout.content


def test_a_folder_that_cannot_be_pushed_is_complete(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    MIXED.write("layout.yaml")
    options = ExportOptions(
        layout=Path("layout.yaml"), model=str(dense), out=Path("out"), push_to_hub="org/new"
    )
    results = run(options, SILENT)
    assert not isinstance(results, Result)
    assert next(results).value.target == "spkv"
    with pytest.raises(
        UserError, match=r"out is complete; push it later with: hf upload org/new out"
    ):
        next(results)
    load(tmp_path / "out")
    bare = run(replace(options, out=Path("bare"), push_to_hub=None, card=False), SILENT)
    assert isinstance(bare, Result)  # one JSON document, not a list
    assert not Path("bare/README.md").exists()
