"""What attention costs, the times that this machine needs for it, and what compute buys."""

from __future__ import annotations

from spkv_nas.cli import show_cost as show
from spkv_nas.cli.console import reporter, say_where
from spkv_nas.stages.options import CalibrateOptions, CostOptions, ScalingOptions


def cost(options: CostOptions) -> None:
    """Print KV bytes, forward FLOPs and times per token of a level or model: full attention, layouts, a density.

    FLOPs are Kaplan's, 2 N + 2 L d_attn keys: the mean over a causal sequence as long
    as the context. Times are those of the attention of all layers: measured by spkv-nas calibrate, or the least that a
    GPU can take (its roofline).
    """
    from spkv_nas.stages import cost as stage

    show.cost(stage.cost(options, reporter))
    if options.figure:
        say_where("figure", stage.draw_flops(options))


def calibrate(options: CalibrateOptions) -> None:
    """Measure on this machine what attention takes, with 0 to all KV heads of a layer global.

    Writes reports/NAME/calibration.csv and .yaml, from which spkv-nas cost takes its times. Measured are 1k, 4k, 16k,
    ... tokens up to --context when decoding, in prefill only up to the longest at which one call takes at most some 4
    seconds. With --train-step nothing is written: it prints what a training step of a gated model takes.
    """
    from spkv_nas.stages import cost as stage

    if options.train_step:
        show.training_steps(stage.time_training_step(options, reporter))
        return
    result = stage.calibrate(options, reporter)
    show.calibration(result)
    say_where("times", result.folder / "calibration.csv")


def scaling(options: ScalingOptions) -> None:
    """Fit the scaling law L(C) = L_inf + A C^-alpha. Writes reports/NAME/scaling.yaml and the figure.

    At least four runs of different compute per variant. Predicts the held-out runs, and the last one from the others.
    """
    from spkv_nas.stages import scaling as stage

    result = stage.scaling(options)
    for law in result.laws:
        show.scaling(result.name, law)
    say_where("scaling", result.figure or result.folder / "scaling.yaml")
