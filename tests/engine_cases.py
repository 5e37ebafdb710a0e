"""Models and layouts that show which windows an engine runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers import sharpen_attention, tiny_model
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.export.export import export

WINDOW = 8
HEADS = Layout(("GL", "LL", "LG", "GG"), WINDOW)
LAYERS = Layout(("GG", "LL", "LL", "GG"), WINDOW)
WINDOWS = Layout(("GL", "ML", "NG", "MN"), windows={"L": WINDOW, "M": 24, "N": 64})


def sharp_model(family: str = "llama", **options: Any) -> PreTrainedModel:
    """Make a random model whose attention is far from uniform, so that a wrong window shows."""
    sizes = {"vocab_size": 300, "hidden_size": 128, "max_position_embeddings": 512}
    if family not in ("olmo2", "phi3", "granite"):  # which have hidden_size / heads
        sizes["head_dim"] = 32
    return sharpen_attention(tiny_model(family, **{**sizes, **options}))


def swap(dense: Path, layer: int, out: Path, **options: Any) -> Path:
    """Export whole layers, and make a layer slide that does not, or the other way round."""
    export(LAYERS, dense, out / "native", **options)
    config = json.loads((out / "native" / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"]
    config["layer_types"][layer] = kinds[1 - kinds.index(config["layer_types"][layer])]
    (out / "native" / "config.json").write_text(json.dumps(config))
    (out / "native" / "spkv-manifest.json").unlink()
    return out / "native"
