"""Export: a checkpoint with a layout applied, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.hook import apply_layout, attention_layers, detach
from spkv_nas.model.stock import stock_obstacle, to_stock


def export(layout: Layout, checkpoint: str | Path, out: Path) -> str:
    """Write the checkpoint's weights with ``layout`` to the folder ``out``; says in a sentence what was written.

    A layer-wise layout becomes a stock architecture where there is one, which plain ``transformers`` loads; any
    other one an ``spkv`` checkpoint, which ``spkv_nas.load`` loads. Gates of the checkpoint are left out.

    Raises:
        UserError: ``out`` holds files already, the checkpoint cannot be loaded, or the layout does not fit it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another --out")
    model, tokenizer = load(checkpoint)
    apply_layout(model, layout)  # checks the shape before anything is written
    obstacle = stock_obstacle(model, layout)
    if obstacle is not None:
        save(model, tokenizer, out)
        return f"{out}: loads with spkv_nas.load; plain transformers would run it dense, as {obstacle}"
    assert attention_layers(model)
    detach(model)
    stock = to_stock(model, layout)
    save(stock, tokenizer, out)
    return f"{out}: a stock {stock.config.model_type} checkpoint, which plain transformers loads without this package"
