"""Export a checkpoint with a layout applied as a Hugging Face folder.

A layout changes the config but no weight, so the weight files are carried over unchanged (``weight_files.py``), with
their shards and index. They are written anew only if they hold more tensors than the model, such as its gates, or
under other names.
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
from spkv_nas.model.attach import detach
from spkv_nas.model.checkpoint import WrittenWeights, load, save_as_files, weight_files
from spkv_nas.model.config_section import checkpoint_layout
from spkv_nas.model.custom_model_type import OWN_TYPE, set_own_type
from spkv_nas.model.export import verify_export
from spkv_nas.model.export.native import UnsupportedLayoutError, stock_config, write_stock_config
from spkv_nas.model.windows import apply_layout


def export(
    layout: Layout | None, checkpoint: StrPath, out: StrPath, *, allow_dense: bool = False, link: bool = False
) -> str:
    """Write a checkpoint with ``layout`` to the folder ``out``, and return a sentence that says what was written.

    A layer-wise layout becomes a stock architecture where one computes the same, which a subprocess with plain
    ``transformers`` verifies (``verify_export.py``). Any other hybrid gets the model type ``spkv``, which
    ``spkv_nas.load`` loads and plain ``transformers`` refuses (``custom_model_type.py``). The checkpoint's gates are
    dropped.

    Args:
        layout: layout to apply; None takes the checkpoint's, which exports a retrained hybrid as it is.
        checkpoint: model folder or id.
        out: a new or empty folder; it appears in one step, once it is complete.
        allow_dense: keep the stock model type for layouts without a stock form, so that plain ``transformers`` runs
            them dense.
        link: make hard links to the checkpoint's files, which use no disk space; writing to either changes both.
            Otherwise files are cloned if the file system supports it, or copied.

    Returns:
        What was written, and what loads it.

    Raises:
        UserError: ``out`` holds files already, the checkpoint cannot be loaded, the layout does not fit it or is
            missing, or the subprocess failed.

    Warns:
        UserWarning: the checkpoint is a hybrid that was retrained with another layout.
    """
    # Load the model and apply the layout
    out = Path(out)
    target = check_new(out)
    model, tokenizer = load(checkpoint, mapped=True)
    layout = _chosen(layout, checkpoint_layout(model), checkpoint)
    apply_layout(model, layout)  # also checks the shape
    write = partial(save_as_files, model, tokenizer, weight_files(checkpoint), link=link)
    # Write it as a stock architecture if that computes the same
    try:
        with new_folder(target) as folder:
            done = _write_stock(model, tokenizer, layout, write, folder)
        return f"{out}: {done}"
    except (UnsupportedLayoutError, verify_export.LogitMismatch) as error:
        reason = str(error)
    # Write it with the model type spkv otherwise
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


def _chosen(requested: Layout | None, saved: Layout | None, checkpoint: StrPath) -> Layout:
    """Return the layout to export: the ``requested`` one, or else the checkpoint's (``saved``).

    Raises:
        UserError: there is none.

    Warns:
        UserWarning: the weights were trained for another layout.
    """
    if requested is None:
        if saved is None:
            raise UserError(
                f"checkpoint {checkpoint} has no layout of its own to export\n"
                "give a layout file, as propose writes them, or a checkpoint that train-hybrid retrained with one"
            )
        return saved
    if saved is not None and saved.content_hash != requested.content_hash:
        warnings.warn(
            f"checkpoint {checkpoint} is a hybrid whose weights were trained for another layout (hash {saved.hash}) "
            f"than the one given ({requested.hash}): leave the layout out to export the hybrid as it is",
            stacklevel=3,
        )
    return requested


def _write_stock(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    write: Callable[[Path], WrittenWeights],
    folder: Path,
) -> str:
    """Write a hybrid as a stock architecture, verify it in a subprocess, and return what was written.

    Raises:
        UnsupportedLayoutError: the layout has no stock form.
        verify_export.LogitMismatch: the stock form computes something else; the hooks may be off the model then.
    """
    config = stock_config(model.config, layout)
    hybrid = verify_export.expected(model, tokenizer, layout.window)
    detach(model)
    if model.generation_config is not None:
        model.generation_config.use_cache = True  # False was for the hooks
    weights = write(folder)
    write_stock_config(config, folder)
    difference = verify_export.check(folder, hybrid)
    write_manifest(folder, weights.hashes)
    return (
        f"a stock {config.model_type} checkpoint, which plain transformers loads without this package; over "
        f"{len(hybrid.tokens)} tokens in a process of its own its logits are the hybrid's to {difference:.0e} of the "
        f"largest; {weights.done}"
    )
