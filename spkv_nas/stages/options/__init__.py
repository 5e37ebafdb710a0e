"""Declare the options of the commands: one dataclass per command, which ``cli.options`` turns into flags.

A command is two modules of one name: ``options/probe.py`` declares its options, checks them and holds its help, and
``probe.py`` runs it and prints. Any module may name options, to suggest a command or to read those of a record; no
module imports one that runs a command. This one has what several commands share.

A field takes its flag from ``flags`` and adds the command's default. Where the default depends on other values, or the
flag means something specific to a command, ``default`` holds the wording. Nothing heavy is imported here, because
``--help`` needs it.
"""

from dataclasses import dataclass
from pathlib import Path

from spkv_nas.artifacts import defaults
from spkv_nas.base import assets, errors, flag, limits, units
from spkv_nas.base.workspace import Workspace
from spkv_nas.stages import flags

DEFAULT_PROBE = assets.EMBEDDED.name  # name of the embedded reference's probe
REFERENCE = f"{assets.EMBEDDED_PREFIX}reference"
DENSE = f"{assets.EMBEDDED_PREFIX}dense"
ONLY_PROBE = "the only one in the workspace"
EMBEDDED_RECIPE = "the embedded models' recipe"
# Defaults of the text that a model is measured on
TEXT_CONTEXT = (
    f"the model's, up to {defaults.CONTEXT:,}, or less where the text has no documents as long"
)
SEPARATELY = "separate, where the model can keep them apart; of a recipe, as it says"
LONGEST = "128k, or the model's maximum if shorter"
CHECKPOINT_TAU = "the checkpoint's"


@dataclass(frozen=True, kw_only=True)
class InWorkspace:
    """Options of a command that reads and writes a workspace."""

    workspace: flags.Root = Path()

    @property
    def folders(self) -> Workspace:
        """Return the workspace."""
        return Workspace(self.workspace)


@dataclass(frozen=True, kw_only=True)
class ChoosesProbe(InWorkspace):
    """Options of a command that takes a probe."""

    probe: flags.OptionalProbe = flag.default(None, ONLY_PROBE)


class TakesLong:
    """Options of a command that takes seconds, whose start is announced before anything heavy is imported."""


@dataclass(frozen=True, kw_only=True)
class OnDevice(TakesLong):
    """Options of a command that computes with torch."""

    device: flags.Device = None


@dataclass(frozen=True, kw_only=True)
class InDtype(OnDevice):
    """Options of a command that runs a model."""

    dtype: flags.Dtype = flag.default(None, "the model's; float32 if the device only emulates it")


@dataclass(frozen=True, kw_only=True)
class InPrecision(OnDevice):
    """Options of a command that trains by recipes."""

    dtype: flags.Dtype = flag.default(None, "the recipe's")


@dataclass(frozen=True, kw_only=True)
class Trains(InWorkspace, OnDevice):
    """Options of a command that trains; with ``dry_run`` the CLI calls ``stages.dry_run`` instead."""

    dry_run: flags.DryRun = False


@dataclass(frozen=True, kw_only=True)
class RetrainsLayouts(ChoosesProbe, Trains):
    """Options of a command that retrains layouts by a recipe."""

    recipe: flags.RecipeOption = flag.default(
        None, EMBEDDED_RECIPE, note="Its dense model is retrained."
    )


@dataclass(frozen=True, kw_only=True)
class Measures(InWorkspace, InDtype):
    """Options of a command that measures a model, which it can spread over all GPUs."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Measures):
    """Options that name a checkpoint, its threshold, and a baseline."""

    model: flags.Model = REFERENCE
    tau: flags.Tau = flag.default(None, CHECKPOINT_TAU)
    against: flags.Against = None
    name: flags.Name = flag.default(None, "the checkpoint's recipe")


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(Measures):
    """Options that name a model and the text to measure it on."""

    model: flags.OptionalModel = None
    data: flags.Data = None
    max_tokens: flags.OptionalMaxTokens = flag.default(None, "all")
    name: flags.Name = None
    context: flags.TextContext = flag.default(None, TEXT_CONTEXT)

    @property
    def block_size(self) -> int | None:
        """Return the context in tokens; None if it is left to the model and the text. Raises ``UserError``."""
        if self.context is None:
            return None
        tokens = units.parse_context(self.context)
        if not 2 <= tokens <= limits.MAX_BLOCK_SIZE:
            raise errors.UserError(
                f"--context {self.context}: give from 2 to {limits.MAX_BLOCK_SIZE:,} tokens"
            )
        return tokens


@dataclass(frozen=True, kw_only=True)
class DocumentOptions(SubjectOptions):
    """Options of a command that measures a model on documents, by default each alone."""

    documents: flags.Documents = flag.default(None, SEPARATELY)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Serving engine that memory is counted for."""

    engine: flags.EngineName = flag.default(None, "keys and values alone")


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Constraints on the global heads of layouts."""

    constraint: flags.Constraint = None
    granularity: flags.Granularity = "head"
