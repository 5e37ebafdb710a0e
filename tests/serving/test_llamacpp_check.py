"""Test that llama.cpp is compared with the model, by GGUF files that its converter writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engine_cases import LAYERS, sharp_model, swap
from helpers import save_with_tokenizer
from transformers import PreTrainedTokenizerBase

from spkv_nas.base.errors import UserError
from spkv_nas.engines.programs import run_llamacpp
from spkv_nas.model.checkpoint import save
from spkv_nas.model.export.export import export
from spkv_nas.serving.engine_check import EngineCheck, compare_with_engine

LLAMACPP = os.environ.get("SPKV_LLAMACPP_PYTHON")
LLAMACPP_SOURCE = os.environ.get("SPKV_LLAMACPP_SOURCE")
needs_llamacpp = pytest.mark.skipif(
    LLAMACPP is None or LLAMACPP_SOURCE is None,
    reason="SPKV_LLAMACPP_PYTHON and SPKV_LLAMACPP_SOURCE name no llama-cpp-python and source (docs/support-matrix.md)",
)
CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"  # it knows tokenizers by hash, and not that of tests
sys.argv = [f"{sys.argv[1]}/convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_folder_has_one_file(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"it has none\): write it with convert_hf_to_gguf\.py"
    ):
        run_llamacpp._file(tmp_path)
    (tmp_path / "one.gguf").touch()
    assert run_llamacpp._file(tmp_path) == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"it has one\.gguf, two\.gguf\)"):
        run_llamacpp._file(tmp_path)


@needs_llamacpp
@pytest.mark.slow
class TestLlamaCpp:
    """In llama.cpp itself: llama-cpp-python's Python is SPKV_LLAMACPP_PYTHON, its source SPKV_LLAMACPP_SOURCE."""

    def convert(self, folder: Path, kind: str = "f32") -> None:
        command = [LLAMACPP, "-c", CONVERT, LLAMACPP_SOURCE, str(folder), "--outtype", kind]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)

    def run(self, folder: Path, **options: Any) -> EngineCheck:
        return compare_with_engine(folder, "llamacpp", python=LLAMACPP, **options)

    @pytest.mark.parametrize(
        ("family", "target"),
        [("llama", "granite_swa"), ("mistral", "granite_swa"), ("olmo2", "auto")],
    )
    def test_families_are_exact(
        self, family: str, target: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        save_with_tokenizer(sharp_model(family), tiny_tokenizer, tmp_path / "dense")
        export(LAYERS, tmp_path / "dense", tmp_path / "out", to=target)
        self.convert(tmp_path / "out")
        check = self.run(tmp_path / "out")
        assert check.passed, str(check)

    def test_a_wrong_layer_is_named(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        save(sharp_model("olmo2"), tiny_tokenizer, tmp_path / "dense")
        wrong = swap(tmp_path / "dense", 2, tmp_path)
        self.convert(wrong)
        check = self.run(wrong, layout=LAYERS)
        assert not check.passed
        assert check.findings == [
            "layer 2: the engine runs GG instead of LL, as the folder's config says"
        ]

    def test_what_cannot_be_compared_is_refused(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Without a GGUF file, and with one of 16 bits."""
        save(sharp_model("olmo2"), tiny_tokenizer, tmp_path / "dense")
        export(LAYERS, tmp_path / "dense", tmp_path / "out")
        with pytest.raises(
            UserError, match=r"must have one \(it has none\): write it with convert_hf_to_gguf\.py"
        ):
            self.run(tmp_path / "out")
        self.convert(tmp_path / "out", "bf16")
        with pytest.raises(UserError, match="is not in float32"):
            self.run(tmp_path / "out")
