"""Base class of export targets: the forms in which a checkpoint with a layout can be written.

A target is a frozen dataclass in one file, whose fields are its options; one that is annotated with a ``Flag`` is an
option of the ``export`` command too. Its module imports no torch, so that the command line can list targets; heavier
imports belong into its methods. ``registry.py`` lists the built-in targets, and
a package adds its own by an entry point::

    [project.entry-points."spkv_nas.export_targets"]
    windows = "my_package.export:WINDOWS"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_origin, get_type_hints

from spkv_nas.base.flag import Flag

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.model.checkpoint import WrittenWeights


class TargetError(Exception):  # handled: the export takes the next target
    """Target that cannot express a hybrid, or computes something else; the message is a clause that says why."""


@dataclass(frozen=True)
class Hybrid:
    """Checkpoint to export, loaded with the layout applied and without gates.

    Attributes:
        model: the model, whose weights are memory-mapped.
        tokenizer: its tokenizer.
        layout: the layout of its heads.
        files: the checkpoint's weight files.
        link: whether to make hard links to these files instead of copies.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layout: Layout
    files: list[Path]
    link: bool = False

    def save(
        self, folder: Path, added: Mapping[str, Tensor] | None = None, complete: Callable[[Path], None] = lambda _: None
    ) -> WrittenWeights:
        """Write the model's weights, config and tokenizer, whose files are carried over where nothing changes.

        ``added`` are further tensors; ``complete`` replaces the folder's config by one of another architecture.
        """
        from spkv_nas.model.checkpoint import WrittenWeights, save_as_files, save_files
        from spkv_nas.model.weight_files import save_tokenizer

        if added:
            weights = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
            save_files(self.model, None, folder, {**weights, **added})
            written = WrittenWeights("its weights were written anew, with further tensors", {})
        else:
            written = save_as_files(self.model, self.files, folder, link=self.link)
        complete(folder)
        save_tokenizer(self.tokenizer, folder)  # last, because the config selects its class
        return written


@dataclass(frozen=True)
class Written:
    """Description of a written export.

    Attributes:
        form: what it is and what loads it, as a clause of a message.
        weights: how the weights were written, as a clause of a message.
        hashes: SHA-256 by name of files that were carried over, so that they need not be read again.
    """

    form: str
    weights: str
    hashes: Mapping[str, str]


@dataclass(frozen=True)
class TargetFlag:
    """Option of a target on the command line: type of its values, flag, and default."""

    type: Any
    flag: Flag
    default: Any


class ExportTarget(ABC):
    """Form in which a checkpoint with a layout can be written. Subclasses are frozen dataclasses of options.

    Attributes:
        name: by which ``export --to`` chooses it.
        help: what the form is for, as a phrase.
        engine: name of the only engine that the form is for; ``export`` takes it for that engine, or by its name.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    engine: ClassVar[str | None] = None

    def form(self, config: PreTrainedConfig, layout: Layout) -> str:
        """Return the row of ``engines.py`` that says what engines do with the folder; by default the name."""
        return self.name

    def architecture(self, config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
        """Return the config that the folder gets, by default this one; ``engines.py`` looks its settings up.

        Raises ``TargetError`` if the form cannot express the layout.
        """
        return config

    def can_express(self, config: PreTrainedConfig, layout: Layout) -> str | None:
        """Return why this form cannot express a model of ``config`` with ``layout``, as a clause; None if it can."""
        try:
            self.architecture(config, layout)
        except TargetError as error:
            return str(error)
        return None

    @abstractmethod
    def write(self, hybrid: Hybrid, folder: Path) -> Written:
        """Write a hybrid to an empty folder, and leave its model as it was.

        Raises:
            TargetError: the form cannot express the hybrid.
            UserError: the folder cannot be written.
        """

    def verify(self, hybrid: Hybrid, folder: Path) -> str | None:
        """Check that the reader of this form computes what the hybrid does.

        Returns:
            What was compared and how well it agrees, as a clause of a message; None for a form without a check.

        Raises:
            TargetError: the reader computes something else, or nothing.
            UserError: the reader could not be run.
        """
        return None

    @property
    def option_names(self) -> set[str]:
        """Return the names of this target's options."""
        return {field.name for field in fields(self)}  # type: ignore[arg-type]  # every target is a dataclass

    @property
    def flags(self) -> dict[str, TargetFlag]:
        """Return the options that are annotated with a ``Flag``, by name."""
        declared: dict[str, TargetFlag] = {}
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            if name in self.option_names and get_origin(hint) is Annotated and isinstance(hint.__metadata__[0], Flag):
                declared[name] = TargetFlag(hint.__origin__, hint.__metadata__[0], getattr(self, name))
        return declared

    def with_options(self, options: Mapping[str, Any]) -> ExportTarget:
        """Return a copy of this target with those of ``options`` that it has."""
        target_options = {name: value for name, value in options.items() if name in self.option_names}
        return replace(self, **target_options)  # type: ignore[type-var]  # as above
