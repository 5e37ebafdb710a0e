"""Find and check the files of a model folder, and carry them over to another folder.

A shard index may name files anywhere, which is refused here. Unchanged weights are carried over as files: no tensor is
read, and the shards stay the same. So are the tokenizer's files, configs of processors and licences. Other files would
mislead or endanger the next reader, and stay behind: code, model cards, records of runs, configs of other formats.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import read_json, write_json
from spkv_nas.base.manifest import file_hashes, named_hash

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, _GENERATION = "adapter_config.json", "generation_config.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt", "consolidated.00.pth", "model.pt")
_FOREIGN = {  # formats that transformers does not load, by their files
    "model_index.json": "a pipeline of diffusers",
    "modules.json": "a sentence-transformers model",
    "*.gguf": "a model in GGUF, the format of llama.cpp",
    "**/*.onnx": "a model in ONNX",
    "*.msgpack": "a model of Flax",
    "*.h5": "a model of TensorFlow",
    "pytorch_model_fsdp*": "a sharded checkpoint of an unfinished run",
    "global_step*": "a sharded checkpoint of an unfinished run",
    "*.distcp": "a sharded checkpoint of an unfinished run",
    "params.json": "a model in its authors' format",
}
_PARTS = {  # folders that lack a config alone
    "trainer_state.json": "a trainer's checkpoint, into which the model's config must be copied",
    "*.safetensors": "weights alone, to which the model's config must be copied",
    "tokenizer*": "a tokenizer",
}
_TOKENIZER = re.compile(
    r"(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|tekken)[\w.-]*\.(json|txt|bpe|jinja)"
    r"|[\w.-]+\.(model|model\.v\d+|tiktoken|spm)|additional_chat_templates/[\w.-]+\.jinja"
)
_SETTINGS = ("padding_side", "truncation_side", "model_max_length", "model_input_names", "clean_up_tokenization_spaces")
_COMPANION = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)[\w.-]*|\w*processor_config\.json", re.IGNORECASE)
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}\.safetensors")
_FICLONE = 0x40049409  # <linux/fs.h>


def check_files(folder: Path, explicit: str | None = None) -> list[Path]:
    """Return the weight files of a model folder after checking them; symbolic links, as in the hub cache, count.

    Args:
        folder: model folder.
        explicit: weight file or index that the config names instead of the usual ones.

    Raises:
        UserError: there are no safetensors files, or the index of shards is damaged or names anything but files of the
            folder.
    """
    check_format(folder)
    if explicit is not None and not is_index(explicit):
        return [_checked_file(folder, explicit, f"the config of model {folder}")]
    if explicit is None and (folder / FILE).is_file():
        return [folder / FILE]
    index = folder / (INDEX if explicit is None else explicit)
    if not index.is_file():
        raise UserError(_no_weights(folder))
    return [_checked_file(folder, name, f"index of weights {index}") for name in index_names(index)]


def check_format(folder: Path) -> None:
    """Refuse an adapter, and a folder without a config. Raises ``UserError``, which says what the folder holds."""
    if (folder / ADAPTER).is_file():
        raise UserError(adapter_message(str(folder), folder / ADAPTER))
    if (folder / "config.json").is_file():
        return
    inner = sorted(file.parent for pattern in ("*", "*/*") for file in folder.glob(f"{pattern}/config.json"))
    kind = _kind(folder, _FOREIGN) or (f"the parent folder of {inner[-1]}" if inner else _kind(folder, _PARTS))
    raise UserError(
        f"cannot load model {folder}: the folder has no config.json"
        + ("" if kind is None else f": it is {kind}\ngive a folder as transformers saves models, or an id")
    )


def _kind(folder: Path, kinds: Mapping[str, str]) -> str | None:
    """Return the first of ``kinds``, which are described by patterns of file names, that a folder is."""
    return next((kind for pattern, kind in kinds.items() if any(folder.glob(pattern))), None)


def adapter_message(name: str, config: Path) -> str:
    """Return the error message for an adapter that is given as a model; ``config`` is its file ``ADAPTER``."""
    base = read_json(config, "adapter config").get("base_model_name_or_path")
    return (
        f"model {name} is an adapter of PEFT for {base or 'a base model'}: merge it, and give the result's folder\n"
        "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(FOLDER), of peft"
    )


def index_names(index: Path) -> list[str]:
    """Return the sorted files of a shard index. Raises ``UserError`` if it is damaged or names anything else."""
    source = f"index of weights {index}"
    content = read_json(index, "index of weights")
    shards, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{source}: 'weight_map' must map every tensor to its file")
    if not isinstance(metadata, dict):
        raise UserError(f"{source}: 'metadata' must be a mapping of keys to values")
    names = sorted(set(shards.values()))
    for name in names:
        _check_plain(name, source)
    return names


def is_index(name: object) -> bool:
    """Return whether a file name is that of a shard index."""
    return isinstance(name, str) and name.endswith(".safetensors.index.json") and "/" not in name


def _check_plain(name: object, source: str) -> None:
    """Raise ``UserError`` unless a name is that of a safetensors file without a folder."""
    if not isinstance(name, str) or _SHARD.fullmatch(name) is None:
        raise UserError(f"{source} names {str(name)[:100]!r}, which is not a .safetensors file in the same folder")


def _checked_file(folder: Path, name: str, source: str) -> Path:
    """Return the path of a weight file in ``folder``. Raises ``UserError`` if it is missing or not allowed."""
    _check_plain(name, source)
    if not (folder / name).is_file():
        raise UserError(f"{source} names {name}, which does not exist: the checkpoint is incomplete")
    return folder / name


def _no_weights(folder: Path) -> str:
    """Build the error message for a folder without safetensors files."""
    pickled = next((name for name in _PICKLED if (folder / name).is_file()), None)
    if pickled is None:
        foreign = _kind(folder, _FOREIGN)
        missing = f"it has no weights ({FILE}, or {INDEX} with shards)"
        return f"cannot load model {folder}: {missing}" + ("" if foreign is None else f": it is {foreign}")
    return (
        f"model {folder} has its weights in {pickled}, a pickle, which can run code when it is read\n"
        "convert it where you trust it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
    )


def _carry_over(source: str, folder: Path, names: re.Pattern[str]) -> list[Path]:
    """Copy the files of a model folder whose relative names match, and return the copies; none if ``source`` is an id.

    Warns:
        UserWarning: a file is a link out of the folder and the hub's cache; an untrusted folder may have one.
    """
    original, copies = Path(source).resolve(), []
    if not source or not original.is_dir() or original == folder.resolve():
        return []
    for file in sorted((*original.glob("*"), *original.glob("additional_chat_templates/*"))):
        copy = folder / file.relative_to(original)
        if not file.is_file() or names.fullmatch(copy.relative_to(folder).as_posix()) is None:
            continue
        if not any(file.resolve().is_relative_to(root) for root in (original, original.parent.parent / "blobs")):
            warnings.warn(f"{file} is a link out of its folder and is not carried over", stacklevel=2)
            continue
        copy.parent.mkdir(exist_ok=True)
        copies.append(Path(shutil.copyfile(file, copy)))
    return copies


@contextmanager
def saving(folder: Path, model: PreTrainedModel | None = None) -> Iterator[None]:
    """Convert errors while a checkpoint is written to ``UserError``; complete the files of a model that was saved.

    Generation settings are written without transformers' checks, and those that it does not know are kept.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        with nullcontext() if model is None else default_generation(model):
            yield
        if model is not None:
            _carry_over(model.name_or_path, folder, _COMPANION)
            if model.can_generate():
                _write_generation(model, folder / _GENERATION)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises a plain Exception if the disk is full
        refused = isinstance(error, ValueError | TypeError | StrictDataclassError)
        advice = "correct the model's config.json" if refused else "free space, or choose another folder"
        raise UserError(f"cannot write checkpoint {folder}: {first_line(error)}\n{advice}") from error


