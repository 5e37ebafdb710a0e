"""Test copying models between folders: weights as files, in their original shards, and the files beside them."""

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
from helpers import equal_up_to_rounding, gated, logits, tiny_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.manifest import read_manifest
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import check_savable, load, load_tokenizer, save
from spkv_nas.model.export import verify_export
from spkv_nas.model.export.export import export
from spkv_nas.model.source import check_checkpoint
from spkv_nas.model.weight_files import FILE, INDEX
from spkv_nas.stages.export import export as export_stage
from spkv_nas.stages.options.export import ExportOptions

MIXED = Layout(("GL", "LL", "LG", "GG"), 6)
LAYERWISE = Layout(("GG", "LL", "LL", "GG"), 6)


def write(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase, size: str = "20KB"
) -> Path:
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
        assert re.search("its weights were copied as they are", form)
        before, after = weights(dense), weights(tmp_path / "out")
        assert before.keys() == after.keys() > {INDEX}
        assert all(after[name].read_bytes() == before[name].read_bytes() for name in before)
        assert not any(after[name].samefile(before[name]) for name in before)
        assert read_manifest(tmp_path / "out").keys() > before.keys()
        load(tmp_path / "out")

    @pytest.mark.usefixtures("unchecked")
    def test_hard_links_on_request(self, dense: Path, tmp_path: Path) -> None:
        LAYERWISE.write(tmp_path / "layout.yaml")
        options = ExportOptions(
            layout=tmp_path / "layout.yaml", model=str(dense), out=tmp_path / "out", link=True
        )
        assert "its weights were linked as they are" in export_stage(options).form
        before, after = weights(dense), weights(tmp_path / "out")
        assert all(after[name].samefile(before[name]) for name in before)
        assert not (tmp_path / "out" / "config.json").samefile(dense / "config.json")
        load(tmp_path / "out")

    def test_file_systems_without_links(
        self, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", refuse)
        with pytest.raises(UserError, match=r"cannot link .*cross-device link\nleave --link out"):
            export(MIXED, dense, tmp_path / "out", link=True)
        assert not (tmp_path / "out").exists()

    @pytest.mark.usefixtures("unchecked")
    def test_a_model_beyond_memory(
        self, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Weights stay in their files; a config larger than these files is refused."""
        model, _ = load(dense)
        enough = max(
            4 * sum(p.numel() for p in part.parameters())
            for part in verify_export.plain_logits.parts(model)
        )
        monkeypatch.setattr("spkv_nas.base.memory.available_bytes", lambda *_: enough)
        with pytest.raises(UserError, match="of memory"):
            load(dense)
        export(LAYERWISE, dense, tmp_path / "out")
        change_config(dense, lambda config: config.update(vocab_size=10**12))
        with pytest.raises(UserError, match="are too small"):
            export(LAYERWISE, dense, tmp_path / "more")

    def test_a_disk_that_is_full(
        self, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("shutil.copyfile", fail)
        with pytest.raises(UserError, match="No space left on device\nfree space"):
            export(MIXED, dense, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_gates_are_left_out(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
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
    def test_a_file_with_another_name(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        source = write(tiny_model(vocab_size=300), tmp_path / "named", tiny_tokenizer, "1GB")
        (source / FILE).rename(source / "ours.safetensors")
        change_config(source, lambda config: config.update(transformers_weights="ours.safetensors"))
        assert "its weights were written anew" in export(MIXED, source, tmp_path / "out").form
        assert weights(tmp_path / "out").keys() == {FILE}
        load(tmp_path / "out")
        change_config(
            source, lambda config: config.update(transformers_weights="../ours.safetensors")
        )
        with pytest.raises(
            UserError, match=r"'transformers_weights' must name a \.safetensors file beside it"
        ):
            load(source)


def test_tied_tensors_that_are_stored_twice(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Some tools write the tied output embedding: the file stays as it is."""
    source = write(
        tiny_model(vocab_size=300, tie_word_embeddings=True),
        tmp_path / "tied",
        tiny_tokenizer,
        "1GB",
    )
    content = load_file(source / FILE)
    save_file(
        {**content, "lm_head.weight": content["model.embed_tokens.weight"].clone()},
        source / FILE,
        {"format": "pt"},
    )
    assert "as they are" in export(MIXED, source, tmp_path / "out").form
    assert "lm_head.weight" in load_file(tmp_path / "out" / FILE)
    load(tmp_path / "out")


def llama_tokenizer(folder: Path, **settings: Any) -> PreTrainedTokenizerBase:
    """Write a tokenizer whose class, LlamaTokenizer, builds its rules from the settings instead of its file."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["Tell me a story"] * 9, trainer)
    backend.decoder = decoders.Replace("\u2581", " ")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    names = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    content = {"tokenizer_class": "LlamaTokenizer", **names, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return load_tokenizer(folder)


@pytest.mark.usefixtures("unchecked")
class TestOtherFiles:
    """Files besides weights, which were written by transformers instead of carried over."""

    @pytest.mark.parametrize(
        "settings", [{"legacy": True}, {"legacy": False}, {"add_prefix_space": False}], ids=str
    )
    @pytest.mark.parametrize("layout", [MIXED, LAYERWISE], ids=["custom", "native"])
    def test_a_tokenizer_stays_the_same(
        self, layout: Layout, settings: dict[str, Any], dense: Path, tmp_path: Path
    ) -> None:
        """An export forgot ``legacy``, and a native one padded on the other side."""
        before = llama_tokenizer(dense, **settings)
        export(layout, dense, tmp_path / "out")
        after = load_tokenizer(tmp_path / "out")
        for text in ("<s>Tell me</s>a story", "Tell me", "</s>a"):
            assert before(text)["input_ids"] == after(text)["input_ids"]
        assert (before.padding_side, after.padding_side) == ("left", "left")

    def test_a_changed_tokenizer_is_saved_as_it_is(self, dense: Path, tmp_path: Path) -> None:
        llama_tokenizer(dense, legacy=True)
        (dense / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
        model, tokenizer = load(dense)
        tokenizer.add_tokens(["<new>"])
        tokenizer.eos_token, tokenizer.chat_template = "<new>", "{{ messages }}"
        save(model, tokenizer, tmp_path / "out")
        loaded = load_tokenizer(tmp_path / "out")
        assert loaded("</s>a<new>")["input_ids"] == tokenizer("</s>a<new>")["input_ids"]
        assert (loaded.eos_token, loaded.chat_template, loaded.legacy) == (
            "<new>",
            "{{ messages }}",
            True,
        )

    def test_a_tokenizer_that_would_change_is_refused(self, dense: Path, tmp_path: Path) -> None:
        tokenizer = llama_tokenizer(dense)
        # Which its class does not load
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        with pytest.raises(
            UserError,
            match=r"transformers loads it as LlamaTokenizer, which changes its normalizer\n",
        ):
            check_savable(load(dense)[0], tokenizer)

    @pytest.mark.parametrize("layout", [MIXED, LAYERWISE], ids=["custom", "native"])
    def test_what_is_carried_over(self, layout: Layout, dense: Path, tmp_path: Path) -> None:
        (dense / "additional_chat_templates").mkdir()
        carried = (
            "LICENSE", "Notice.txt", "USE_POLICY.md", "preprocessor_config.json", "tokenizer.model", "merges.txt",
            "chat_template.jinja", "additional_chat_templates/tools.jinja",
        )  # fmt: skip
        left = (
            "README.md",
            "tokenizer.py",
            "params.json",
            "run.json",
            "optimizer.pt",
            "x.gguf",
            "trainer_state.json",
        )
        for name in (*carried, *left):
            (dense / name).write_text(f"{{{{ '{name}' }}}}")
        (dense / "COPYING").symlink_to("/etc/hostname")
        code = {
            "auto_map": {
                "AutoModelForCausalLM": "org/name--code.Model",
                "AutoTokenizer": ["code.Tokenizer", None],
            }
        }
        change_config(dense, lambda config: config.update(code))
        settings = json.loads((dense / "tokenizer_config.json").read_text())
        (dense / "tokenizer_config.json").write_text(json.dumps({**settings, **code}))
        with pytest.warns(UserWarning, match="COPYING is a link out of its folder"):
            export(layout, dense, tmp_path / "out", evidence=None)
        for name in carried:
            assert (tmp_path / "out" / name).read_bytes() == (dense / name).read_bytes(), name
        assert not any((tmp_path / "out" / name).exists() for name in (*left, "COPYING"))
        # Code that is not carried over is not named
        for name in (
            "config.json",
            "tokenizer_config.json",
        ):
            assert "code.Model" not in (tmp_path / "out" / name).read_text()
            assert "code.Tokenizer" not in (tmp_path / "out" / name).read_text()
        load(tmp_path / "out")

    @pytest.mark.parametrize("layout", [MIXED, LAYERWISE], ids=["custom", "native"])
    def test_generation_settings_stay_as_they_are(
        self, layout: Layout, dense: Path, tmp_path: Path
    ) -> None:
        """transformers refuses to save a temperature without sampling, and drops settings that it does not know."""
        settings = {
            "temperature": 0.9,
            "top_p": 0.6,
            "eos_token_id": [2, 5],
            "use_cache": False,
            "chat_format": "raw",
        }
        (dense / "generation_config.json").write_text(json.dumps(settings))
        export(layout, dense, tmp_path / "out")
        written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
        assert {
            name: value for name, value in written.items() if name != "transformers_version"
        } == settings
        load(tmp_path / "out")


def test_embeddings_that_differ_although_the_config_ties_them(
    tmp_path: Path, tokens: torch.Tensor, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The config said so in exports too, where engines tie them."""
    source = write(
        tiny_model(vocab_size=300, tie_word_embeddings=True),
        tmp_path / "tied",
        tiny_tokenizer,
        "1GB",
    )
    content = load_file(source / FILE)
    save_file({**content, "lm_head.weight": torch.randn(300, 32)}, source / FILE, {"format": "pt"})
    with pytest.warns(
        UserWarning,
        match="its config ties input and output embeddings, but its files hold different",
    ):
        model, tokenizer = load(source)
    save(model, tokenizer, tmp_path / "out")
    again, _ = load(tmp_path / "out")
    assert again.config.tie_word_embeddings is False
    assert equal_up_to_rounding(logits(again, tokens), logits(model, tokens))


FOLDERS: dict[str, tuple[tuple[str, ...], str]] = {
    "adapter": (
        ("adapter_config.json", "adapter_model.safetensors"),
        "is an adapter of PEFT for org/base: merge it",
    ),
    "diffusers": (
        ("model_index.json", "unet/config.json"),
        "its format is that of a pipeline of diffusers",
    ),
    "gguf": (("model-q4.gguf",), "its format is GGUF"),
    "onnx": (("onnx/model.onnx",), "its format is ONNX"),
    "trainer": (
        ("trainer_state.json", "model.safetensors"),
        "a trainer's checkpoint, into which the .*config",
    ),
    "weights": (
        ("model.safetensors",),
        "has no config.json\ngive a folder as transformers saves models",
    ),
    "parent": (
        ("final/config.json", "final/model.safetensors"),
        "it is the parent folder of .*/final",
    ),
    "no-weights": (("config.json", "model-q4.gguf"), "has no weights .*: its format is GGUF"),
    "mlx": (("config.json", "model.safetensors"), "quantized by mlx-lm"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_other_folders_are_named(name: str, tmp_path: Path) -> None:
    """They were called unrecognized models without a model_type."""
    files, message = FOLDERS[name]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text('{"base_model_name_or_path": "org/base"}')
    if "config.json" in files:
        tiny_model().config.save_pretrained(tmp_path)
    if name == "mlx":
        change_config(
            tmp_path, lambda config: config.update(quantization={"group_size": 64, "bits": 4})
        )
    with pytest.raises(UserError, match=message):
        load(tmp_path)
    if name != "no-weights":  # which the check without torch does not look for
        with pytest.raises(UserError, match=message):
            check_checkpoint(tmp_path)


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
def test_weights_are_not_held_in_memory(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """An export of 90 MB in bfloat16 needs the memory of one layer in float32."""
    sizes = {
        "vocab_size": 300,
        "hidden_size": 512,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = tiny_model(**sizes, intermediate_size=7000).to(torch.bfloat16)
    save(model, tiny_tokenizer, tmp_path / "dense")
    attach_gates(model)
    save(model, tiny_tokenizer, tmp_path / "gated")
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    largest = max(
        2 * sum(p.numel() * p.itemsize for p in part.parameters())
        for part in verify_export.plain_logits.parts(model)
    )
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
