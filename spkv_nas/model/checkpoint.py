"""Save and load checkpoints: Hugging Face folders with an ``spkv`` section in ``config.json`` and a hash manifest."""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts import gate_config, shape
from spkv_nas.base import errors, limits, memory
from spkv_nas.base.device import check_dtype, choose_dtype, named_dtype
from spkv_nas.base.files import StrPath, read_json
from spkv_nas.base.manifest import (
    MANIFEST,
    WEIGHT_ENDINGS,
    manifest_checked,
    read_manifest,
    write_manifest,
)
from spkv_nas.model import (
    config_section,
    custom_model_type,
    learned_sinks,
    model_shape,
    restore,
    wrappers,
)
from spkv_nas.model.source import (
    at_revision,
    config_folder,
    model_folder,
    pinned,
    read_model_config,
    resolve,
)
from spkv_nas.model.weight_files import (
    carry,
    check_files,
    check_headers,
    content_hashes,
    save_tokenizer,
    saving,
    stored_names,
)
from spkv_nas.model.weights import check_loaded, check_room, dispatch, quiet_report

# Every kind of tokenizer has at least one of these files
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_FileStates = frozenset[tuple[str, int, int, int]]  # name, bytes, time of the last write, inode
# Folders that living models were loaded from, and the states of their files then
_loaded_from: WeakKeyDictionary[PreTrainedModel, tuple[Path, _FileStates]] = WeakKeyDictionary()
# Maximum size of a weight file, as on the hub; bounds the copy from a GPU
SHARD_BYTES = 5_000_000_000


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: StrPath,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a checkpoint to ``folder``: the files of ``save_files``, which says what it raises, and their manifest.

    Adapters of PEFT are refused: merge them first.

    Pass a folder of ``base.replace.new_folder``, so that an interrupted command leaves a complete checkpoint or
    nothing.
    """
    folder = Path(folder)
    wrappers.check_no_adapter(model)
    save_files(model, tokenizer, folder, weights)
    write_manifest(folder)


def save_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights (safetensors), config with its ``spkv`` section, and tokenizer to ``folder``.

    Tensors are written from where they are, memory-mapped files included, without a second copy. ``weights`` are the
    gathered ones of a sharded model. No file holds more than ``shard_bytes``. Configs of processors and licences of the
    folder that the model was loaded from are carried over. Raises ``UserError``: the disk is full, the folder cannot be
    written, or transformers refuses to save the model.
    """
    with saving(folder, model):
        model.save_pretrained(folder, state_dict=weights, max_shard_size=shard_bytes)
        mode = (folder / "config.json").stat().st_mode
        for file in folder.glob("*.safetensors"):
            file.chmod(mode)  # safetensors ignores the umask: only the owner could read them
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def check_savable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a checkpoint without weights to a temporary folder, so that no training is lost. Raises ``UserError``."""
    with tempfile.TemporaryDirectory() as folder:
        save_files(model, tokenizer, Path(folder), weights={})


@dataclass(frozen=True)
class WrittenWeights:
    """Summary of written weights: a clause for a message, and the SHA-256, by name, of files copied unchanged."""

    done: str
    hashes: dict[str, str]


def save_as_files(
    model: PreTrainedModel, files: Sequence[Path], folder: Path, *, link: bool = False
) -> WrittenWeights:
    """Write a model whose weights are unchanged in ``files``, by carrying over these files or linking to them.

    If the files hold tensors that the model lacks, such as removed gates, or have unusual names, the weights are
    written anew by ``save_files``, in shards as large as the old ones. Raises ``UserError``: as ``save_files``; links
    to the files are impossible.
    """
    # Carry the files over if they have the usual names and hold no other tensors
    is_named = getattr(model.config, "transformers_weights", None) is not None
    if not is_named and stored_names(files) <= model.state_dict().keys():
        with saving(folder, model):
            method, hashes = carry(files, folder, link=link)
            model.config.architectures = [type(model).__name__]
            model.config.dtype = model.dtype
            model.config.save_pretrained(folder)
        return WrittenWeights(f"its weights were {method} as they are, file by file", hashes)
    # Write new files otherwise
    largest = max(file.stat().st_size for file in files)
    save_files(model, None, folder, shard_bytes=largest)
    return WrittenWeights("its weights were written anew", {})


def weights_identity(folder: Path) -> str:
    """Compute a SHA-256 (hexadecimal) of all that determines a model folder's results: config and weights.

    Weights are all safetensors files, by name, and their index; an optimizer's state counts too, because it affects
    training from this checkpoint. Of the config the values count, except the version of transformers; logs do not
    count. Hashes are taken from the manifest if there is one, which ``load`` verifies. Raises ``UserError``: the config
    or the manifest cannot be read, there are no weights, or a model in memory was loaded from other files of this name.
    """
    _check_unchanged(folder)
    config = read_json(folder / "config.json", "config")
    config.pop("transformers_version", None)
    if (folder / MANIFEST).exists():
        hashes = read_manifest(folder)
    else:
        paths = [path for path in folder.iterdir() if path.name.endswith(WEIGHT_ENDINGS)]
        hashes = content_hashes([path for path in paths if path.is_file()])
    # Files in subfolders are not loaded
    files = {
        name: value
        for name, value in hashes.items()
        if name.endswith(WEIGHT_ENDINGS) and "/" not in name
    }
    if not files:
        raise errors.UserError(f"model {folder} has no weights in safetensors files")
    return hashlib.sha256(json.dumps([config, files], sort_keys=True).encode()).hexdigest()


def _file_states(folder: Path) -> _FileStates:
    """Return the states of the config and the weight files of a model folder."""
    paths = [
        path
        for path in folder.iterdir()
        if path.name == "config.json" or path.name.endswith(WEIGHT_ENDINGS)
    ]
    statuses = [(path.name, path.stat()) for path in paths]
    # Without the time of the last change of status, which hard links and permissions change, too
    return frozenset(
        (name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in statuses
    )


def forget_loaded(folder: Path) -> None:
    """Let no model in memory count as loaded from a folder, because the caller has replaced it on purpose."""
    resolved = folder.resolve()
    for model, (origin, _) in list(_loaded_from.items()):
        if origin == resolved:
            del _loaded_from[model]


def _check_unchanged(folder: Path) -> None:
    """Raise ``UserError`` if a model in memory was loaded from this folder before its files changed.

    Its results would be recorded as those of the new files.
    """
    resolved = folder.resolve()
    for origin, states in list(_loaded_from.values()):
        if origin == resolved and states != _file_states(resolved):
            raise errors.UserError(
                f"model {folder} has changed since it was loaded, so results would mix two models\n"
                "run the same command again"
            )


def checkpoint_hash(path_or_id: str | Path) -> str:
    """Compute the SHA-256 (hexadecimal) of a folder's config and weights, or of a hub model's id and commit."""
    folder = resolve(path_or_id)
    if folder.is_dir():
        return weights_identity(folder)
    with _as_user_error(f"model {path_or_id}"):
        name, commit = pinned(str(path_or_id))
    return hashlib.sha256(f"{name} {commit}".encode()).hexdigest()


def model_origin(path_or_id: str | Path) -> dict[str, str]:
    """Return the fields that identify a checkpoint in a result: its name, and its commit if it is on the hub."""
    with _as_user_error(f"model {path_or_id}"):
        _, commit = pinned(str(resolve(path_or_id)))
    origin = {"model": str(path_or_id)}
    if commit is not None:
        origin["commit"] = commit
    return origin


def load(
    path_or_id: StrPath,
    *,
    dtype: str | torch.dtype | None = None,
    device_map: str | int | torch.device | dict[str, Any] | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    mapped: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a Hugging Face decoder and its tokenizer, with the gates or layout that the checkpoint has.

    On the CPU, weights in the checkpoint's dtype are memory-mapped instead of read: the operating system reads the
    pages that are used, and may drop them again.

    Args:
        path_or_id: a model folder, or an id in the local Hugging Face cache or on the hub, or ``ID@REVISION`` with a
            branch, a tag or a commit.
        dtype: dtype of the weights, such as ``torch.bfloat16`` or "bfloat16"; None or "auto" keeps the checkpoint's.
            Predictors are float32.
        device_map: placement of the weights, as in transformers: a device, "auto" to distribute them over all devices,
            or devices by module name; None loads to the CPU.
        revision: branch, tag or commit of an id.
        attn_implementation: implementation for a dense model, such as "sdpa" or "eager"; None lets transformers choose.
            Gates and layouts have their own implementation.
        mapped: weights stay in their files (in their dtype), so no memory is required for them.

    Raises ``UserError``: nothing there, a damaged or truncated file, weights that are incomplete, not finite or do not
    match the config, an unsupported class, too little memory, or an argument that does not suit the checkpoint.
    """
    # Read the config
    source = at_revision(str(resolve(path_or_id)), revision)
    what = f"model {path_or_id}"
    config = read_config(source, what)
    if attn_implementation not in (None, "spkv") and hasattr(config, "spkv"):
        raise errors.UserError(
            f"{what} has gates or a layout, which attn_implementation '{attn_implementation}' "
            "would ignore: leave it out, or load the model and call detach(model) for full "
            "attention"
        )
    options = {"device_map": device_map, "attn_implementation": attn_implementation}
    placed = {name: value for name, value in options.items() if value is not None}
    # Find the weight files
    with _as_user_error(what):
        folder = model_folder(source)
        resolved = folder.resolve()
        states = _file_states(resolved)
    # Read the weights
    with manifest_checked(folder):
        files = check_files(folder)
        check_headers(files)
        with _as_user_error(what):
            model = _load_weights(folder, files, config, what, named_dtype(dtype), mapped, placed)
        _loaded_from[model] = resolved, states
        return model, load_tokenizer(source)


