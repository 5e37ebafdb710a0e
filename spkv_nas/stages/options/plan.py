"""Declare the options of the ``plan`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.artifacts import defaults
from spkv_nas.base import flag, units
from spkv_nas.base.errors import UserError
from spkv_nas.model.source import check_config
from spkv_nas.proposal.budget import PAPER_BUDGET
from spkv_nas.stages import flags
from spkv_nas.stages.options import LONGEST, EngineOptions, InDtype, InWorkspace


@dataclass(frozen=True, kw_only=True)
class PlanOptions(InWorkspace, InDtype, EngineOptions):
    """Estimate memory, tokens, FLOPs and time of every stage on given hardware, before anything is loaded.

    Reads only the config of a model, or a recipe: spkv-nas plan --model config.json --hardware h100 --devices 8.
    Memory is the peak of one device; for a stage that does not fit, the output names what to change. Times are
    computed from FLOPs at an assumed share of a GPU's peak; to time real steps on this machine, use --dry-run with a
    recipe. For the KV cache and attention of a layout, see spkv-nas plan attention. With --engine, also lists the
    memory that the allocator of that serving engine plans for every number of global layers.
    """

    recipe: flags.OptionalRecipeFile = None
    model: flags.OptionalModel = flag.default(None, note="A config file is enough.")
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
    context: flags.OptionalContext = flag.default(None, LONGEST, note="Applies to generation.")
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
    kv_bytes: flags.KvBytes = flag.default(None, note="Applies to --engine.")


def check(options: PlanOptions) -> None:
    """Check that there is either a recipe or a model, and the options that go with it."""
    from spkv_nas.cost.stage_costs import find_hardware
    from spkv_nas.stages import checks, engines

    if (options.recipe is None) == (options.model is None):
        raise UserError("give either a recipe, or --model with a folder, an ID or a config file")
    if options.hardware is not None:
        find_hardware(options.hardware)
    if options.context is not None:
        units.parse_context(options.context)
    engines.check_engine_options(options, options.kv_bytes)
    if options.recipe is None:
        check_config(str(options.model))
        checks.check_text(options.data or ())
    elif options.data or options.block_size is not None or options.steps is not None:
        raise UserError(
            "the recipe sets the text, block size and steps: "
            "remove --data, --block-size and --steps"
        )
    else:
        checks.check_recipe(options.recipe)
