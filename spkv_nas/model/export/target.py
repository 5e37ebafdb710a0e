"""Base class of export targets: the forms in which a checkpoint with a layout can be written.

A target is an entry of a registry (``base.registry``), whose fields are its options. Its module imports no torch, so
that the command line can list targets. A package adds its own by the entry point ``spkv_nas.export_targets``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from spkv_nas.base.registry import Entry

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.model.checkpoint import WrittenWeights


class TargetError(Exception):  # handled: the export takes the next target
    """Target that cannot express a hybrid, or computes something else; the message is a clause that says why."""


@dataclass(frozen=True)
class Hybrid:
    """Checkpoint to export, loaded with the layout applied and without gates."""

    model: PreTrainedModel  # the model, whose weights are memory-mapped
    tokenizer: PreTrainedTokenizerBase  # its tokenizer
    layout: Layout  # the layout of its heads
    files: list[Path]  # the checkpoint's weight files
    link: bool = False  # whether to make hard links to these files instead of copies

    def save(
        self,
        folder: Path,
        added: Mapping[str, Tensor] | None = None,
        complete: Callable[[Path], None] = lambda _: None,
    ) -> WrittenWeights:
        """Write the model's weights, config and tokenizer, whose files are carried over where nothing changes.

        ``added`` are further tensors; ``complete`` replaces the folder's config by one of another architecture.
        """
        from spkv_nas.model import checkpoint, weight_files

        if added:
            weights = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
            checkpoint.save_files(self.model, None, folder, {**weights, **added})
            written = checkpoint.WrittenWeights(
                "its weights were written anew, with further tensors", {}
            )
        else:
            written = checkpoint.save_as_files(self.model, self.files, folder, link=self.link)
        complete(folder)
        # Last, because the config selects the class of the tokenizer
        weight_files.save_tokenizer(self.tokenizer, folder)
        return written


@dataclass(frozen=True)
class Written:
    """Description of a written export."""

    form: str  # what it is and what loads it, as a clause of a message
    weights: WrittenWeights  # how the weights were written
    # Names of engines that would compute the form, but lack something in this folder
    refused_by: tuple[str, ...] = ()


class ExportTarget(Entry, ABC):
    """Form in which a checkpoint with a layout can be written. Subclasses are frozen dataclasses of options.

    Attributes:
        engine: name of the only engine that the form is for; ``export`` takes it for that engine, or by its name.
    """

    engine: ClassVar[str | None] = None

    def form(self, config: PreTrainedConfig, layout: Layout) -> str:
        """Return the form that engines list what they do with (``engines``); by default the name."""
        return self.name

    def architecture(self, config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
        """Return the config that the folder gets, by default this one; engines look its settings up.

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
