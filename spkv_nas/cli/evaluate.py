"""Commands ``evaluate``, ``score`` and ``baselines``: measure a checkpoint."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.cli import json_documents, show, show_evaluation
from spkv_nas.stages.options import BaselinesOptions, EvaluateOptions, ScoreOptions
from spkv_nas.stages.result import Result


def evaluate(options: EvaluateOptions, reporter: Reporter) -> Result:
    """Measure held-out NLL. With --tau-sweep: NLL against density as tau moves. Writes reports/NAME/tau-sweep.csv.

    Of any checkpoint, with or without gates. Without --data: the held-out standard library text of the embedded
    models. With --against: the difference to another checkpoint, paired by document; adds both to
    reports/NAME/evaluation.csv. Without these two no result is written; runs/NAME/blocks/ keeps the tokens of the text.
    With --ruler LENGTHS: the share of answers found in RULER's tasks, beside the floor, the same model with every head
    local. Writes reports/NAME/ruler.csv. With --tasks NAMES: downstream tasks of lm-eval. Writes
    reports/NAME/tasks.csv, and samples to runs/NAME/tasks/, which are not asked again. With --longppl: perplexity of
    tokens that need the long context. Writes reports/NAME/longppl.csv. NAME is by default that of the checkpoint's
    recipe.
    """
    if options.ruler is not None:
        from spkv_nas.stages.ruler import ruler

        return Result(ruler(options, reporter), show_evaluation.ruler)
    if options.tasks is not None:
        from spkv_nas.stages.tasks import tasks

        return Result(tasks(options, reporter), show_evaluation.tasks)
    if options.longppl:
        from spkv_nas.stages.longppl import longppl

        return Result(longppl(options, reporter), show_evaluation.longppl)
    from spkv_nas.stages import evaluate as stage

    return Result(stage.evaluate(options, reporter), show_evaluation.evaluation, json_documents.evaluation)


def score(options: ScoreOptions, reporter: Reporter) -> Result:
    """Score layouts without training: NLL of a checkpoint with each on it. Writes reports/NAME/zero-shot.csv.

    Of any checkpoint, dense or SP-KV. With --probe the table says the layouts' coverage too. Finished scores are kept
    in runs/NAME/zero-shot/ and not computed again.
    """
    from spkv_nas.stages import evaluate as stage

    return Result(stage.score(options, reporter), show.scores)


def baselines(options: BaselinesOptions, reporter: Reporter) -> Result:
    """Prune a dense model after the fact, by five rules at equal density. Writes reports/NAME/baselines.csv.

    streaming keeps sinks and the window alone; random, kvzap, h2o and expected-attention keep a share of the other keys
    too. With --against an SP-KV checkpoint is measured beside them. kvzap learns on other documents of the text.
    """
    from spkv_nas.stages import baselines as stage

    return Result(stage.baselines(options, reporter), show.baselines)
