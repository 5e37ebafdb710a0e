"""Test copying weights between folders: as files, in their original shards, and never twice in memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import change_config
from helpers import gated, tiny_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.manifest import read_manifest
from spkv_nas.model import weight_files
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.export import verify_export
from spkv_nas.model.export.export import export
from spkv_nas.model.weight_files import FILE, INDEX
from spkv_nas.stages.export.options import ExportOptions
from spkv_nas.stages.export.stage import export as export_stage

MIXED = Layout(("GL", "LL", "LG", "GG"), 6)
LAYERWISE = Layout(("GG", "LL", "LL", "GG"), 6)


def write(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase, size: str = "20KB") -> Path:
    """Write a checkpoint in shards, as other tools do."""
    model.save_pretrained(folder, max_shard_size=size)
    tokenizer.save_pretrained(folder)
    return folder


def weights(folder: Path) -> dict[str, Path]:
    """Return the weight files by name, including the index."""
    return {file.name: file for file in folder.iterdir() if ".safetensors" in file.name}


@pytest.fixture
def dense(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    return write(tiny_model(vocab_size=300), tmp_path / "dense", tiny_tokenizer)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of exports in a fresh process."""
    monkeypatch.setattr(verify_export, "check", lambda *_: 0.0)


class TestExport:
    @pytest.mark.slow
    @pytest.mark.parametrize("layout", [MIXED, LAYERWISE], ids=["custom", "native"])
    def test_files_are_copied_unchanged(self, layout: Layout, dense: Path, tmp_path: Path) -> None:
        form = export(layout, dense, tmp_path / "out").form
        assert re.search("its weights were (copied|cloned) as they are", form)
        before, after = weights(dense), weights(tmp_path / "out")
        assert before.keys() == after.keys() > {INDEX}
        assert all(after[name].read_bytes() == before[name].read_bytes() for name in before)
        assert not any(after[name].samefile(before[name]) for name in before)
        assert read_manifest(tmp_path / "out").keys() > before.keys()
        load(tmp_path / "out")

    @pytest.mark.usefixtures("unchecked")
    def test_hard_links_on_request(self, dense: Path, tmp_path: Path) -> None:
        LAYERWISE.write(tmp_path / "layout.yaml")
        options = ExportOptions(layout=tmp_path / "layout.yaml", model=str(dense), out=tmp_path / "out", link=True)
        assert "its weights were linked as they are" in export_stage(options).form
        before, after = weights(dense), weights(tmp_path / "out")
        assert all(after[name].samefile(before[name]) for name in before)
        assert not (tmp_path / "out" / "config.json").samefile(dense / "config.json")
        load(tmp_path / "out")

    def test_file_systems_without_links(self, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", refuse)
        with pytest.raises(UserError, match=r"cannot link .*cross-device link\nleave --link out"):
            export(MIXED, dense, tmp_path / "out", link=True)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("clones", [True, False])
    def test_clones_where_supported(
        self, clones: bool, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def clone(original: Path, new: Path) -> bool:
            if clones:
                new.write_bytes(original.read_bytes())
            return clones

        monkeypatch.setattr(weight_files, "_clone", clone)
        assert f"its weights were {'cloned' if clones else 'copied'} as" in export(MIXED, dense, tmp_path / "out").form
        load(tmp_path / "out")

    @pytest.mark.usefixtures("unchecked")
    def test_a_model_beyond_memory(self, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Weights stay in their files; a config larger than these files is refused."""
        model, _ = load(dense)
        enough = max(4 * sum(p.numel() for p in part.parameters()) for part in verify_export.parts(model))
        monkeypatch.setattr("spkv_nas.base.memory.available_bytes", lambda *_: enough)
        with pytest.raises(UserError, match="of memory"):
            load(dense)
        export(LAYERWISE, dense, tmp_path / "out")
        change_config(dense, lambda config: config.update(vocab_size=10**12))
        with pytest.raises(UserError, match="are too small"):
            export(LAYERWISE, dense, tmp_path / "more")

    def test_a_disk_that_is_full(self, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(weight_files, "_clone", lambda *_: False)
        monkeypatch.setattr("shutil.copyfile", fail)
        with pytest.raises(UserError, match="No space left on device\nfree space"):
            export(MIXED, dense, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_gates_are_left_out(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        """Weights are rewritten, with no file larger than before."""
        source = write(gated(), tmp_path / "gated", tiny_tokenizer)
        assert "its weights were written anew" in export(MIXED, source, tmp_path / "out").form
        before, after = weights(source), weights(tmp_path / "out")
        assert INDEX in after
        largest = [max(file.stat().st_size for file in files.values()) for files in (before, after)]
        assert largest[1] < largest[0] + 1000  # names take some
        names = json.loads(after[INDEX].read_text())["weight_map"]
        assert not any("utility_predictor" in name for name in names)
        assert {file for file in after if file != INDEX} == set(names.values())
        load(tmp_path / "out")

    @pytest.mark.usefixtures("unchecked")
    def test_a_file_with_another_name(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        """The config of the export names the file that exists."""
        source = write(tiny_model(vocab_size=300), tmp_path / "named", tiny_tokenizer, "1GB")
        (source / FILE).rename(source / "ours.safetensors")
        change_config(source, lambda config: config.update(transformers_weights="ours.safetensors"))
        assert "its weights were written anew" in export(MIXED, source, tmp_path / "out").form
        assert weights(tmp_path / "out").keys() == {FILE}
        load(tmp_path / "out")


def test_tied_tensors_that_are_stored_twice(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """Some tools write the tied output embedding: the file stays as it is."""
    source = write(tiny_model(vocab_size=300, tie_word_embeddings=True), tmp_path / "tied", tiny_tokenizer, "1GB")
    content = load_file(source / FILE)
    save_file(
        {**content, "lm_head.weight": content["model.embed_tokens.weight"].clone()}, source / FILE, {"format": "pt"}
    )
    assert "as they are" in export(MIXED, source, tmp_path / "out").form
    assert "lm_head.weight" in load_file(tmp_path / "out" / FILE)
    load(tmp_path / "out")


PROGRAM = """
import sys
from pathlib import Path
from transformers.models.llama import modeling_llama
from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.export import export, verify_export
verify_export.check = lambda *_: 0.0
for kind in ("dense", "gated"):
    print(kind, flush=True)
    sys.stdin.readline()
    export.export(Layout(("G", "L") * 2, 8), kind, Path(f"{kind}-out"))
"""


def private(process: int) -> int:
    """Return the bytes of a process's memory that no file backs."""
    (kib,) = re.findall(r"RssAnon:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return int(kib) << 10


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_weights_are_not_held_in_memory(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """An export of 90 MB in bfloat16 needs the memory of one layer in float32."""
    sizes = {"vocab_size": 300, "hidden_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model(**sizes, intermediate_size=7000).to(torch.bfloat16)
    save(model, tiny_tokenizer, tmp_path / "dense")
    attach_gates(model)
    save(model, tiny_tokenizer, tmp_path / "gated")
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    largest = max(2 * sum(p.numel() * p.itemsize for p in part.parameters()) for part in verify_export.parts(model))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for kind in ("dense", "gated"):
            assert process.stdout.readline() == f"{kind}\n"
            before = peak = private(process.pid)
            process.stdin.write("\n")
            process.stdin.flush()
            while not (tmp_path / f"{kind}-out").exists() and process.poll() is None:
                peak = max(peak, private(process.pid))
                time.sleep(0.001)
            assert largest < peak - before < largest + size / 4
    assert process.returncode == 0
