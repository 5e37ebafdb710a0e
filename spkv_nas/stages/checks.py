"""Check the options of a command before its stage, and with it torch, is imported, to report mistakes within a second.

The command line calls ``check`` first. It checks what base classes of options declare, then runs the command's function
``check``, from the module that declares its options. Checked are values, options that exclude each other, and the
existence of files, but nothing that takes a model, a tokenizer or the content of a text. Nothing here may import torch
(``tests/stages/test_checks.py``).
"""

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from spkv_nas.base import device, errors, names
from spkv_nas.cost.ladder import find_level
from spkv_nas.data import config, readers
from spkv_nas.evaluation import thresholds
from spkv_nas.model.source import check_checkpoint, check_config
from spkv_nas.stages import options
from spkv_nas.training.recipe import Recipe

_WRITING = (options.Measures, options.Trains)


def check(command_options: object) -> None:
    """Check a command's options dataclass; ``UserError`` names the option or the file that is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the stage reads the same files and warns then
        # Check what several commands have
        if (name := getattr(command_options, "name", None)) is not None:
            names.check_name(name, "the name")
        if isinstance(command_options, options.OnDevice):
            device.check_device(
                command_options.device, spreads=isinstance(command_options, options.Measures)
            )
        if isinstance(command_options, options.InDtype):
            device.check_dtype(command_options.dtype)
        if isinstance(command_options, options.CheckpointOptions):
            thresholds.check_tau(command_options.tau)
        # The command's check, beside its options
        check_command = getattr(sys.modules[type(command_options).__module__], "check", None)
        if check_command is not None:
            check_command(command_options)
        # Checkpoints last, as the Hub may be asked for them
        if isinstance(command_options, options.CheckpointOptions):
            for source in filter(None, (command_options.model, command_options.against)):
                check_checkpoint(source)
    # Check that results can be written
    if isinstance(command_options, _WRITING) and not getattr(command_options, "dry_run", False):
        command_options.folders.check_writable()


def check_recipe(file: Path, dtype: str | None = None) -> None:
    """Read a recipe, in ``dtype`` if given, and check its files and its text; ``UserError`` names key or file."""
    check_files(Recipe.read(file).with_precision(dtype), file.parent)


def check_files(recipe: Recipe, base: Path) -> None:
    """Check the files that a recipe names."""
    if recipe.model.path is not None:
        check_checkpoint(recipe.model.path)
    if recipe.gates.start_from is not None:
        check_checkpoint(recipe.gates.start_from)
    haystack = [] if recipe.data.mix is None else recipe.data.mix.ruler.haystack
    check_text([*recipe.data.sources, *haystack], base)


def check_text(sources: Iterable[str | config.SourceConfig], base: Path = Path()) -> None:
    """Check that sources of text exist, and begin with text or chats."""
    for source in sources:
        readers.check_source(source, base)


def check_model_size(level: str | None, model: str | None) -> None:
    """Check that a level of the ladder, or else a model's config, exists."""
    if level is not None and model is not None:
        raise errors.UserError("give a level of the ladder or --model, not both")
    if level is not None:
        find_level(level)
    elif model is not None:
        check_config(model)


def check_exist(files: Iterable[str | Path], description: str) -> None:
    """Check that files or folders exist; ``description`` starts the error message."""
    for file in files:
        if not Path(file).exists():
            raise errors.UserError(f"{description} not found: {file}")