def _load_weights(
    folder: Path,
    files: list[Path],
    config: PreTrainedConfig,
    what: str,
    dtype: torch.dtype | None,
    mapped: bool,
    placed: dict[str, Any],
) -> PreTrainedModel:
    """Build the model and read its weights; ``placed`` are further keyword arguments of ``from_pretrained``."""
    build = transformers.AutoModelForCausalLM.from_config
    restored = None
    if config_section.saved_layers(config) is not None:
        restored = restore.restoring_class(_model_class(config))
        build = restored._from_config
    # Check that the model fits into memory
    is_quantized = getattr(config, "quantization_config", None) is not None
    if mapped:
        item_bytes = 0.0
    elif is_quantized:
        item_bytes = 0.5  # at least
    else:
        item_bytes = getattr(dtype or config.dtype, "itemsize", 2)
    num_parameters = model_shape.check_size(config, item_bytes, what, build=build)
    if not is_quantized:
        check_room(files, num_parameters, what)
    # Load it, with hooks in place if the config has the section
    placed = {**placed, "config": config, "dtype": dtype or "auto", "use_safetensors": True}
    if restored is not None:
        return restored.from_pretrained(folder, **placed)
    with quiet_report():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **placed,
        )
    check_loaded(model, info, what)
    return model


def load_on(
    path_or_id: str | Path, device: str, dtype: str | None = None, *, spreads: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer on a device, in a dtype that it supports (``base.device.choose_dtype``).

    With ``spreads`` its layers are distributed over all devices of that kind (``weights.dispatch``). ``dtype`` requests
    "float32", "bfloat16" or "float16". Raises ``UserError``: as ``load``; an unknown dtype; too little memory on the
    device.
    """
    # Load in the chosen dtype
    stored = saved_dtype(path_or_id)
    check_dtype(dtype)
    chosen = None if stored is None else choose_dtype(device, stored, dtype)
    model, tokenizer = load(path_or_id, dtype=chosen)
    # Convert weights whose dtype only the files have, but not predictors, learned sinks and buffers (RoPE frequencies)
    if stored is None and not getattr(model, "is_quantized", False):
        chosen = choose_dtype(device, model.dtype, dtype)
        added = learned_sinks.added_parameters(model)
        for parameter in model.parameters():
            if parameter not in added and parameter.is_floating_point():
                parameter.data = parameter.data.to(chosen)
    # Move it to the device
    if spreads:
        return dispatch(model), tokenizer
    if device != "cpu":
        size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        memory.require(size, f"the weights on {device}", "use --device cpu", device=device)
    return model.to(device), tokenizer


def saved_dtype(path_or_id: str | Path) -> torch.dtype | None:
    """Return the dtype of the weights in a checkpoint's config; None if it has none or they are quantized."""
    config = read_config(str(resolve(path_or_id)), f"model {path_or_id}")
    is_quantized = getattr(config, "quantization_config", None) is not None
    if is_quantized or not isinstance(config.dtype, torch.dtype):
        return None
    return config.dtype


def read_gates(path_or_id: str | Path) -> gate_config.GateConfig | None:
    """Read a checkpoint's gates from its config alone; None if it has none. Raises ``UserError``."""
    return config_section.saved_gates(read_config(str(resolve(path_or_id)), f"model {path_or_id}"))


def read_config(source: str, what: str) -> PreTrainedConfig:
    """Read the config of a model folder, an id or a config file. Raises ``UserError``."""
    with _as_user_error(what):
        path = config_folder(source)
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():  # check counts first, because AutoConfig builds lists of these lengths
            limits.check_counts(read_model_config(file), what)
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False
        )
        vars(config).pop("auto_map", None)  # names code that is neither run nor carried over
    return config


