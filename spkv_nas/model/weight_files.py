"""Find and check the files of a model folder, and carry them over to another folder.

A shard index may name files anywhere, which is refused here. Carried over are unchanged weights, the tokenizer's files,
configs of processors and licences; code, model cards and records of runs stay behind.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import read_json, write_json
from spkv_nas.base.manifest import file_hashes, named_hash
from spkv_nas.model.model_name import folder_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

INDEX_ENDING = ".index.json"
FILE = "model.safetensors"
INDEX = f"model.safetensors{INDEX_ENDING}"
ADAPTER = "adapter_config.json"
_GENERATION = "generation_config.json"
_PICKLED = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model.pt",
    "consolidated.00.pth",
    "model.pt",
)
# Formats that transformers does not load, by their files
_FOREIGN = {
    "*.gguf": "GGUF, the format of llama.cpp",
    "**/*.onnx": "ONNX",
    "model_index.json": "that of a pipeline of diffusers",
    "trainer_state.json": (
        "that of a trainer's checkpoint, into which the model's config must be copied"
    ),
}
_TOKENIZER = re.compile(
    r"(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|tekken)[\w.-]*\.(json|txt|bpe|jinja)"
    r"|[\w.-]+\.(model|model\.v\d+|tiktoken|spm)|additional_chat_templates/[\w.-]+\.jinja"
)
_SETTINGS = (
    "padding_side",
    "truncation_side",
    "model_max_length",
    "model_input_names",
    "clean_up_tokenization_spaces",
)
_COMPANION = re.compile(
    r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)[\w.-]*|\w*processor_config\.json", re.IGNORECASE
)
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}\.safetensors")


def check_files(folder: Path) -> list[Path]:
    """Return the weight files of a model folder after checking them; symbolic links, as in the hub cache, count.

    Raises ``UserError`` if there are no safetensors files, or the index of shards is damaged or names anything but
    files of the folder.
    """
    check_format(folder)
    paths = [folder / name for name in weight_names(folder)]
    index = next((path for path in paths if path.is_file()), None)
    if index is None:
        raise UserError(_no_weights(folder))
    if not index.name.endswith(INDEX_ENDING):
        return [index]
    files = [folder / name for name in index_names(index)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"index of weights {index} names {missing[0]}, which does not exist: "
            "the checkpoint is incomplete"
        )
    return files


def check_headers(files: Sequence[Path]) -> None:
    """Raise ``UserError`` for a safetensors file that is truncated, or whose header is damaged, and name it."""
    from safetensors import safe_open

    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except Exception as error:  # of safetensors, or of the system
            raise UserError(
                f"weights {file} are damaged or truncated: {first_line(error)}\n"
                "copy or download the file again"
            ) from error


def weight_names(folder: Path) -> tuple[str, ...]:
    """Return the names that the weights of a model folder may have: ``transformers_weights``, or the usual ones.

    Raises ``UserError`` if the config names anything but a file of the folder.
    """
    name = read_json(folder / "config.json", "config").get("transformers_weights")
    if name is None:
        return FILE, INDEX
    if not isinstance(name, str) or _SHARD.fullmatch(name.removesuffix(INDEX_ENDING)) is None:
        raise UserError(
            f"config {folder / 'config.json'}: 'transformers_weights' must name a .safetensors "
            "file beside it"
        )
    return (name,)


def check_format(folder: Path) -> None:
    """Refuse an adapter, and a folder without a config. Raises ``UserError``, which says what the folder holds."""
    if (folder / ADAPTER).is_file():
        raise UserError(adapter_message(str(folder), folder / ADAPTER))
    if (folder / "config.json").is_file():
        return
    # Say what it is instead, or where the model is
    configs = [*folder.glob("*/config.json"), *folder.glob("*/*/config.json")]
    inner = sorted(file.parent for file in configs)
    hint = _format(folder)
    if inner and not hint:
        hint = f": it is the parent folder of {inner[-1]}"
    raise UserError(
        f"cannot load model {folder}: the folder has no config.json{hint}\n"
        "give a folder as transformers saves models, or an id"
    )


def _format(folder: Path) -> str:
    """Return a clause that names the format of a folder that transformers does not load; empty if unknown."""
    for pattern, kind in _FOREIGN.items():
        if any(folder.glob(pattern)):
            return f": its format is {kind}"
    return ""


def adapter_message(name: str, config: Path) -> str:
    """Return the error message for an adapter that is given as a model; ``config`` is its file ``ADAPTER``."""
    base = read_json(config, "adapter config").get("base_model_name_or_path")
    return (
        f"model {name} is an adapter of PEFT for {base or 'a base model'}: merge it, and give the "
        "result's "
        "folder\nAutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(FOLDER),"
        " of peft"
    )


def index_names(index: Path) -> list[str]:
    """Return the sorted files of a shard index. Raises ``UserError`` if it is damaged or names anything else."""
    source = f"index of weights {index}"
    content = read_json(index, "index of weights")
    shards = content.get("weight_map")
    metadata = content.get("metadata")
    if not isinstance(shards, dict) or not shards:
        raise UserError(f"{source}: 'weight_map' must map every tensor to its file")
    if not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{source}: 'weight_map' must map every tensor to its file")
    if not isinstance(metadata, dict):
        raise UserError(f"{source}: 'metadata' must be a mapping of keys to values")
    names = sorted(set(shards.values()))
    for name in names:
        if _SHARD.fullmatch(name) is None:
            raise UserError(
                f"{source} names {name[:100]!r}, which is not a .safetensors file in the same "
                "folder"
            )
    return names


def _no_weights(folder: Path) -> str:
    """Build the error message for a folder without safetensors files."""
    pickled = next((name for name in _PICKLED if (folder / name).is_file()), None)
    if pickled is None:
        return (
            f"cannot load model {folder}: it has no weights ({FILE}, "
            f"or {INDEX} with shards){_format(folder)}"
        )
    return (
        f"model {folder} has its weights in {pickled}, a pickle, "
        "which can run code when it is read\n"
        "convert it where you trust it: "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
    )


def _carry_over(source: str, folder: Path, names: re.Pattern[str]) -> list[Path]:
    """Copy the files of a model folder whose relative names match, and return the copies; none if ``source`` is an id.

    Warns:
        UserWarning: a file is a link out of the folder and the hub's cache; an untrusted folder may have one.
    """
    original = Path(source).resolve()
    copies = []
    if not source or not original.is_dir() or original == folder.resolve():
        return []
    trusted = (original, original.parent.parent / "blobs")
    for file in sorted((*original.glob("*"), *original.glob("additional_chat_templates/*"))):
        name = file.relative_to(original)
        copy = folder / name
        if not file.is_file() or names.fullmatch(name.as_posix()) is None:
            continue
        if not any(file.resolve().is_relative_to(root) for root in trusted):
            warnings.warn(
                f"{file} is a link out of its folder and is not carried over", stacklevel=2
            )
            continue
        copy.parent.mkdir(exist_ok=True)
        copies.append(Path(shutil.copyfile(file, copy)))
    return copies


@contextmanager
def saving(folder: Path, model: "PreTrainedModel | None" = None) -> Iterator[None]:
    """Convert errors while a checkpoint is written to ``UserError``; complete the files of a model that was saved.

    Generation settings are written without transformers' checks, and those that it does not know are kept.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        with nullcontext() if model is None else default_generation(model):
            yield
        if model is not None:
            _carry_over(folder_name(model), folder, _COMPANION)
            if model.can_generate():
                _write_generation(model, folder / _GENERATION)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises a plain Exception if the disk is full
        refused = isinstance(error, ValueError | TypeError | StrictDataclassError)
        advice = (
            "correct the model's config.json" if refused else "free space, or choose another folder"
        )
        raise UserError(
            f"cannot write checkpoint {folder}: {first_line(error)}\n{advice}"
        ) from error


