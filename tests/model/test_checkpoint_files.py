"""Test the files of a checkpoint: manifest, identity, hostile contents, a full disk."""

from __future__ import annotations

import copy
import gc
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import change_config, write
from helpers import equal_up_to_rounding, logits, tiny_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spkv_nas.base.errors import UserError
from spkv_nas.base.manifest import MANIFEST, is_complete, write_manifest
from spkv_nas.model.checkpoint import load, save, weights_identity
from spkv_nas.model.weight_files import FILE


class TestManifest:
    @pytest.fixture
    def folder(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
        save(tiny_model(), tiny_tokenizer, tmp_path)
        return tmp_path

    @pytest.mark.parametrize(
        ("manifest", "message"),
        [
            ("[]", "cannot be read"),
            ("{", "cannot be read"),
            ('{"sha256": []}', "lists no files"),
            ('{"sha256": {}}', "lists no files"),
            ('{"sha256": {"config.json": 3}}', "has no SHA-256 for 'config.json'"),
            ('{"sha256": {"../config.json": "%s"}}' % ("0" * 64), "not a file below it"),
            ('{"sha256": {"/etc/passwd": "%s"}}' % ("0" * 64), "not a file below it"),
            ('{"sha256": {"x": "%s"}}' % ("0" * 64), "config.json is not listed in its"),
        ],
    )
    def test_damaged(self, manifest: str, message: str, folder: Path) -> None:
        (folder / MANIFEST).write_text(manifest)
        with pytest.raises(UserError, match=message):
            load(folder)

    @pytest.mark.parametrize("header", ["cut", "huge", "other"])
    def test_a_damaged_file_of_weights_is_named(self, header: str, folder: Path) -> None:
        """Without a manifest, as models of others are, the message named the folder alone."""
        (folder / MANIFEST).unlink()
        content = (folder / FILE).read_bytes()
        damaged = {
            "cut": content[: len(content) // 2],
            "huge": b"\xff" * 7 + b"\x7f" + content[8:],
            "other": b"{}",
        }
        (folder / FILE).write_bytes(damaged[header])
        with pytest.raises(
            UserError, match=rf"weights {folder / FILE} are damaged or truncated: .*\ncopy"
        ):
            load(folder)

    def test_a_damaged_checkpoint_is_not_an_unfinished_one(self, folder: Path) -> None:
        """Damage is an error, so that hours of training are not silently repeated."""
        assert is_complete(folder)
        assert is_complete(folder, ["config.json"])
        assert not is_complete(folder, ["run.json"])
        assert not is_complete(folder / "none")
        (folder / MANIFEST).write_text("{")
        assert is_complete(folder)


class TestIdentity:
    @pytest.mark.parametrize("is_renamed", [True, False])
    def test_a_model_whose_folder_was_replaced(
        self, is_renamed: bool, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Measurements of the loaded model were recorded, and later reused, as those of the new files."""
        folder, other = tmp_path / "model", tmp_path / "other"
        save(tiny_model(), tiny_tokenizer, folder)
        save(tiny_model(hidden_size=64), tiny_tokenizer, other)
        model, _ = load(folder)
        before = weights_identity(folder)
        if is_renamed:
            folder.rename(tmp_path / "old")
            other.rename(folder)
        else:
            shutil.copytree(other, folder, dirs_exist_ok=True)
        with pytest.raises(
            UserError, match="changed since it was loaded, so results would mix two models\nrun"
        ):
            weights_identity(folder)
        del model
        gc.collect()
        assert weights_identity(folder) != before

    def test_only_relevant_files_count(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """The log contains times, so it does not count."""
        result = []
        for name in ("one", "two", "bare"):
            folder = write(tmp_path / name, tiny_tokenizer)
            (folder / "train-log.csv").write_text(f"step,tokens_per_second\n1,{name}\n")
            change_config(
                folder, lambda config: config.update(transformers_version=str(len(config)))
            )
            if name != "bare":
                write_manifest(folder)
            result.append(weights_identity(folder))
        assert len(set(result)) == 1

        change_config(folder, lambda config: config["spkv"]["gates"].update(tau=0.3))
        result.append(weights_identity(folder))
        weights = bytearray((tmp_path / "two" / FILE).read_bytes())
        weights[-1] ^= 1
        (tmp_path / "two" / FILE).write_bytes(weights)
        write_manifest(tmp_path / "two")
        result.append(weights_identity(tmp_path / "two"))
        save_file({"x": torch.ones(1)}, tmp_path / "one" / "optimizer-state.safetensors")
        write_manifest(tmp_path / "one")
        result.append(weights_identity(tmp_path / "one"))
        assert len(set(result)) == 4

    def test_no_weights_have_none(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        with pytest.raises(UserError, match="config not found"):
            weights_identity(tmp_path)
        folder = write(tmp_path / "model", tiny_tokenizer)
        (folder / FILE).unlink()
        with pytest.raises(UserError, match="has no weights"):
            weights_identity(folder)


VALUES: list[Any] = [
    None, True, 0, 1, -1, 3, 10**12, 10**30, 0.5, float("nan"), float("inf"), "", "x", "../x", "/etc/passwd", "é" * 300,
    [], [1], [[]], {}, {"a": 1}, "full_attention", "float16",
]  # fmt: skip


def places(content: Any) -> list[tuple[Any, Any]]:
    """Yield every (container, key) in a JSON document."""
    keys = (
        content.keys()
        if isinstance(content, dict)
        else range(len(content))
        if isinstance(content, list)
        else ()
    )
    return [child for key in keys for child in ((content, key), *places(content[key]))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["config.json", MANIFEST, "tokenizer.json", "tokenizer_config.json"]
)
def test_hostile_files_are_refused_or_change_nothing(
    name: str, tmp_path: Path, tokens: Tensor, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Values of the config that change the model visibly, such as the rotary base, are exempt."""
    folder, rng = write(tmp_path, tiny_tokenizer), random.Random(0)
    if name == MANIFEST:
        write_manifest(folder)
    expected = logits(load(folder)[0], tokens)
    original, accepted, refused = json.loads((folder / name).read_text()), 0, 0
    for _ in range(60):
        mutant = copy.deepcopy(original)
        exempt = [
            key
            for key in ("rope_parameters", "rms_norm_eps")
            if isinstance(mutant, dict) and key in mutant
        ]
        container, key = rng.choice([entry for entry in places(mutant) if entry[1] not in exempt])
        if rng.random() < 0.2:
            del container[key]
        else:
            container[key] = rng.choice(VALUES)
        (folder / name).write_text(json.dumps(mutant))
        try:
            model, _ = load(folder)
            actual = logits(model, tokens)
        except UserError as error:
            refused += str(error).count("\n") <= 2
        else:
            accepted += 1
            plain = key in ("rope_theta", "window", "sinks", "tau", "dtype")
            assert plain or equal_up_to_rounding(actual, expected), (key, container)
    assert accepted + refused == 60
    assert refused >= 10


def test_weights_have_the_permissions_of_the_config(tmp_path: Path) -> None:
    """Members of a group share a workspace, although safetensors 0.8 gives its files to their owner alone."""
    save(tiny_model(), None, tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
    assert (tmp_path / FILE).is_file()


class TestFullDisk:
    @pytest.mark.parametrize(
        "error", [OSError(28, "No space left"), RuntimeError("PytorchStreamWriter failed")]
    )
    def test_of_weights(
        self, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model()

        def fail(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(type(model), "save_pretrained", fail)
        with pytest.raises(UserError, match=r"cannot write checkpoint .*\nfree space"):
            save(model, None, tmp_path)

    def test_of_the_tokenizer(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        tiny_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise Exception("No space left on device (os error 28)")

        monkeypatch.setattr(type(tiny_tokenizer), "save_pretrained", fail)
        with pytest.raises(UserError, match=r"cannot write checkpoint .*No space left"):
            save(tiny_model(), tiny_tokenizer, tmp_path)
        assert not is_complete(tmp_path)