@contextmanager
def default_generation(model: PreTrainedModel) -> Iterator[None]:
    """Replace generation settings by defaults inside the ``with`` block, because transformers refuses to save some.

    It loads these, such as a temperature without sampling, and generates with them.
    """
    from transformers import GenerationConfig

    settings = model.generation_config
    model.generation_config = None if settings is None else GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings


def _write_generation(model: PreTrainedModel, file: Path) -> None:
    """Write a model's generation settings, and those of the file it was loaded from that transformers ignores."""
    original = Path(model.name_or_path, _GENERATION)
    stored = read_json(original, "generation config") if model.name_or_path and original.is_file() else {}
    known = vars(type(model.generation_config)()).keys()
    others = {name: value for name, value in stored.items() if name not in known and not name.startswith("_")}
    write_json(file, others | json.loads(model.generation_config.to_json_string(keys_to_pop=["compile_config"])))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files: those that it was loaded from if it loads from them unchanged, or else new ones.

    The model's config, which selects the class that loads them, must be in ``folder`` already. Raises ``UserError``:
    the disk is full, the folder cannot be written, or the tokenizer would change when it is loaded.
    """
    with saving(folder):
        # Carry the files over, unless they name code, which stays behind
        copies, changed = _carry_over(tokenizer.name_or_path, folder, _TOKENIZER), ["files"]
        if copies:
            with suppress(Exception):  # the copies may be incomplete
                _, changed = _changes(tokenizer, folder)
        if not changed and "auto_map" not in tokenizer.init_kwargs:
            return
        # Write new ones; vocabularies of other programs stay if they still hold
        for file in copies:
            if file.suffix in (".json", ".jinja") or not {"files", "vocabulary"}.isdisjoint(changed):
                file.unlink()
        tokenizer.save_pretrained(folder)
        # Add the settings that save_pretrained leaves to the class
        file = folder / "tokenizer_config.json"
        content = read_json(file, "tokenizer's settings")
        content.pop("auto_map", None)
        parameters = signature(type(tokenizer).__init__).parameters.keys() - content.keys()
        values = {name: getattr(tokenizer, name, None) for name in (*parameters, *_SETTINGS)}
        write_json(file, content | {name: v for name, v in values.items() if isinstance(v, bool | int | str | list)})
        kind, changed = _changes(tokenizer, folder)
    if changed:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path} cannot be saved: with this model transformers loads it as {kind}, "
            f"which changes its {', '.join(changed)}\ntake a tokenizer of that class, or a model of another type"
        )


def _changes(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[str, list[str]]:
    """Load a tokenizer from its files in a folder, and return its class and the names of what differs."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    values = _behaviour(loaded)
    changed = sorted(name for name, value in _behaviour(tokenizer).items() if values.get(name) != value)
    return type(loaded).__name__, changed