@contextmanager
def default_generation(model: "PreTrainedModel") -> Iterator[None]:
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


def _write_generation(model: "PreTrainedModel", file: Path) -> None:
    """Write a model's generation settings, and those of the file it was loaded from that transformers ignores."""
    source = folder_name(model)
    original = Path(source, _GENERATION)
    stored = read_json(original, "generation config") if source and original.is_file() else {}
    known = vars(type(model.generation_config)()).keys()
    others = {
        name: value
        for name, value in stored.items()
        if name not in known and not name.startswith("_")
    }
    current = model.generation_config.to_json_string(keys_to_pop=["compile_config"])
    write_json(file, others | json.loads(current))


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write a tokenizer's files: those that it was loaded from if it loads from them unchanged, or else new ones.

    The model's config, which selects the class that loads them, must be in ``folder`` already. Raises ``UserError``:
    the disk is full, the folder cannot be written, or the tokenizer would change when it is loaded.
    """
    with saving(folder):
        # Carry the files over, unless they name code, which stays behind
        copies = _carry_over(tokenizer.name_or_path, folder, _TOKENIZER)
        changed = ["files"]
        if copies:
            with suppress(Exception):  # the copies may be incomplete
                _, changed = _changes(tokenizer, folder)
        if not changed and "auto_map" not in tokenizer.init_kwargs:
            return
        # Write new ones; vocabularies of other programs stay if they still hold
        is_stale = "files" in changed or "vocabulary" in changed
        for file in copies:
            if is_stale or file.suffix in (".json", ".jinja"):
                file.unlink()
        tokenizer.save_pretrained(folder)
        # Add the settings that save_pretrained leaves to the class
        file = folder / "tokenizer_config.json"
        content = read_json(file, "tokenizer's settings")
        content.pop("auto_map", None)
        parameters = signature(type(tokenizer).__init__).parameters.keys() - content.keys()
        for name in (*parameters, *_SETTINGS):
            value = getattr(tokenizer, name, None)
            if isinstance(value, bool | int | str | list):
                content[name] = value
        write_json(file, content)
        kind, changed = _changes(tokenizer, folder)
    if changed:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path} cannot be saved: "
            f"with this model transformers loads it as {kind}, "
            f"which changes its {', '.join(changed)}\n"
            "take a tokenizer of that class, or a model of another type"
        )


def _changes(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> tuple[str, list[str]]:
    """Load a tokenizer from its files in a folder, and return its class and the names of what differs."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    values = _behaviour(loaded)
    changed = sorted(
        name for name, value in _behaviour(tokenizer).items() if values.get(name) != value
    )
    return type(loaded).__name__, changed


