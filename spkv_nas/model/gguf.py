"""Convert GGUF files, which llama.cpp reads, to folders of transformers, once for all commands.

A GGUF file holds the weights, the tokenizer and the config of a model, its weights usually quantized. transformers
reads such files for many families; here they are dequantized to float16, as a hybrid's weights are not quantized.
"""

import os
import shutil
from functools import cache
from pathlib import Path

from spkv_nas.base import errors, files, locks, progress

ENDING = ".gguf"
_DIGITS = 16  # of the hash that names a folder


def is_gguf(source: str) -> bool:
    """Return whether a model is named by a GGUF file."""
    return source.lower().endswith(ENDING)


def converted(file: Path) -> Path:
    """Return the folder that a GGUF file was converted to: config, tokenizer and float16 weights; written at first use.

    Folders are in ``~/.cache/spkv-nas/gguf/`` or below ``$XDG_CACHE_HOME``, named by the file and a hash of its
    content, so that all commands and workspaces share them.

    Raises:
        UserError: there is no such file, it is damaged, transformers does not read its family, or ``gguf`` is not
            installed.
    """
    if not file.is_file():
        raise errors.UserError(f"cannot load model {file}: there is no such file")
    state = file.stat()
    digits = _sha256(file, state.st_size, state.st_mtime_ns)[:_DIGITS]
    folder = _caches() / "spkv-nas" / "gguf" / f"{file.stem}-{digits}"
    if folder.is_dir():
        return folder
    progress.LOGGER.info("converting %s, once for all commands", file.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locks.shared_lock(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            _convert(file, folder)
    return folder


@cache
def _sha256(file: Path, size: int, written: int) -> str:
    """Return the hash of a file, read once as long as its size and its time of the last write stay.

    A command asks a dozen times for the folder of its model, and a gigabyte takes a second or more.
    """
    return files.sha256_file(file)


def _caches() -> Path:
    """Return the folder of the user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _convert(file: Path, folder: Path) -> None:
    """Write the folder of a GGUF file under a temporary name, and rename it."""
    import torch
    import transformers

    partial = folder.parent / f"{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    # Releases of transformers that keep quantized weights are told not to
    config_class = getattr(transformers, "GgufConfig", None)
    dequantize = (
        {} if config_class is None else {"quantization_config": config_class(dequantize=True)}
    )
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **where, **dequantize, dtype=torch.float16
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except ImportError as error:
        raise errors.UserError(
            f"cannot load model {file}: reading GGUF files takes the package gguf\n"
            "pip install 'spkv-nas[gguf]' installs it"
        ) from error
    except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
        raise errors.UserError(
            f"cannot load model {file}: transformers cannot read this GGUF file: "
            f"{errors.first_line(error)}\n"
            "give the model from which it was made"
        ) from error
    model.config.name_or_path = file.stem
    model.save_pretrained(partial)
    mode = (partial / "config.json").stat().st_mode
    for weights in partial.glob("*.safetensors"):
        weights.chmod(mode)  # safetensors ignores the umask
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