def _behaviour(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return by name what determines a tokenizer's results, except the padding and truncation of its latest call."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = {} if backend is None else json.loads(backend.to_str())
    content |= dict.fromkeys(("padding", "truncation"))
    settings = {name: getattr(tokenizer, name, None) for name in (*_SETTINGS, "chat_template")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    for token in content.get("added_tokens", ()):
        token["special"] |= token["content"] in special.values()  # as loading makes it
    return {**content, **settings, "special tokens": special, "vocabulary": tokenizer.get_vocab()}


def stored_names(files: Sequence[Path]) -> set[str]:
    """Return the names of the tensors in safetensors files, reading only the headers."""
    from safetensors import safe_open  # an extra; the base install checks checkpoints too

    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            names.update(tensors.keys())
    return names


def content_hashes(files: Sequence[Path]) -> dict[str, str]:
    """Compute the SHA-256 of files by name; files of the hub cache are named by it and not read."""
    hash_in_name = {file.name: named_hash(file) for file in files}
    unnamed = [file for file in files if hash_in_name[file.name] is None]
    computed = dict(zip((file.name for file in unnamed), file_hashes(unnamed), strict=True))
    return computed | {name: value for name, value in hash_in_name.items() if value is not None}


def carry(files: Sequence[Path], folder: Path, *, link: bool = False) -> str:
    """Clone, copy or link files to ``folder`` under the same names, and return "cloned", "copied" or "linked".

    A clone shares disk space with the original until either is written to, and takes no time; file systems such as
    Btrfs and XFS support it. Elsewhere files are copied.

    Args:
        files: files to carry over.
        folder: target folder.
        link: make hard links, which use no disk space on any file system. A program that writes to a link changes the
            original too, so they are made only on request.

    Raises:
        UserError: links are impossible, such as from one file system to another.
        OSError: ``folder`` cannot be written.
    """
    method = "linked" if link else "cloned"
    for file in files:
        original, target = file.resolve(), folder / file.name
        if link:
            try:
                os.link(original, target)
            except OSError as error:
                raise UserError(f"cannot link {original}: {first_line(error)}\nleave --link out") from error
        elif not _clone(original, target):
            shutil.copyfile(original, target)
            method = "copied"
    return method


def _clone(original: Path, destination: Path) -> bool:
    """Clone a file to ``destination``; return False where the file system does not support it."""
    if sys.platform != "linux":
        return False
    import fcntl

    with suppress(OSError), original.open("rb") as source, destination.open("wb") as target:
        fcntl.ioctl(target, _FICLONE, source.fileno())
        return True
    return False
