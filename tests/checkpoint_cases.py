"""Write checkpoints of tiny models and change their files, for tests that damage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from helpers import scatter_gates, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.manifest import MANIFEST
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import save
from spkv_nas.model.custom_model_type import set_custom_model_type
from spkv_nas.model.weight_files import FILE
from spkv_nas.model.windows import apply_layout

Weights = dict[str, Tensor]
# Files of each checkpoint by the arguments of ``write``, which takes a third of a second once
_WRITTEN: dict[tuple[Any, ...], dict[str, bytes]] = {}


def write(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    kind: str = "gated",
    *,
    stock_type: bool = False,
    **options: Any,
) -> Path:
    """Write a checkpoint without a manifest, as other tools do; with ``stock_type`` under llama's type."""
    key = (id(tokenizer), kind, stock_type, *sorted(options.items()))
    if key not in _WRITTEN:
        with TemporaryDirectory() as made:
            _save(Path(made), tokenizer, kind, options, stock_type=stock_type)
            _WRITTEN[key] = {file.name: file.read_bytes() for file in Path(made).iterdir()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _WRITTEN[key].items():
        (folder / name).write_bytes(content)
    return folder


def _save(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    options: dict[str, Any],
    *,
    stock_type: bool,
) -> None:
    """Create the model of ``write``, and save it."""
    model = tiny_model(**options)
    if kind == "gated":
        attach_gates(model, GateConfig(window=6, hidden_size=16, tau=0.4))
        scatter_gates(model)
    elif kind == "hybrid":
        apply_layout(model, Layout(("GL", "LL", "LG", "GG"), window=5))
    if stock_type:
        set_custom_model_type(model.config, False)
    save(model, tokenizer, folder)
    (folder / MANIFEST).unlink()


def change_weights(folder: Path, change: Callable[[Weights], None]) -> None:
    weights = load_file(folder / FILE)
    change(weights)
    save_file(weights, folder / FILE, {"format": "pt"})


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
