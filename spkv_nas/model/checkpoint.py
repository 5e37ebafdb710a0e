"""Checkpoints: ordinary Hugging Face folders, with an ``spkv`` section in ``config.json`` and a manifest of hashes.

safetensors carries no checksum, so a flipped bit would load silently: folders that this package writes hold
``spkv-manifest.json`` (SHA-256 of every file, written last), and ``load`` checks it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.assets import EMBEDDED, EMBEDDED_PREFIX
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_text, sha256_file, write_json
from spkv_nas.model.attach import dry_run, gate_rows, install_gates, prepare
from spkv_nas.model.attention import GateSettings, LayerState, install
from spkv_nas.model.section import checkpoint_layout, saved_gates, saved_layers
from spkv_nas.model.shape import config_shape
from spkv_nas.model.windows import apply_layout

MANIFEST = "spkv-manifest.json"


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a checkpoint folder: weights (safetensors), config with its ``spkv`` section, tokenizer, manifest.

    ``weights`` are those of a sharded model, gathered; by default the model's own.
    """
    try:
        model.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except OSError as error:
        raise UserError(f"cannot write checkpoint {folder}: {error}") from error
    write_manifest(folder)


def write_manifest(folder: Path) -> None:
    """Record the SHA-256 of every file of ``folder``; the last file to be written, so it marks completeness."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    hashes = {str(p.relative_to(folder)): sha256_file(p) for p in files}
    write_json(folder / MANIFEST, {"sha256": hashes})


def check_manifest(folder: Path) -> None:
    """Raise ``UserError`` if a file of ``folder`` is missing or differs from its manifest. No manifest: no check."""
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        hashes: dict[str, str] = json.loads(read_text(path, "manifest"))["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"checkpoint {folder} is damaged: {MANIFEST} cannot be read") from error
    for name, expected in hashes.items():
        if not (folder / name).is_file():
            raise UserError(f"checkpoint {folder} is damaged: {name} is missing")
        if sha256_file(folder / name) != expected:
            raise UserError(f"checkpoint {folder} is damaged: {name} differs from its recorded SHA-256")


def checkpoint_hash(model: PreTrainedModel, path_or_id: str | Path) -> str:
    """Hexadecimal SHA-256 that names the content of the checkpoint that ``model`` was loaded from.

    Of its manifest; of its config and weights where it has none; of id and commit where it is on the hub.
    """
    folder = resolve(path_or_id)
    if (folder / MANIFEST).is_file():
        return sha256_file(folder / MANIFEST)
    if folder.is_dir():
        parts = [
            sha256_file(p) for p in sorted(folder.iterdir()) if p.name == "config.json" or p.suffix == ".safetensors"
        ]
    else:
        parts = [str(path_or_id), str(getattr(model.config, "_commit_hash", None))]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds a checkpoint that was written to the end."""
    return (folder / MANIFEST).is_file()


def load(
    path_or_id: str | Path, *, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Hugging Face decoder and its tokenizer; gates and layout are restored if the checkpoint has them.

    Args:
        path_or_id: a model folder, or an id in the local Hugging Face cache or on the hub.
        dtype: of the weights; None keeps the checkpoint's own. Predictors keep the dtype they were saved in.

    Raises:
        UserError: nothing there, a damaged or truncated file, an unsupported class.
    """
    folder = resolve(path_or_id)
    if folder.is_dir():
        check_manifest(folder)
    source = str(folder if folder.is_dir() else path_or_id)
    options: dict[str, Any] = {"trust_remote_code": False}
    with _as_user_error(f"model {source}"):
        config = AutoConfig.from_pretrained(source, **options)
        weights: dict[str, Any] = {"dtype": dtype or "auto", "use_safetensors": True, **options}
        if saved_layers(config) is None:
            return AutoModelForCausalLM.from_pretrained(source, config=config, **weights), load_tokenizer(source)
        model = _restoring_class(config).from_pretrained(source, config=config, attn_implementation="spkv", **weights)
    tokenizer = load_tokenizer(source)
    prepare(model, "sdpa")
    layout = checkpoint_layout(model)
    if layout is not None:
        apply_layout(model, layout)
    dry_run(model)
    return model, tokenizer


def load_tokenizer(path_or_id: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or id, or of a name like ``embedded:dense``."""
    source = str(resolve(path_or_id))
    with _as_user_error(f"tokenizer {source}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    return tokenizer


def resolve(path_or_id: str | Path) -> Path:
    """A path, or the folder of an embedded checkpoint: ``embedded:dense`` or ``embedded:reference``."""
    text = str(path_or_id)
    if not text.startswith(EMBEDDED_PREFIX):
        return Path(text)
    folder = EMBEDDED / text.removeprefix(EMBEDDED_PREFIX)
    if not folder.is_dir():
        names = sorted(f"{EMBEDDED_PREFIX}{p.name}" for p in EMBEDDED.iterdir() if (p / "config.json").is_file())
        raise UserError(f"no embedded checkpoint '{text}'; there are: {', '.join(names)}")
    return folder


@contextmanager
def _as_user_error(what: str) -> Iterator[None]:
    """Say in one line that ``what`` cannot be loaded: transformers and safetensors raise many kinds of error."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = str(error).strip()
        raise UserError(f"cannot load {what}: {text.splitlines()[0] if text else type(error).__name__}") from error


def _restoring_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The model's own class, with hooks and empty predictors put in place before the weights are read."""
    base: type[PreTrainedModel] = AutoModelForCausalLM._model_mapping[type(config)]
    gates, saved = saved_gates(config), saved_layers(config) or {}

    class Restored(base):
        _keep_in_fp32_modules_strict = frozenset({"utility_predictor"})

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            # in the model's order: config.json sorts its keys, layer 10 before layer 2
            names = [name for name, _ in self.named_modules() if name in saved]
            layers = [self.get_submodule(name) for name in names]
            settings = GateSettings()
            for name, layer in zip(names, layers, strict=True):
                install(layer, LayerState(saved[name]["num_kv_heads"], saved[name]["native_window"], settings))
            if gates is not None:
                rows = gate_rows(self, gates, [saved[name]["num_kv_heads"] for name in names])
                for layer, row in zip(layers, rows, strict=True):
                    if row is not None:
                        install_gates(layer, row, gates, config.get_text_config().hidden_size)

    Restored.__name__ = base.__name__
    Restored.__qualname__ = base.__qualname__
    Restored.__module__ = base.__module__
    return Restored


def read_shape(path_or_id: str | Path) -> Shape:
    """What cost depends on in a decoder, from its config alone: a model folder, an id, or a config file.

    Its parameters are counted on the meta device, without embeddings and predictors.

    Raises:
        UserError: nothing there, an unsupported class, or a mixture of experts, whose tokens use only a part of N.
    """
    source = str(resolve(path_or_id))
    with _as_user_error(f"model {source}"):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    if any(".experts." in name for name, _ in model.named_parameters()):
        raise UserError(f"model {source} is a mixture of experts; cost is known for dense decoders")
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    outside = {parameter for module in embeddings if module is not None for parameter in module.parameters()}
    return Shape(
        num_parameters=sum(p.numel() for p in model.parameters() if p not in outside), **asdict(config_shape(config))
    )
