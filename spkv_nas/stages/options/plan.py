"""Declare the options of the ``plan`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.artifacts import defaults
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import device, flag, units
from spkv_nas.base.errors import UserError
from spkv_nas.engines.registry import read_serving
from spkv_nas.model.source import check_config, config_path
from spkv_nas.proposal.budget import PAPER_BUDGET
from spkv_nas.stages import flags
from spkv_nas.stages.options import LONGEST, InWorkspace

_RECIPES = (".yaml", ".yml")
# Options of the workflow, which the cache of an engine does not depend on
_OF_WORKFLOW = ("data", "block_size", "steps", "budget", "hardware", "dtype")
# Options of the cache in an engine
_OF_CACHE = ("layout", "memory")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(InWorkspace):
    """Say what a model costs before anything is loaded: its cache in a serving engine, or every stage of the workflow.

    With --engine, the memory of requests by what layers keep: spkv-nas plan MODEL --engine vllm --context 32k
    --requests 32. Only the config of the model, or the header of a GGUF file, is read. With --layout, the memory of
    each layout beside it.

    Otherwise memory, tokens, FLOPs and time of every stage on given hardware: spkv-nas plan MODEL --hardware h100
    --devices 8. Memory is the peak of one device; for a stage that does not fit, the output names what to change.
    Times are computed from FLOPs at an assumed share of a GPU's peak; to time real steps on this machine, use --dry-run
    with a recipe. For FLOPs and times of attention with a layout, see spkv-nas plan attention.
    """

    subject: flags.Subject
    engine: flags.ServingEngine = flag.default(None, "the workflow")
    context: flags.OptionalContext = flag.default(None, LONGEST)
    requests: flags.Requests = flag.default(1, note="Applies to --engine.")
    memory: flags.CacheMemory = flag.default(None, note="Applies to --engine.")
    layout: flags.Layouts = flag.default(None, note="Applies to --engine.")
    data: flags.Data = None
    block_size: flags.BlockSize = flag.default(
        None,
        f"the recipe's, or the model's context, up to {defaults.CONTEXT:,}",
        note="Also used without --data.",
    )
    steps: flags.Steps = flag.default(
        None,
        f"the recipe's, else {defaults.PRICED_STEPS} "
        f"for gates and {defaults.FIRST_STEPS} per model",
    )
    budget: flags.OptionalBudget = flag.default(None, PAPER_BUDGET)
    hardware: flags.Hardware = flag.default(
        None, "this machine, no times", note="It sets memory and speed."
    )
    devices: Annotated[
        int,
        flag.Flag(
            "Number of GPUs that training is sharded across, by the recipe's sharding key.",
            low=1,
            high=1024,
        ),
    ] = 1
    device: flags.Device = None
    dtype: flags.Dtype = flag.default(None, "the model's; float32 if the device only emulates it")

    @property
    def is_recipe(self) -> bool:
        """Return whether a recipe is planned, rather than a model."""
        return Path(self.subject).suffix.lower() in _RECIPES


def check(options: PlanOptions) -> None:
    """Check the recipe or the model, and the options that go with it."""
    if options.context is not None:
        units.parse_context(options.context)
    if options.engine is not None:
        _check_served(options)
        return
    for name in _OF_CACHE:
        if getattr(options, name):
            raise UserError(f"--{name} needs --engine")
    if options.requests != 1:
        raise UserError("--requests needs --engine")
    _check_workflow(options)


def _check_served(options: PlanOptions) -> None:
    """Check the options of a cache in an engine."""
    read_serving(str(options.engine), any_layout=False)
    for name in _OF_WORKFLOW:
        if getattr(options, name):
            switch = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{switch} applies to the workflow, not to --engine: remove one of them"
            )
    if options.is_recipe:
        raise UserError(f"--engine plans the cache of a model, but {options.subject} is a recipe")
    if options.memory is not None:
        units.parse_bytes(options.memory)
    config_path(options.subject)
    for file in options.layout or ():
        Layout.read(file)


def _check_workflow(options: PlanOptions) -> None:
    """Check the options of the workflow's stages."""
    from spkv_nas.cost.stage_costs import find_hardware
    from spkv_nas.stages import checks

    device.check_device(options.device)
    device.check_dtype(options.dtype)
    if options.hardware is not None:
        find_hardware(options.hardware)
    if not options.is_recipe:
        check_config(options.subject)
        checks.check_text(options.data or ())
    elif options.data or options.block_size is not None or options.steps is not None:
        raise UserError(
            "the recipe sets the text, block size and steps: "
            "remove --data, --block-size and --steps"
        )
    else:
        checks.check_recipe(Path(options.subject))
