"""Export: a checkpoint with a layout applied, as a Hugging Face folder."""

from __future__ import annotations

import warnings
from pathlib import Path

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.replace import new_folder
from spkv_nas.model.attach import detach
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.section import checkpoint_layout
from spkv_nas.model.stock import stock_obstacle, to_stock
from spkv_nas.model.windows import apply_layout


def export(layout: Layout | None, checkpoint: str | Path, out: Path) -> str:
    """Write the checkpoint's weights with ``layout`` to the folder ``out``; says in a sentence what was written.

    A layer-wise layout becomes a stock architecture where there is one, which plain ``transformers`` loads; any
    other one an ``spkv`` checkpoint, which ``spkv_nas.load`` loads. Gates of the checkpoint are left out.

    Args:
        layout: None takes the one that the checkpoint has, a hybrid as it was retrained.
        out: a new folder, or an empty one; it appears there in one step, when it is complete.

    Raises:
        UserError: ``out`` holds files already, the checkpoint cannot be loaded, the layout does not fit it, or there
            is none.

    Warns:
        UserWarning: the checkpoint is a hybrid that was retrained with another layout.
    """
    target = out.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another --out")
    if target == Path.cwd():  # which is replaced, so that whoever is in it would be nowhere
        raise UserError(f"{out} is the current folder: choose a new one with --out")
    model, tokenizer = load(checkpoint)
    own = checkpoint_layout(model)
    if layout is None:
        if own is None:
            raise UserError(
                f"checkpoint {checkpoint} has no layout of its own to export\n"
                "give a layout: spkv-nas propose makes them, spkv-nas train-hybrid retrains a checkpoint with one"
            )
        layout = own
    elif own is not None and own.content_hash != layout.content_hash:
        warnings.warn(
            f"checkpoint {checkpoint} is a hybrid whose weights were trained for another layout (hash {own.hash}) than "
            f"the one given ({layout.hash}): leave the layout out to export the hybrid as it is",
            stacklevel=2,
        )
    apply_layout(model, layout)  # checks the shape before anything is written
    obstacle = stock_obstacle(model, layout)
    if obstacle is not None:
        with new_folder(target) as folder:
            save(model, tokenizer, folder)
        return f"{out}: loads with spkv_nas.load; plain transformers would run it dense, as {obstacle}"
    detach(model)
    stock = to_stock(model, layout)
    with new_folder(target) as folder:
        save(stock, tokenizer, folder)
    return f"{out}: a stock {stock.config.model_type} checkpoint, which plain transformers loads without this package"