def weight_files(path_or_id: StrPath) -> list[Path]:
    """Return the weight files of a model that can be loaded. Raises ``UserError``, as ``load``."""
    source = str(resolve(path_or_id))
    read_config(source, f"model {path_or_id}")
    return check_files(model_folder(source))


def load_tokenizer(path_or_id: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or id, or of a name like ``embedded:dense``. Raises ``UserError``."""
    source = str(resolve(path_or_id))
    if Path(source).is_dir() and not any(Path(source, name).is_file() for name in _TOKENIZER_FILES):
        raise errors.UserError(
            f"model {source} has no tokenizer: it contains none of {', '.join(_TOKENIZER_FILES)}\n"
            "copy the tokenizer files of the original model into this folder"
        )
    with _as_user_error(f"tokenizer {source}"):
        name, commit = pinned(source)
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, **({} if commit is None else {"revision": commit})
        )
        # Use it once, because wrong types of settings raise only then
        tokenizer("a word")
        if commit is not None:
            tokenizer.name_or_path = str(config_folder(source))  # where its files are
    return tokenizer


@contextmanager
def _as_user_error(what: str) -> Iterator[None]:
    """Turn any error of transformers or safetensors into a one-line ``UserError`` that ``what`` cannot be loaded."""
    try:
        yield
    except errors.UserError:
        raise
    except Exception as error:
        raise errors.UserError(f"cannot load {what}: {errors.first_line(error)}") from error
    except BaseException as error:
        # Rust code in the readers of tokenizers and weights panics
        if type(error).__name__ != "PanicException":
            raise
        raise errors.UserError(
            f"cannot load {what}: a file is damaged ({errors.first_line(error)})"
        ) from error


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the transformers decoder class for a config. Raises ``UserError`` if there is none."""
    kind = custom_model_type.native_class(config)
    if kind not in transformers.AutoModelForCausalLM._model_mapping:
        raise errors.UserError(
            f"models of type '{config.model_type}' are not text-generating decoders"
        )
    model_class: type[PreTrainedModel] = transformers.AutoModelForCausalLM._model_mapping[kind]
    return model_class


def read_size(path_or_id: str | Path) -> shape.ModelSize:
    """Compute the size of a decoder from the config of a folder, an id, or a config file. Raises ``UserError``."""
    source = str(resolve(path_or_id))
    what = f"model {path_or_id}"
    config = read_config(source, what)
    with _as_user_error(what):
        limits.check_counts(config.to_dict(), what)
        return model_shape.config_size(config)


def read_shape(path_or_id: str | Path) -> shape.Shape:
    """Compute the shape on which a decoder's cost depends, from the config of a folder, an id, or a config file.

    Its parameter count excludes embeddings and predictors. Raises ``UserError``: nothing there, an unsupported class,
    or a mixture of experts, of which a token uses only some parameters.
    """
    size = read_size(path_or_id)
    check_dense(size, str(path_or_id))
    return size.shape


def check_dense(size: shape.ModelSize, source: str) -> None:
    """Raise ``UserError`` for a mixture of experts, of which a token uses only some of the parameters."""
    if size.is_mixture:
        raise errors.UserError(
            f"model {source} is a mixture of experts; costs can be computed only for dense decoders"
        )
