"""Commands ``cost``, ``plan``, ``calibrate`` and ``scaling``: what attention and training cost."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.cli import json_documents, show_plan
from spkv_nas.cli import show_cost as show
from spkv_nas.stages.options import CalibrateOptions, CostOptions, PlanOptions, ScalingOptions
from spkv_nas.stages.result import Result


def cost(options: CostOptions, reporter: Reporter) -> Result:
    """Print KV bytes, forward FLOPs and times per token of a level or model: full attention, layouts, a density.

    FLOPs are Kaplan's, 2 N + 2 L d_attn keys: the mean over a causal sequence as long
    as the context. Times are those of the attention of all layers: measured by spkv-nas calibrate, or the least that a
    GPU can take (its roofline).
    """
    from spkv_nas.stages import cost as stage

    return Result(stage.cost(options, reporter), show.cost, json_documents.cost)


def plan(options: PlanOptions, reporter: Reporter) -> Result:
    """Say what every stage takes on given hardware, before anything is loaded: memory, tokens, FLOPs, time.

    By the config of a model, or of a recipe's: spkv-nas plan --model config.json --hardware h100 --devices 8.
    Memory is that of one device at the peak, and where a stage does not fit it says what to change. Times are FLOPs at
    an assumed share of a GPU's peak; to have steps really tried on this machine, use --dry-run with a recipe.
    """
    from spkv_nas.stages import forecast as stage

    return Result(stage.plan(options, reporter), show_plan.forecast, json_documents.forecast)


def calibrate(options: CalibrateOptions, reporter: Reporter) -> Result:
    """Measure on this machine what attention takes, with 0 to all KV heads of a layer global.

    Writes reports/NAME/calibration.csv and .yaml, from which spkv-nas cost takes its times. Measured are 1k, 4k, 16k,
    ... tokens up to --context when decoding, in prefill only up to the longest at which one call takes at most some 4
    seconds. With --train-step nothing is written: it prints what a training step of a gated model takes.
    """
    from spkv_nas.stages import cost as stage

    if options.train_step:
        return Result(stage.time_training_step(options, reporter), show.training_steps)
    return Result(stage.calibrate(options, reporter), show.calibration, json_documents.calibration)


def scaling(options: ScalingOptions, reporter: Reporter) -> Result:
    """Fit the scaling law L(C) = L_inf + A C^-alpha. Writes reports/NAME/scaling.yaml and the figure.

    At least four runs of different compute per variant. Predicts the held-out runs, and the last one from the others.
    """
    from spkv_nas.stages import scaling as stage

    return Result(stage.scaling(options), show.scaling)