def _behaviour(tokenizer: "PreTrainedTokenizerBase") -> dict[str, object]:
    """Return by name what determines a tokenizer's results, except the padding and truncation of its latest call."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    behaviour: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    behaviour["padding"] = None
    behaviour["truncation"] = None
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    # Loading makes tokens of the map special
    for token in behaviour.get("added_tokens", ()):
        token["special"] |= token["content"] in special.values()
    for name in (*_SETTINGS, "chat_template"):
        behaviour[name] = getattr(tokenizer, name, None)
    behaviour["special tokens"] = special
    behaviour["vocabulary"] = tokenizer.get_vocab()
    return behaviour


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
    hashes: dict[str, str] = {}
    unnamed = []
    for file in files:
        hash_in_name = named_hash(file)
        if hash_in_name is None:
            unnamed.append(file)
        else:
            hashes[file.name] = hash_in_name
    for file, value in zip(unnamed, file_hashes(unnamed), strict=True):
        hashes[file.name] = value
    return hashes


def carry(
    weights: Sequence[Path], folder: Path, *, link: bool = False
) -> tuple[str, dict[str, str]]:
    """Copy weights and their index to ``folder`` under the same names; return "copied" or "linked", and their hashes.

    With ``link`` hard links are made, which use no disk space; writing to a link changes the original too. Raises
    ``UserError`` where they are impossible, ``OSError`` where ``folder`` cannot be written.
    """
    files = list(weights)
    if weights[0].name != FILE:
        files.append(weights[0].with_name(INDEX))
    for file in files:
        original = file.resolve()
        target = folder / file.name
        if not link:
            shutil.copyfile(original, target)
            continue
        try:
            os.link(original, target)
        except OSError as error:
            raise UserError(
                f"cannot link {original}: {first_line(error)}\nleave --link out"
            ) from error
    return "linked" if link else "copied", content_hashes(files)
