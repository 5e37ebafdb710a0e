"""Export: a checkpoint with a layout applied, as a Hugging Face folder.

A layout changes the config and no number, so that the files of the weights go into the folder as they are
(``weight_files.py``), shards and their index too. Only where they hold more than the model, such as its gates, or name
tensors otherwise, are they written anew, from where they are mapped and in shards as large as before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import StrPath
from spkv_nas.base.manifest import write_manifest
from spkv_nas.base.replace import check_new, new_folder
from spkv_nas.model import verify_export
from spkv_nas.model.attach import detach
from spkv_nas.model.checkpoint import WrittenWeights, load, save_as_files, weight_files
from spkv_nas.model.config_section import checkpoint_layout
from spkv_nas.model.custom_model_type import OWN_TYPE, set_own_type
from spkv_nas.model.native_config import UnsupportedLayoutError, stock_config, write_stock_config
from spkv_nas.model.windows import apply_layout


def export(
    layout: Layout | None, checkpoint: StrPath, out: StrPath, *, allow_dense: bool = False, link: bool = False
) -> str:
    """Write the checkpoint's weights with ``layout`` to the folder ``out``; says in a sentence what was written.

    A layer-wise layout becomes a stock architecture where there is one that computes the same, which a fresh process
    with plain ``transformers`` has shown (``verify_export.py``). Any other hybrid gets the model type ``spkv``, which
    ``spkv_nas.load`` loads and plain ``transformers`` refuses (``custom_model_type.py``). Gates of the checkpoint are
    left out.

    Args:
        layout: None takes the one that the checkpoint has, a hybrid as it was retrained.
        out: a new folder, or an empty one; it appears there in one step, when it is complete.
        allow_dense: keep the stock model type for what has no stock form, so that plain ``transformers`` runs it dense.
        link: hard links to the checkpoint's files, which take no room; whatever writes into one changes the other.
            Otherwise clones, where the file system has them, or copies.

    Raises:
        UserError: ``out`` holds files already, the checkpoint cannot be loaded, the layout does not fit it, there is
            none, or no fresh process could be asked.

    Warns:
        UserWarning: the checkpoint is a hybrid that was retrained with another layout.
    """
    out = Path(out)
    target = check_new(out)
    model, tokenizer = load(checkpoint, mapped=True)
    layout = _chosen(layout, checkpoint_layout(model), checkpoint)
    apply_layout(model, layout)  # checks the shape before anything is written
    write = partial(save_as_files, model, tokenizer, weight_files(checkpoint), link=link)
    try:
        with new_folder(target) as folder:
            done = _write_stock(model, tokenizer, layout, write, folder)
        return f"{out}: {done}"
    except (UnsupportedLayoutError, verify_export.LogitMismatch) as error:
        reason = str(error)
    apply_layout(model, layout)
    if allow_dense:
        set_own_type(model.config, False)
    with new_folder(target) as folder:
        weights = write(folder)
        write_manifest(folder, weights.hashes)
    if allow_dense:
        loads = f"spkv_nas.load; plain transformers runs it dense without a word, as {reason}"
    else:
        loads = (
            "spkv_nas.load, or with AutoModelForCausalLM after import spkv_nas; plain transformers refuses its model "
            f"type '{OWN_TYPE}' (--allow-dense keeps the stock one). It has no stock form: {reason}"
        )
    return f"{out}: loads with {loads}; {weights.done}"


def _chosen(given: Layout | None, own: Layout | None, checkpoint: StrPath) -> Layout:
    """The layout to export. Raises ``UserError``: there is none. Warns: the weights were trained for another."""
    if given is None:
        if own is None:
            raise UserError(
                f"checkpoint {checkpoint} has no layout of its own to export\n"
                "give a layout file, as propose writes them, or a checkpoint that train-hybrid retrained with one"
            )
        return own
    if own is not None and own.content_hash != given.content_hash:
        warnings.warn(
            f"checkpoint {checkpoint} is a hybrid whose weights were trained for another layout (hash {own.hash}) than "
            f"the one given ({given.hash}): leave the layout out to export the hybrid as it is",
            stacklevel=3,
        )
    return given


def _write_stock(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    write: Callable[[Path], WrittenWeights],
    folder: Path,
) -> str:
    """Write a hybrid as a stock architecture, and have a fresh process confirm it; says what was written.

    Raises:
        UnsupportedLayoutError, verify_export.LogitMismatch: it has no such form. The hooks may be off the model then.
    """
    config = stock_config(model.config, layout)
    hybrid = verify_export.expected(model, tokenizer, layout.window)
    detach(model)
    if model.generation_config is not None:
        model.generation_config.use_cache = True  # what a checkpoint of hooks says is for them
    weights = write(folder)
    write_stock_config(config, folder)
    difference = verify_export.check(folder, hybrid)
    write_manifest(folder, weights.hashes)
    return (
        f"a stock {config.model_type} checkpoint, which plain transformers loads without this package; over "
        f"{len(hybrid.tokens)} tokens in a process of its own its logits are the hybrid's to {difference:.0e} of the "
        f"largest; {weights.done}"
    )
